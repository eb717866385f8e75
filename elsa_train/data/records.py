"""Images in ArrayRecord and TFRecord files, as TensorFlow Datasets writes them, without TensorFlow.

A record is a `tf.train.Example`: a protobuf of named features, of which two are read here.
"""

import hashlib
import json
import os
import re
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from elsa_train._errors import BadData, BadRecipe, MissingData
from elsa_train.data.images import Encoded, EncodedImages, Examples
from elsa_train.data.protocol import SPLITS, Split

NAME = re.compile(
    r"(?:.*[-_.])?(?P<split>train|validation|val|test)"
    r"(?P<kind>\.array_?records?|\.tfrecords?)?"
    r"(?:-(?P<shard>\d{5,})-of-(?P<shards>\d{5,}))?"
    r"(?P<end>\.array_?records?|\.tfrecords?)?"
)
KEYS = (("image", "label", 0), ("image/encoded", "image/class/label", 1))
"""Features of TensorFlow Datasets, and of the older ImageNet files, whose labels begin at 1."""
CLASSES = ("label.labels.txt", "labels.txt")
HEADER, FOOTER = 12, 4
"""Bytes around a TFRecord: its length and a checksum of that; a checksum of the data."""


def record_files(root: Path) -> dict[Split, list[Path]]:
    """Find the files of both splits in a folder; evaluation is on `validation` if there is one."""
    found: dict[str, list[tuple[Path, re.Match[str]]]] = {}
    for path in sorted(root.iterdir()) if root.is_dir() else []:
        match = NAME.fullmatch(path.name)
        if match and (match["kind"] or match["end"] or match["shards"]) and path.is_file():
            split = "validation" if match["split"] == "val" else match["split"]
            found.setdefault(split, []).append((path, match))
    for named in found.values():
        shards = {int(match["shards"]) for _, match in named if match["shards"]}
        if shards and (len(shards) > 1 or len(named) != max(shards)):
            raise MissingData(
                f"{root}: found {len(named)} files like {named[0][0].name}, expected {max(shards)}"
            )
    test = found.get("validation") or found.get("test") or []
    return {
        "train": [path for path, _ in found.get("train", [])],
        "test": [path for path, _ in test],
    }


class ImageRecords(EncodedImages):
    """Images in the record files of a folder."""

    def __init__(self, root: Path, files: dict[Split, list[Path]], image_size: int = 224) -> None:
        """Open the files."""
        for split in SPLITS:
            if not files[split]:
                name = "train" if split == "train" else "validation"
                raise MissingData(f"{root}: has no record files of the split {name!r}")
        examples: dict[Split, Examples] = {s: _Records(files[s]) for s in SPLITS}
        digest = hashlib.sha256()
        for path in (path for split in SPLITS for path in files[split]):
            digest.update(f"{path.name} {path.stat().st_size}\n".encode())
        identity = {
            "data_examples": [len(examples[split]) for split in SPLITS],
            "data_sha256": digest.hexdigest(),
        }
        super().__init__(examples, _count_classes(root), identity, image_size)


def _count_classes(root: Path) -> int:
    for name in CLASSES:
        if (root / name).is_file():
            return sum(bool(line.strip()) for line in (root / name).read_text("utf-8").splitlines())
    features = root / "features.json"
    if features.is_file():
        try:
            found = json.loads(features.read_text("utf-8"))
            label = found["featuresDict"]["features"]["label"]["classLabel"]
            return int(label["numClasses"])
        except (ValueError, KeyError, TypeError) as error:
            raise BadData(f"{features}: {type(error).__name__}: {error}") from None
    raise MissingData(
        f"{root}: has no {CLASSES[0]}, which names a class a line, nor a features.json"
    )


class _File(Protocol):
    """Records of a file by their places in it."""

    path: Path

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> bytes: ...


class _Records:
    """Records of several files, one after the other."""

    def __init__(self, paths: list[Path]) -> None:
        arrays = [".array" in path.name for path in paths]
        if any(arrays):
            _allow_files(len(paths))
        kinds = [_ArrayRecord if is_array else _TFRecord for is_array in arrays]
        with ThreadPoolExecutor(16) as pool:  # many small reads, which wait for the disk
            self._files: list[_File] = list(pool.map(lambda kind, path: kind(path), kinds, paths))
        self._ends = np.cumsum([len(file) for file in self._files])

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        _allow_files(len(self._files))

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Encoded:
        number = int(np.searchsorted(self._ends, index, "right"))
        file = self._files[number]
        place = index - int(self._ends[number]) + len(file)
        name = f"{file.path}: record {place}"
        features = dict(_features(memoryview(file[place]), name))
        for image, label, first in KEYS:
            if image in features and label in features:
                return Encoded(
                    bytes(_bytes_of(features[image], name)),
                    _integer_of(features[label], name) - first,
                    name,
                )
        raise BadData(f"{name}: has features {sorted(features)}, expected 'image' and 'label'")


class _ArrayRecord:
    """A file of the package array_record, which has an index; opened when it is read."""

    def __init__(self, path: Path) -> None:
        self.path, self._reader = path, None
        self._size = int(self._open().num_records())

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_reader": None}

    def _open(self) -> Any:
        if self._reader is None:
            try:
                from array_record.python.array_record_module import ArrayRecordReader
            except ImportError:
                raise BadRecipe(
                    f"{self.path} needs array-record; run: pip install 'elsa-format[records]'"
                ) from None
            reader = ArrayRecordReader(str(self.path), options="readahead_buffer_size:0")
            if not reader.ok() or not reader.num_records():
                raise BadData(f"{self.path}: not an ArrayRecord file")
            self._reader = reader
        return self._reader

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> bytes:
        try:
            (record,) = self._open().read([index])
        except (RuntimeError, ValueError) as error:
            raise BadData(f"{self.path}: record {index}: {error}") from None
        return bytes(record)


class _TFRecord:
    """A file of records each after its length: found once, by going from one to the next."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._starts: NDArray[np.int64] = np.array(list(_starts(path)), np.int64)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, index: int) -> bytes:
        start = int(self._starts[index]) + HEADER
        with open(self.path, "rb", buffering=0) as file:
            file.seek(start)
            return file.read(int(self._starts[index + 1]) - FOOTER - start)


def _starts(path: Path) -> Iterator[int]:
    """Yield where each record begins, and where the last ends."""
    place, end = 0, path.stat().st_size
    with open(path, "rb", buffering=0) as file:
        while place < end:
            yield place
            file.seek(place)
            header = file.read(8)
            place += HEADER + FOOTER
            if len(header) < 8 or place + (length := struct.unpack("<Q", header)[0]) > end:
                raise BadData(f"{path}: ends within a record, or is no TFRecord file")
            place += length
    if not end:
        raise BadData(f"{path}: is empty")
    yield end


def _allow_files(count: int) -> None:
    """Raise the number of files that may be open: an ArrayRecord file stays so."""
    try:
        import resource
    except ImportError:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * count + 512
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _features(example: memoryview, name: str) -> Iterator[tuple[str, memoryview]]:
    """Yield the named features of an Example: its field 1, whose fields 1 are entries of a map."""
    for features in _fields(example, 1, name):
        for entry in _fields(features, 1, name):
            for key in _fields(entry, 1, name):
                for value in _fields(entry, 2, name):
                    yield os.fsdecode(bytes(key)), value


def _bytes_of(feature: memoryview, name: str) -> memoryview:
    """Return the first of a list of byte strings."""
    for listed in _fields(feature, 1, name):
        for value in _fields(listed, 1, name):
            return value
    raise BadData(f"{name}: its image is no byte string")


def _integer_of(feature: memoryview, name: str) -> int:
    """Return the first of a list of integers, packed or not."""
    for listed in _fields(feature, 3, name):
        for field, kind, value in _wire(listed, name):
            if field == 1:
                return value if kind == 0 else _varint(value, 0, name)[0]
    raise BadData(f"{name}: its label is no integer")


def _fields(message: memoryview, wanted: int, name: str) -> Iterator[memoryview]:
    """Yield the values of a field that have a length."""
    for field, kind, value in _wire(message, name):
        if field == wanted and kind == 2:
            yield value


def _wire(message: memoryview, name: str) -> Iterator[tuple[int, int, Any]]:
    """Yield number, wire type and value of each field of a protobuf message."""
    place = 0
    while place < len(message):
        tag, place = _varint(message, place, name)
        kind = tag & 7
        if kind == 0:
            value, place = _varint(message, place, name)
            yield tag >> 3, kind, value
            continue
        if kind == 2:
            length, place = _varint(message, place, name)
        elif kind in (1, 5):
            length = 8 if kind == 1 else 4
        else:
            raise BadData(f"{name}: not a tf.train.Example")
        if place + length > len(message):
            raise BadData(f"{name}: not a tf.train.Example")
        yield tag >> 3, kind, message[place : place + length]
        place += length


def _varint(message: memoryview, place: int, name: str) -> tuple[int, int]:
    """Return an integer of seven bits a byte, and the place after it."""
    value = 0
    for shift in range(0, 70, 7):
        if place >= len(message):
            break
        byte = message[place]
        place += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, place
    raise BadData(f"{name}: not a tf.train.Example")
