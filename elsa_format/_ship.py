"""Make delivery files of ELSA files: read once, checked and coded at the same time."""

import contextlib
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from elsa_format._container.index import Index, is_index
from elsa_format._container.json import dump
from elsa_format._container.listing import NAME as LISTING
from elsa_format._delivery.document import BLOCK, BLOCKS, SUFFIX, header_bytes
from elsa_format._delivery.encoder import Encoder
from elsa_format._errors import InvalidOption
from elsa_format._network import open_network
from elsa_format._options import check_int
from elsa_format._output import (
    Output,
    Target,
    UnnamedOutput,
    is_special,
    open_output,
    open_unnamed,
)
from elsa_format._output.directory import InDirectory, in_directory
from elsa_format._output.shards import sibling
from elsa_format._output.together import commit_together
from elsa_format._profile import LevelNumber
from elsa_format._storage import Source
from elsa_format._storage.directory import SHIP, weights_file
from elsa_format._storage.shards import read_index
from elsa_format._threads import Meter, Progress, no_progress
from elsa_format._verify import NetworkCheck


@dataclass(frozen=True)
class ShipReport:
    """What was written.

    >>> ship("net.safetensors", "again.ship.safetensors").sizes["dense"] < 42000
    True
    """

    sizes: dict[LevelNumber, int]
    """How many of the first bytes each level needs; of all shards together."""
    source: int
    """Bytes of the ELSA file, or of all shards."""
    files: tuple[str, ...]
    """What was written, the index last; empty for a stream."""


def ship(
    source: Source,
    target: Target,
    *,
    block: int = BLOCK,
    split: bool = False,
    jobs: int = 1,
    max_bytes: int | None = None,
    force: bool = False,
    progress: Progress = no_progress,
) -> ShipReport:
    """Make a delivery file of an ELSA file, which is read once, and verified on the way.

    A source that is an index needs a target that is one: each shard becomes a delivery file. A
    model directory gives a directory, with `model.ship.safetensors`, its side files, and a list
    of them, `elsa-files.json`, which `fetch` goes by where directories cannot be listed.
    `split` writes the header with the head, and each part, as files of their own, for hosts
    without range requests: `cat target.part-*` is the delivery file. `block` is log₂ of the words
    in a block. A network of more than `max_bytes` is refused from the header alone.

    >>> report = ship("net.safetensors", "new.ship.safetensors")
    >>> list(report.sizes), report.sizes[1] < report.source / 10
    ([1, 2, 3, 'dense'], True)
    """
    if check_int("block", block, low=0) not in BLOCKS:
        raise InvalidOption(f"block is {block}, expected {BLOCKS.start}..{BLOCKS.stop - 1}")
    jobs = check_int("jobs", jobs, low=1)
    target = in_directory(source, target, variant=SHIP)
    source = weights_file(source)
    if is_index(source) != is_index(target):
        raise InvalidOption("an index is shipped to an index, and a file to a file")
    if split and (not isinstance(target, str | os.PathLike) or is_special(target)):
        raise InvalidOption("the parts of a stream cannot be files of their own")
    with contextlib.ExitStack() as stack:
        network = stack.enter_context(open_network(source, along=True, max_bytes=max_bytes))
        network.need_levels()
        index = read_index(source)[0] if is_index(source) else None
        outputs = _Outputs(target, index, split, force, stack)
        meter, check = Meter(progress, network.header.data_size), NetworkCheck(network)
        made = []
        for file in network.files:
            shard = "" if index is None else index.weight_map[next(iter(file.header.tensors))]
            with Encoder(file.header, file.profile, block, jobs) as encoder:
                check.file(file, meter.tick, encoder.take)
                encoder.finish()
                made.append(_write(encoder, block, outputs, shard))
        check.finish()
        outputs.commit(progress)
    sizes = {level: sum(one[level] for one in made) for level in made[0]}
    return ShipReport(sizes, network.file_size, tuple(outputs.names))


def _write(encoder: Encoder, block: int, outputs: "_Outputs", shard: str) -> dict[LevelNumber, int]:
    """Write a delivery file; how many of its first bytes each level needs."""
    head, levels = zlib.compress(encoder.head, 9), encoder.levels
    sizes = [len(head), *(encoder.size(part) for part in range(1, levels + 2))]
    checksum = f"xxh3:{xxhash.xxh3_64_hexdigest(head)}"
    start = header_bytes(block, sizes, len(encoder.head), checksum)
    outputs.begin(shard, levels)
    outputs.write(start)
    outputs.write(head)
    for part in range(1, levels + 2):
        outputs.next_part()
        for piece in encoder.read(part):
            outputs.write(piece)
    ends = np.cumsum([len(start), *sizes])[2:].tolist()
    numbers: list[LevelNumber] = [*range(1, levels + 1), "dense"]
    return dict(zip(numbers, ends, strict=True))


def delivery_name(shard: str) -> str:
    """The delivery file of a shard (ELSA-D-042).

    >>> delivery_name("model-00001-of-00002.safetensors")
    'model-00001-of-00002.ship.safetensors'
    """
    return shard.removesuffix(".safetensors") + SUFFIX


def part_names(target: str | os.PathLike[str], levels: int) -> list[str]:
    """The files that a delivery file is split into: in the order of their names.

    >>> part_names("net.ship.safetensors", 1)[-1]
    'net.ship.safetensors.part-002'
    """
    return [f"{os.fspath(target)}.part-{number:03}" for number in range(levels + 2)]


class _Outputs:
    """Where delivery files go: one, or those of shards and their index; each perhaps in parts."""

    def __init__(
        self,
        target: Target,
        index: Index | None,
        split: bool,
        force: bool,
        stack: contextlib.ExitStack,
    ) -> None:
        self._target, self._index, self._split, self._force = target, index, split, force
        self._stack = stack
        self._files: list[UnnamedOutput] = []
        self._stream: Output | None = None
        self._position = 0
        self._waiting: list[UnnamedOutput] = []
        self._index_file: UnnamedOutput | None = None
        self._before: list[UnnamedOutput] = []
        if isinstance(target, InDirectory):
            copies = stack.enter_context(target.side_files(force=force))
            listed = self._file(target.place(LISTING))
            listed.write_at(0, target.listing().to_bytes())
            self._before = [*copies, listed]
        if index is not None:
            self._index_file = self._file(os.fspath(target))  # type: ignore[arg-type]
            for name in index.files:
                self._check(self._path(name))
        elif isinstance(target, str | os.PathLike) and not is_special(target):
            if not split:
                self._waiting = [self._file(os.fspath(target))]
        else:
            self._stream = stack.enter_context(open_output(target, in_order=True))

    def _file(self, path: str) -> UnnamedOutput:
        alone = self._index is None and not self._split  # others wait, in memory if in order
        file = open_unnamed(path, force=self._force, in_order=alone, beside=self._index_file)
        self._stack.callback(file.discard)
        return file

    def _path(self, shard: str) -> str:
        assert isinstance(self._target, str | os.PathLike)
        return os.fspath(sibling(self._target, delivery_name(shard)))

    def _check(self, path: str) -> None:
        """Refuse at once, not when all has been coded."""
        if not self._force:
            open_unnamed(path, beside=self._index_file).discard()

    @property
    def names(self) -> list[str]:
        """The files, the index last."""
        index = [self._index_file] if self._index_file else []
        return [file.name for file in (*self._files, *index)]

    def begin(self, shard: str, levels: int) -> None:
        """Go on to the next delivery file, that of a shard if there is an index."""
        if self._stream is not None:
            return
        if self._index is not None or self._split:
            name = os.fspath(self._target)  # type: ignore[arg-type]
            if self._index is not None:
                name = self._path(shard)
            names = part_names(name, levels) if self._split else [name]
            self._waiting = [self._file(path) for path in names]
        self._open()

    def _open(self) -> None:
        self._files.append(self._waiting.pop(0))
        self._position = 0

    def next_part(self) -> None:
        """What follows is another part."""
        if self._split:
            self._open()

    def write(self, data: Any) -> None:
        """Write at the end."""
        (self._stream or self._files[-1]).write_at(self._position, data)
        self._position += memoryview(data).nbytes

    def commit(self, progress: Progress) -> None:
        """Let everything appear."""
        if self._stream is not None:
            self._stream.commit()
        elif self._index is None or self._index_file is None:
            commit_together([*self._before, *self._files], progress=progress)
        else:
            weight_map = {n: delivery_name(f) for n, f in self._index.weight_map.items()}
            document: dict[str, Mapping[str, Any]] = {
                "metadata": self._index.metadata,
                "weight_map": weight_map,
            }
            text = dump({key: dict(sorted(value.items())) for key, value in document.items()})
            self._index_file.write_at(0, text.encode())
            files = [*self._before, *self._files, self._index_file]
            commit_together(files, renew=self._force, progress=progress)
