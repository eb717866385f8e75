"""The properties. Each target takes any bytes; whatever it raises is a finding.

Our parser is compared with the safetensors library and with `spec.plain_elsa`, the second
implementation of the specification.
"""

import contextlib
import io
import os
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import IO, Any, TypeVar, cast

import numpy as np
import safetensors
from internals import _header, check_size

import elsa_format as elsa
from fuzz.answers import answers
from fuzz.delivery import delivery
from fuzz.fetching import fetching
from fuzz.integers import integers
from fuzz.kernels import kernels
from fuzz.seeds import VECTORS
from spec import plain_elsa as plain

T = TypeVar("T")

by_safetensors: Callable[[bytes], list[tuple[str, dict[str, Any]]]] = safetensors.deserialize

NUMPY_LACKS = ("UnknownDtype", "UnsupportedFeature")
"""Files that are valid, but hold sub-byte dtypes or too many dimensions for an array."""


class Finding(AssertionError):
    """A property does not hold."""


def ours(function: Callable[[], T]) -> tuple[T | None, str]:
    """A result, or the name of the error; anything but an ElsaError is a finding."""
    try:
        return function(), ""
    except elsa.ElsaError as error:
        message = str(error)
        if not message.isprintable() or len(message) > 2000:
            raise Finding(f"message of {len(message)} characters: {message[:200]!r}") from error
        return None, type(error).__name__


def by_the_spec(function: Callable[[], T]) -> tuple[T | None, str]:
    """A result, or the error, of the second implementation."""
    try:
        return function(), ""
    except plain.Bad as bad:
        return None, bad.error


def expect(condition: bool, message: str) -> None:
    """Raise a Finding unless the condition holds."""
    if not condition:
        raise Finding(message)


def same_verdict(found: str, expected: str, what: str) -> None:
    """Both accept, or both name the same defect; of two that have no order, they may see either."""
    if {found, expected} in ({"InvalidJson", "DuplicateKey"}, {"CounterOutOfRange", "NonFinite"}):
        return
    expect(found == expected, f"{what}: {found or 'accepted'}, the spec says {expected or 'valid'}")


class _Pipe:
    """A source that can do nothing but read, a few bytes at a time."""

    def __init__(self, content: bytes) -> None:
        self.inner = io.BytesIO(content)

    def read(self, size: int, /) -> bytes:
        """At most 251 bytes."""
        return self.inner.read(min(size, 251))

    def seekable(self) -> bool:
        """Never."""
        return False


def pipe(content: bytes) -> IO[bytes]:
    """A stream that offers no more than our code may ask for."""
    return cast(IO[bytes], _Pipe(content))


def header(data: bytes) -> None:
    """Container and profile: what we accept, safetensors accepts with the same tensors."""

    def read() -> _header.Header:
        found = _header.read_header(io.BytesIO(data), "x")
        check_size(found, len(data), "x")
        return found

    def read_plainly() -> plain.Container:
        found = plain.read_container(data)
        found.check_size()
        return found

    container, error = ours(read)
    reference, expected = by_the_spec(read_plainly)
    same_verdict(error, expected, "container")
    if container is not None and reference is not None:
        listed = {name: (t["dtype"], t["shape"]) for name, t in by_safetensors(data)}
        tensors = {n: (t.dtype.name, list(t.shape)) for n, t in container.tensors.items()}
        expect(listed == tensors, "safetensors reads other tensors")
        places = {n: (t.start, t.stop) for n, t in container.tensors.items()}
        expect(
            places == {n: (t.begin, t.end) for n, t in reference.tensors.items()}, "other offsets"
        )
    _, error = ours(lambda: elsa.open(io.BytesIO(data)).close())
    if _is_delivery(data):  # for which there is a target of its own
        return
    reader = plain.open_level if _is_level(data) else plain.open_elsa
    _, expected = by_the_spec(lambda: reader(data))
    same_verdict(error, expected, "open")


def _is_delivery(data: bytes) -> bool:
    """Whether a file is to be read as a delivery file."""
    try:
        return _header.read_header(io.BytesIO(data), "x").kind == "delivery"
    except elsa.ElsaError:
        return False


def _is_level(data: bytes) -> bool:
    """Whether a file says that it is a level file, and not that it is an ELSA file."""
    try:
        metadata = plain.read_container(data).metadata
    except plain.Bad:
        return False
    return "elsa" not in metadata and "elsa_level" in metadata


def extract(data: bytes) -> None:
    """Every route to a level gives the specification's bits; a valid file takes all of them."""
    if _is_delivery(data):
        return
    if _is_level(data):
        _other_layouts(data)
        return
    _, error = ours(lambda: elsa.verify(pipe(data)))
    file, expected = by_the_spec(lambda: plain.validate(data))
    if not (error and expected in ("Truncated", "TrailingData")):  # a pipe shows its end last
        same_verdict(error, expected, "verify")
    try:
        opened = file or plain.open_elsa(data)
    except plain.Bad:
        for layout in ("dense", "bitmask", "csr"):
            _, error = ours(lambda layout=layout: _extract(data, 1, layout))  # type: ignore[misc]
            expect(bool(error), f"extract accepts what the spec rejects ({expected})")
        return
    for level in {1, (opened.levels + 1) // 2, opened.levels}:
        _level(data, opened, level, valid=file is not None)
    _dense(data, opened, valid=file is not None)


def _extract(data: bytes, level: Any, layout: str, **options: Any) -> bytes:
    out = io.BytesIO()
    elsa.extract(pipe(data), out, level=level, layout=layout, **options)  # type: ignore[arg-type]
    return out.getvalue()


def _level(data: bytes, opened: plain.Elsa, level: int, *, valid: bool) -> None:
    reference = {
        name: (t.dtype, list(t.shape), t.data) for name, t in plain.extract(opened, level).items()
    }
    arrays: list[Any] = []
    for layout in ("dense", "bitmask", "csr"):
        written, error = ours(lambda layout=layout: _extract(data, level, layout))  # type: ignore[misc]
        if written is None:
            expect(not valid or _empty_rows(opened), f"{layout}: {error} in a valid file")
            continue
        level_file, error = by_the_spec(lambda w=written: plain.load_level(w))  # type: ignore[misc]
        expect(not valid or level_file is not None, f"{layout}: wrote {error}")
        read = {n: (t.dtype, t.shape, t.data) for n, t in (level_file or {}).items()}
        expect(not valid or read == reference, f"{layout}: other bits")
        by_safetensors(written)
        arrays.append(ours(lambda w=written: elsa.load_level(pipe(w))))  # type: ignore[misc]
        arrays.append(ours(lambda x=layout: _load(data, level, x)))  # type: ignore[misc]
    arrays.append(ours(lambda: dict(elsa.stream(pipe(data), level=level))))
    for loaded, error in arrays:
        if loaded is None:
            expect(not valid or error in NUMPY_LACKS or _empty_rows(opened), f"load: {error}")
            continue
        found = {n: (list(a.shape), a.tobytes()) for n, a in loaded.items()}
        expect(found == {n: (s, d) for n, (_, s, d) in reference.items()}, "arrays: other bits")
    kept, error = ours(lambda: _extract(data, level, "dense", keep_levels=True))
    expect(not valid or kept is not None, f"keep levels: {error} in a valid file")
    if kept is not None and valid:
        shorter = plain.validate(kept)
        expect(shorter.levels == level, "keep levels: another number of levels")
        for t in range(1, level + 1):
            expect(_bits(shorter, t) == _bits(opened, t), "keep levels: other bits")


def _load(data: bytes, level: int, layout: Any) -> dict[str, Any]:
    loaded = elsa.open(io.BytesIO(data)).load(level, layout)
    return {n: a if isinstance(a, np.ndarray) else a.to_dense() for n, a in loaded.items()}


def _bits(file: plain.Elsa, level: int) -> dict[str, bytes]:
    return {name: tensor.data for name, tensor in plain.extract(file, level).items()}


def _empty_rows(opened: plain.Elsa) -> bool:
    """More rows of no columns than row ends are written for, or than a level file can state."""
    return any(
        t.elements == 0 and (t.shape[0] > 1 << 20 or max(t.shape) >= 2**53)
        for t in map(opened.container.tensors.__getitem__, opened.profile["nested"])
    )


def _dense(data: bytes, opened: plain.Elsa, *, valid: bool) -> None:
    written, error = ours(lambda: _extract(data, "dense", "dense"))
    expect(not valid or written is not None, f"dense: {error} in a valid file")
    if written is not None:
        found = {n: bytes(t["data"]) for n, t in by_safetensors(written)}
        names = [n for n in opened.container.tensors if not n.startswith(plain.RESERVED)]
        expect(found == {n: opened.container.stored(n) for n in names}, "dense: other bits")


def level(data: bytes) -> None:
    """Level files: bitmask and CSR decode to the specification's bits, or are refused."""
    if _too_large(data):  # CSR may ask for any number of zeros: they take no room in the file
        return
    loaded, error = ours(lambda: elsa.load_level(pipe(data)))
    reference, expected = by_the_spec(lambda: plain.load_level(data))
    if error not in NUMPY_LACKS or expected in NUMPY_LACKS:
        same_verdict(error, expected, "load_level")
    if loaded is not None and reference is not None:
        found = {n: (list(a.shape), a.tobytes()) for n, a in loaded.items()}
        expect(found == {n: (t.shape, t.data) for n, t in reference.items()}, "other bits")


def _other_layouts(data: bytes) -> None:
    """A level file is the same level in every layout, and valid in all or in none."""
    if _too_large(data):
        return
    reference, expected = by_the_spec(lambda: plain.load_level(data))
    _, error = ours(lambda: elsa.verify(pipe(data)))
    if not (error and expected in ("Truncated", "TrailingData")):
        same_verdict(error, expected, "verify a level")
    for layout in ("dense", "bitmask", "csr"):
        written, error = ours(lambda x=layout: _extract(data, None, x))  # type: ignore[misc]
        if written is None:
            expect(bool(expected) or error in NUMPY_LACKS, f"{layout}: {error} in a valid level")
        elif reference is not None:
            expect(plain.load_level(written) == reference, f"level as {layout}: other bits")


def _too_large(data: bytes) -> bool:
    """Whether a level file declares tensors of more than 65,536 weights."""
    try:
        document = plain.parse_document(plain.read_container(data).metadata["elsa_level"])
        shapes = [entry["shape"] for entry in document["tensors"].values()]
        return any(int(np.prod([float(n) for n in shape])) > 1 << 16 for shape in shapes)
    except (plain.Bad, KeyError, TypeError, AttributeError, ValueError, OverflowError):
        return False


SHARDS = sorted(
    path
    for folder in (
        "valid/sharded",
        "valid/shards_differ",
        "valid/level_shards",
        "invalid/InvalidIndex",
    )
    for path in (VECTORS / folder).glob("*.safetensors")
    if not path.name.startswith("model-") or folder == "valid/sharded"
)
SUFFIXES = (".safetensors", ".npz", ".safetensors.index.json")


def pack(data: bytes) -> None:
    """Checkpoints: refused with an ElsaError, or packed into a valid file."""
    if not data:
        return
    suffix = SUFFIXES[data[0] % len(SUFFIXES)]
    with tempfile.TemporaryDirectory(dir=_memory()) as folder:
        path = os.path.join(folder, f"model{suffix}")
        with open(path, "wb") as file:
            file.write(data[1:])
        out = io.BytesIO()
        report, _ = ours(lambda: elsa.pack(path, out, sparsities=[75, 50]))
    if report is not None:
        plain.validate(out.getvalue())


def index(data: bytes) -> None:
    """An index beside the specification's shards, of ELSA files, of level files and of neither.

    The verdicts are those of the specification, and a level has its bits.
    """
    if b".ship.safetensors" in data:  # delivery files are not for its plain counterpart
        return
    path = Path(_beside_shards().name) / "model.safetensors.index.json"
    path.write_bytes(data)
    report, error = ours(lambda: elsa.verify(path))
    _, expected = by_the_spec(lambda: plain.validate_index(path))
    if expected == "NotElsa":  # the shards may be of a level
        _, expected = by_the_spec(lambda: plain.load_level_index(path))
        expected = expected if error != "NotElsa" else error
    same_verdict(error, expected, "index")
    if report is not None:
        with elsa.open(path) as file:
            file.load(file.levels[0].name)
    loaded, error = ours(lambda: elsa.load_level(path))
    level, expected = by_the_spec(lambda: plain.load_level_index(path))
    same_verdict(error, expected, "index of a level")
    if loaded is not None and level is not None:
        found = {n: (list(a.shape), a.tobytes()) for n, a in loaded.items()}
        expect(found == {n: (t.shape, t.data) for n, t in level.items()}, "level: other bits")


@cache
def _beside_shards() -> "tempfile.TemporaryDirectory[str]":
    """A folder with the specification's shards, once for all runs."""
    folder = tempfile.TemporaryDirectory(dir=_memory())
    for shard in SHARDS:
        (Path(folder.name) / shard.name).write_bytes(shard.read_bytes())
    return folder


def _memory() -> str | None:
    with contextlib.suppress(OSError):
        if os.access("/dev/shm", os.W_OK):
            return "/dev/shm"
    return None


TARGETS: dict[str, Callable[[bytes], None]] = {
    "header": header,
    "extract": extract,
    "level": level,
    "pack": pack,
    "index": index,
    "kernels": kernels,
    "integers": integers,
    "http": answers,
    "delivery": delivery,
    "fetch": fetching,
}
