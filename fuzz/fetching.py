"""Fetches: whatever a source serves and an output holds, what was downloaded before stays.

The first bytes choose what the output holds, what is asked for and how the source fails; then comes
what it serves: a delivery file, or one file of a network in shards.
"""

import random
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

from internals import PositionedStorage, _copy, open_network

import elsa_format as elsa
from elsa_format import RemoteError
from fuzz.mutate import mutate as mutate_file
from spec import plain_delivery, plain_elsa

CHOICES = 9
VECTORS = Path(__file__).resolve().parents[1] / "spec" / "vectors" / "valid" / "delivery"
INDEX = "model.ship.safetensors.index.json"
URL = "http://fuzz.example/net.ship.safetensors"
WISHES: tuple[dict[str, Any], ...] = (
    *({"level": 1}, {"level": 2}, {"level": "dense"}, {"level": 9}, {"sparsity": 50}),
    *({"upgrade": 1}, {"upgrade": "dense"}, {"max_size": 700}, {"max_size": 5000}),
)
FORCE, REMOTE, UNKNOWN, BREAKS = 1, 2, 4, 8


@cache
def files() -> tuple[bytes, ...]:
    """Delivery files to start from."""
    found = [path.read_bytes() for path in sorted(VECTORS.glob("*.ship.safetensors"))]
    return tuple(raw for raw in found if len(raw) < 6000)


@cache
def shards() -> dict[str, bytes]:
    """A network in shards, with its index."""
    return {path.name: path.read_bytes() for path in sorted((VECTORS / "sharded").iterdir())}


def seeds() -> list[bytes]:
    """Every file with some choices, and every shard."""
    rng, found = random.Random(0), []
    for number, raw in enumerate(files()):
        for _ in range(4):
            found.append(bytes([0, *rng.randbytes(7), number]) + raw)
    for number, raw in enumerate(shards().values(), 5):
        for _ in range(8):
            found.append(bytes([number, *rng.randbytes(7), 0]) + raw)
    return found


def mutate(data: bytes, rng: random.Random, others: tuple[bytes, ...]) -> bytes:
    """Other choices, or another file."""
    choices, raw = data[:CHOICES].ljust(CHOICES, b"\0"), data[CHOICES:]
    if rng.random() < 0.8:
        choices = choices[:1] + rng.randbytes(CHOICES - 2) + choices[-1:]
    if rng.random() < 0.4:
        raw = mutate_file(raw, rng, [other[CHOICES:] for other in others])
    return choices + raw


class _Source(PositionedStorage):
    """A server: it need not say how long its file is, and may break off."""

    high_latency = True

    def __init__(self, raw: bytes, known: bool, stop: int) -> None:
        self.name, self.size, self._raw, self._stop = URL, len(raw) if known else None, raw, stop

    def read_at(self, position: int, view: memoryview) -> int:
        """At most 251 bytes, or an error."""
        if position >= self._stop:
            raise RemoteError(f"{URL}: the connection broke")
        data = self._raw[position : min(position + min(len(view), 251), self._stop)]
        view[: len(data)] = data
        return len(data)


def fetching(data: bytes) -> None:
    """One fetch, and what must hold afterwards."""
    choices, raw = data[:CHOICES].ljust(CHOICES, b"\0"), data[CHOICES:]
    with tempfile.TemporaryDirectory(dir=_memory()) as folder:
        if choices[0] % 8 < 5:
            _file(choices, raw, Path(folder))
        else:
            _shards(choices, raw, Path(folder))


def _memory() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def _at(choice: int, raw: bytes) -> int:
    """A place in bytes."""
    return choice * len(raw) // 255


def _flipped(raw: bytes, at: int) -> bytes:
    changed = bytearray(raw)
    if changed:
        changed[min(at, len(raw) - 1)] ^= 1 + at % 128
    return bytes(changed)


def _served(choices: bytes, raw: bytes) -> bytes:
    at = _at(choices[7], raw)
    return (raw, raw, raw[:at], raw + b"\0" * (at % 9 + 1), _flipped(raw, at))[choices[6] % 5]


def _local(choices: bytes, served: bytes) -> bytes | None:
    """What the output holds before, if it exists."""
    pristine = files()[choices[8] % len(files())]
    kinds = (
        *(None, None, pristine, pristine, served, _flipped(pristine, _at(choices[3], pristine))),
        *(files()[choices[3] % len(files())], served[::-1]),
    )
    kind = kinds[choices[1] % len(kinds)]
    return None if kind is None else kind[: _at(choices[2], kind)]


def _file(choices: bytes, raw: bytes, folder: Path) -> None:
    served = _served(choices, raw)
    local = _local(choices, served)
    out = folder / "out"
    if local is not None:
        out.write_bytes(local)
    with _source(choices, served, folder) as source:
        error, report = _fetch(source, out, choices)
    if sorted(path.name for path in folder.iterdir()) != ["out"] * out.exists():
        raise AssertionError(f"files are left: {sorted(folder.iterdir())}")
    after = out.read_bytes() if out.exists() else None
    breaks = choices[5] & REMOTE and choices[5] & (UNKNOWN | BREAKS)
    if report is not None:
        assert after is not None
        _check_success(out, report, after)
    elif after is not None and local is None and not breaks and not _is_begun(after, served):
        raise AssertionError(f"{error} leaves {len(after)} bytes")
    if after is None:
        if local is not None:
            raise AssertionError("the output is gone")
    else:
        _check_kept(local or b"", after, served, force=bool(choices[5] & FORCE))


def _is_begun(after: bytes, served: bytes) -> bool:
    """Whether a new output holds a valid level: only a part behind it was found wrong then."""
    return bool(after) and valid_length(after) == len(after) and served.startswith(after)


def _check_success(out: Path, report: elsa.FetchReport, after: bytes) -> None:
    if report.size != len(after):
        raise AssertionError(f"a report of {report.size} bytes, there are {len(after)}")
    with elsa.open_delivery(out) as delivery:
        if delivery.available[-1] != report.available:
            raise AssertionError(f"{delivery.available}, but {report.available} was reported")
        if valid_length(after) < delivery.downloads[report.level]:
            raise AssertionError("the level is not valid")


def _check_kept(before: bytes, after: bytes, served: bytes, *, force: bool) -> None:
    """Every byte is one that was there or one that is served; what was valid is there still."""
    for at, byte in enumerate(after):
        if byte not in (*before[at : at + 1], *served[at : at + 1]):
            raise AssertionError(f"a new byte at {at}")
    related = before[: _header(served)] == served[: min(len(before), _header(served))]
    if after != before and not force and not related:
        raise AssertionError("another network was overwritten")
    valid = valid_length(before) if related else 0
    if after[:valid] != before[:valid] or len(after) < valid:
        raise AssertionError(f"of {valid} valid bytes {len(after)} are left")
    complete = _complete_length(before, served) if related else 0
    if len(after) < complete:
        raise AssertionError(f"of {complete} bytes of complete parts {len(after)} are left")


def _header(raw: bytes) -> int:
    return 8 + int.from_bytes(raw[:8], "little")


def _complete_length(before: bytes, served: bytes) -> int:
    """Where the last complete part of an output ends, damaged or not."""
    try:
        opened = plain_delivery.Delivery(served)
    except plain_elsa.Bad:
        return 0
    ends = [len(served) - len(opened.data) + end for end in opened.ends]
    return max((end for end in ends if end <= len(before) <= ends[-1]), default=0)


def valid_length(raw: bytes) -> int:
    """How many of the first bytes the specification calls valid: header, head, complete parts."""
    try:
        opened = plain_delivery.Delivery(raw)
    except plain_elsa.Bad:
        return 0
    start = len(raw) - len(opened.data)
    for part in range(1, opened.parts_there + 1):
        try:
            opened.payloads(part)
        except plain_elsa.Bad:
            return start + opened.ends[part - 1]
    return start + opened.ends[opened.parts_there]


@contextmanager
def _source(choices: bytes, served: bytes, folder: Path) -> Iterator[str | Path]:
    if not choices[5] & REMOTE:
        with tempfile.NamedTemporaryFile(dir=folder.parent) as file:
            file.write(served)
            file.flush()
            yield Path(file.name)
        return
    stop = _at(choices[3], served) if choices[5] & BREAKS else 1 << 60

    def opened(*_: object) -> _Source:
        return _Source(served, not choices[5] & UNKNOWN, stop)

    with (
        mock.patch.object(_copy, "open_url", opened),
        mock.patch.object(_copy, "open_storage", opened),
    ):
        yield URL


def _fetch(
    source: str | Path, out: Path, choices: bytes
) -> tuple[elsa.ElsaError | None, elsa.FetchReport | None]:
    wish = WISHES[choices[4] % len(WISHES)]
    try:
        return None, elsa.fetch(source, out, force=bool(choices[5] & FORCE), **wish)
    except elsa.ElsaError as error:
        if not str(error).isprintable():
            raise AssertionError(f"message {error!r}") from error
        return error, None


def _shards(choices: bytes, raw: bytes, folder: Path) -> None:
    """One file of a network in shards is another: all of it opens afterwards, or nothing is new."""
    here, there = folder / "here", folder / "there"
    here.mkdir()
    there.mkdir()
    for number, (name, good) in enumerate(shards().items(), 5):
        (there / name).write_bytes(_served(choices, raw) if choices[0] % 8 == number else good)
        if choices[1] % 4 == 3:
            (here / name).write_bytes(good if name == INDEX else good[: _at(choices[2], good)])
    before = {path.name: path.read_bytes() for path in here.iterdir()}
    error, report = _fetch(there / INDEX, here / INDEX, choices)
    after = {path.name: path.read_bytes() for path in here.iterdir()}
    if report is not None:
        with open_network(here / INDEX) as network:
            densest = network.available[-1]
        if densest != report.available:
            raise AssertionError(f"{densest} is there, {report.available} was reported")
    elif not isinstance(error, elsa.ChecksumMismatch | elsa.InvalidDelivery) and after != before:
        # Only what turns out wrong while it is downloaded leaves the index and other shards.
        raise AssertionError(f"{error!r} leaves {sorted(after.keys() - before.keys())}")
    if before.keys() - after.keys():
        raise AssertionError(f"gone: {sorted(before.keys() - after.keys())}")
    for name in before.keys() - {INDEX}:
        served = (there / name).read_bytes()
        _check_kept(before[name], after[name], served, force=bool(choices[5] & FORCE))
    shutil.rmtree(folder / "here")
