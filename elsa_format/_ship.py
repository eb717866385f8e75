"""Make delivery files of ELSA files: blocks are coded in one pass, then put in order."""

import contextlib
import os
import sys
import tempfile
import zlib
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import xxhash

from elsa_format._container.header import Header, check_size, read_header
from elsa_format._container.index import Index, is_index, is_url
from elsa_format._container.json import dump
from elsa_format._delivery.codec import Bytes, encode_nested, encode_plain
from elsa_format._delivery.document import BLOCK, BLOCKS, SUFFIX, header_bytes
from elsa_format._delivery.payloads import CHECKSUM, SIZE, index_bytes
from elsa_format._delivery.sequences import Plan, Sequence
from elsa_format._errors import InvalidOption, NotElsa, OutputExists, Truncated
from elsa_format._level_network import LevelNetwork
from elsa_format._memory import aligned
from elsa_format._open import open_network
from elsa_format._options import whole
from elsa_format._output import Output, Target, is_special, open_output
from elsa_format._output.atomic import AtomicFile, commit_together
from elsa_format._output.directory import InDirectory, in_directory
from elsa_format._profile import LevelNumber, Profile
from elsa_format._profile import parse as parse_profile
from elsa_format._storage import Source, Storage, fill, open_storage
from elsa_format._storage.directory import SHIP, weights_file
from elsa_format._storage.local import FileStorage
from elsa_format._storage.shards import read_index
from elsa_format._threads import Meter, Progress, no_progress, run
from elsa_format._verify import verify

COPIED = 1 << 20
"""Bytes copied at a time."""
AHEAD = 2
"""Blocks that each thread codes before they are put away, in order."""


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
    force: bool = False,
    progress: Progress = no_progress,
) -> ShipReport:
    """Make a delivery file of an ELSA file, which is verified first.

    A source that is an index needs a target that is one: each shard becomes a delivery file. A
    model directory gives a directory, with `model.ship.safetensors` and its side files.
    `split` writes the header with the head, and each part, as files of their own, for hosts
    without range requests: `cat target.part-*` is the delivery file. `block` is log₂ of the words
    in a block.

    >>> report = ship("net.safetensors", "new.ship.safetensors")
    >>> list(report.sizes), report.sizes[1] < report.source / 10
    ([1, 2, 3, 'dense'], True)
    """
    if whole("block", block, low=0) not in BLOCKS:
        raise InvalidOption(f"block is {block}, expected {BLOCKS.start}..{BLOCKS.stop - 1}")
    jobs = whole("jobs", jobs, low=1)
    target = in_directory(source, target, variant=SHIP)
    source = weights_file(source)
    if is_index(source) != is_index(target):
        raise InvalidOption("an index is shipped to an index, and a file to a file")
    if split and (not isinstance(target, str | os.PathLike) or is_special(target)):
        raise InvalidOption("the parts of a stream cannot be files of their own")
    with contextlib.ExitStack() as stack:
        path = stack.enter_context(_local(source))
        with open_network(path) as network:
            if isinstance(network, LevelNetwork):
                raise NotElsa(f"{network.name}: is a level, not a network that holds levels")
            meter = Meter(progress, 2 * network.header.data_size)
        verified = 0

        def tell(done: int, total: int) -> None:
            nonlocal verified
            verified, step = done, done - verified
            meter.tick(step)

        verify(path, jobs=jobs, progress=tell)
        index, files = (None, [path]) if not is_index(path) else _shards(path)
        outputs = _Outputs(target, index, split, force, stack)
        made = []
        for number, file in enumerate(files):
            made.append(_ship_file(file, block, jobs, meter, outputs, number))
        outputs.commit()
    sizes = {level: sum(one.sizes[level] for one in made) for level in made[0].sizes}
    return ShipReport(sizes, sum(one.source for one in made), tuple(outputs.names))


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


@contextlib.contextmanager
def _local(source: Source) -> Iterator[Path]:
    """A path to a source that is read twice: what comes from elsewhere is brought here once."""
    remote = not isinstance(source, str | os.PathLike) or is_url(source)
    if not remote and (os.path.isfile(source) or not os.path.exists(source)):  # type: ignore[arg-type]
        yield Path(source)  # type: ignore[arg-type]
        return
    with tempfile.TemporaryDirectory(prefix="elsa-") as folder:
        if is_index(source):
            raise InvalidOption(
                f"{source}: an index has to be a file here, with its shards beside it"
            )
        path = Path(folder, "source.safetensors")
        storage = open_storage(source)
        with contextlib.closing(storage), path.open("wb", buffering=0) as file:
            end = sys.maxsize if storage.size is None else storage.size
            with contextlib.closing(storage.reader(0, end)) as reader:
                while data := reader.read(COPIED):
                    _write_all(file, data)
        yield path


def _write_all(file: Any, data: Any) -> None:
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def _shards(path: Path) -> tuple[Index, list[Path]]:
    index, _ = read_index(path)
    return index, [path.parent / name for name in index.files]


@dataclass(frozen=True)
class _Made:
    sizes: dict[LevelNumber, int]
    source: int


class _Spool:
    """Payloads in the order in which they are coded, on disk, and where each of them is."""

    def __init__(self, parts: int, seed: int) -> None:
        self._file: IO[bytes] = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - see close
        self._seed, self._end = seed, 0
        self._positions = [array("Q") for _ in range(parts)]
        self._sizes = [array("I") for _ in range(parts)]

    def add(self, part: int, payload: Bytes) -> None:
        """Put the next payload of a part away, with its checksum unless it is empty."""
        self._positions[part - 1].append(self._end)
        self._sizes[part - 1].append(payload.size)
        if payload.size:
            checksum = xxhash.xxh3_64_intdigest(payload.data, seed=self._seed)
            _write_all(self._file, checksum.to_bytes(CHECKSUM, "little"))
            _write_all(self._file, payload)
            self._end += CHECKSUM + payload.size

    def size(self, part: int) -> int:
        """Bytes of a part."""
        sizes = np.array(self._sizes[part - 1], np.uint32)
        checksums = CHECKSUM * int(np.count_nonzero(sizes))
        return SIZE * sizes.size + checksums + int(sizes.sum(dtype=np.int64))

    def read(self, part: int) -> Iterator[Any]:
        """A part in pieces: the index, then the payloads (ELSA-D-015)."""
        sizes = self._sizes[part - 1]
        for at in range(0, len(sizes), 1 << 16):
            yield index_bytes(np.array(sizes[at : at + (1 << 16)], np.uint32))
        for position, size in zip(self._positions[part - 1], sizes, strict=True):
            self._file.seek(position)
            left = size + CHECKSUM if size else 0
            while left:
                data = self._file.read(min(left, COPIED))
                yield data
                left -= len(data)

    def close(self) -> None:
        """Forget them."""
        self._file.close()


def _ship_file(
    path: Path, block: int, jobs: int, meter: Meter, outputs: "_Outputs", number: int
) -> _Made:
    with contextlib.closing(FileStorage(path)) as storage:
        header = read_header(storage.front(), storage.name)
        profile = parse_profile(header, storage.name)
        check_size(header, storage.size, storage.name)
        head = len(header.raw).to_bytes(8, "little") + header.raw
        deflated = zlib.compress(head, 9)
        plan, levels = Plan(header, profile, block), len(profile.levels)
        spool = _Spool(levels + 1, xxhash.xxh3_64_intdigest(head))
        with contextlib.closing(spool):
            _encode(storage, header, profile, plan, spool, jobs, meter)
            storage.check_unchanged()
            sizes = [len(deflated), *(spool.size(part) for part in range(1, levels + 2))]
            checksum = f"xxh3:{xxhash.xxh3_64_hexdigest(deflated)}"
            start = header_bytes(block, sizes, len(head), checksum)
            outputs.begin(number, levels)
            outputs.write(start)
            outputs.write(deflated)
            for part in range(1, levels + 2):
                outputs.next_part()
                for piece in spool.read(part):
                    outputs.write(piece)
    ends = np.cumsum([len(start), *sizes])[2:].tolist()
    names: list[LevelNumber] = [*range(1, levels + 1), "dense"]
    return _Made(dict(zip(names, ends, strict=True)), header.data_start + header.data_size)


def _encode(
    storage: Storage,
    header: Header,
    profile: Profile,
    plan: Plan,
    spool: _Spool,
    jobs: int,
    meter: Meter,
) -> None:
    """Code all blocks; those of a part come in the order of its index."""
    levels = len(profile.levels)

    def words_of(sequence: Sequence, number: int) -> Any:
        words = aligned(sequence.size(number) * sequence.words.itemsize)
        at = 0
        for info, start, size in sequence.pieces(number):
            begin = header.data_start + info.start + start
            with contextlib.closing(storage.reader(begin, begin + size)) as reader:
                if missing := fill(reader, words[at : at + size].data):
                    raise Truncated(f"{storage.name}: ends {missing} bytes early")
            at += size
        return words.view(sequence.words)

    def plain(item: tuple[Sequence, int]) -> list[Bytes]:
        words = words_of(*item)
        payload = encode_plain(words, item[0].dtype)
        meter.tick(words.nbytes)
        return [payload]

    def nested(item: tuple[Sequence, int]) -> list[Bytes]:
        words = words_of(*item)
        payloads = encode_nested(words, item[0].dtype, profile.bits, levels)
        meter.tick(words.nbytes)
        return payloads

    for part in range(1, levels + 2):
        for sequence in plan.plain[part - 1]:
            for coded in _in_order(plain, sequence, jobs):
                spool.add(part, coded[0])
    for sequence in plan.nested:
        for coded in _in_order(nested, sequence, jobs):
            for part, payload in enumerate(coded, 1):
                spool.add(part, payload)


def _in_order(function: Any, sequence: Sequence, jobs: int) -> Iterator[list[Bytes]]:
    step = 1 if jobs == 1 else AHEAD * jobs
    for first in range(0, sequence.blocks, step):
        stop = min(first + step, sequence.blocks)
        yield from run(function, [(sequence, number) for number in range(first, stop)], jobs)


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
        self._files: list[AtomicFile] = []
        self._stream: Output | None = None
        self._position = 0
        self._waiting: list[AtomicFile] = []
        self._index_file: AtomicFile | None = None
        self._before: list[AtomicFile] = []
        if isinstance(target, InDirectory):
            self._before = stack.enter_context(target.side_files(force=force))
        if index is not None:
            self._index_file = self._file(os.fspath(target))  # type: ignore[arg-type]
            for name in index.files:
                self._check(self._path(name))
        elif isinstance(target, str | os.PathLike) and not is_special(target):
            if not split:
                self._waiting = [self._file(os.fspath(target))]
        else:
            self._stream = stack.enter_context(open_output(target, in_order=True))

    def _file(self, path: str) -> AtomicFile:
        file = AtomicFile(path, force=self._force)
        self._stack.callback(file.discard)
        return file

    def _path(self, shard: str) -> str:
        assert isinstance(self._target, str | os.PathLike)
        return str(Path(self._target).parent / delivery_name(shard))

    def _check(self, path: str) -> None:
        """Refuse at once, not when all has been coded."""
        if not self._force and os.path.exists(path):
            raise OutputExists(f"{path}: exists already", "{force} replaces it", force=True)

    @property
    def names(self) -> list[str]:
        """The files, the index last."""
        index = [self._index_file] if self._index_file else []
        return [file.name for file in (*self._files, *index)]

    def begin(self, number: int, levels: int) -> None:
        """Go on to the next delivery file."""
        if self._stream is not None:
            return
        if self._index is not None or self._split:
            name = os.fspath(self._target)  # type: ignore[arg-type]
            if self._index is not None:
                name = self._path(self._index.files[number])
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

    def commit(self) -> None:
        """Let everything appear."""
        if self._stream is not None:
            self._stream.commit()
        elif self._index is None or self._index_file is None:
            commit_together([*self._before, *self._files])
        else:
            weight_map = {n: delivery_name(f) for n, f in self._index.weight_map.items()}
            document: dict[str, Mapping[str, Any]] = {
                "metadata": self._index.metadata,
                "weight_map": weight_map,
            }
            text = dump({key: dict(sorted(value.items())) for key, value in document.items()})
            self._index_file.write_at(0, text.encode())
            old = self._index_file.path if self._force else None
            files = [*self._before, *self._files, self._index_file]
            commit_together(files, instead_of=old)
