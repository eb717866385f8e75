"""Every kind of file × every fault × every route: refused, or the right bits (ELSA-R-104).

`python tests/integration/test_what_is_checked.py` prints the table that stands in SECURITY.md.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from bits import same_bits

import elsa_format as elsa

Weights = Mapping[str, Any]
SECURITY = Path(__file__).resolve().parents[2] / "SECURITY.md"
LEVEL = 1
"""The level that is read: of the two that are nested, the one with fewer weights."""
NESTED, SHARED = "a/kernel", "b/bias"


# --- Kinds of files ------------------------------------------------------------------------------


def write_network(out: Path, seed: int) -> None:
    """A network with two levels: two nested tensors, a shared one, one with variants.

    Networks of different seeds have the same shapes and the same numbers of weights.
    """
    rng = np.random.default_rng(seed)
    tensors = {
        NESTED: rng.standard_normal((24, 16)).astype(np.float32),
        SHARED: rng.standard_normal(16).astype(np.float32),
        "c/kernel": rng.standard_normal((16, 8)).astype(ml_dtypes.bfloat16),
        "d/mean": rng.standard_normal(8).astype(np.float32),
    }
    for name in (NESTED, "c/kernel"):
        counters = rng.permutation(np.arange(tensors[name].size) % 4 % 3)
        shaped = counters.reshape(tensors[name].shape)
        tensors[name] = elsa.embed_counters(tensors[name], shaped, bits=2)
    elsa.write(
        out,
        tensors,
        levels=[elsa.LevelSpec("75%"), elsa.LevelSpec("50%")],
        nested=[NESTED, "c/kernel"],
        per_level={"d/mean": list(rng.standard_normal((2, 8)).astype(np.float32))},
    )


def shards(source: Path, out: Path, **options: Any) -> None:
    """The network of a file in several."""
    elsa.extract(source, out, max_shard_size=1000, **options)


def cut(source: Path, out: Path) -> None:
    """As much of a delivery file as level 1 needs."""
    elsa.fetch(source, out, level=LEVEL)


@cache
def built() -> Path:
    """A folder with every kind twice: of one network, and of another like it."""
    top = Path(tempfile.mkdtemp())
    for seed, which in enumerate(("ours", "theirs")):
        (top / which).mkdir()
        for kind, (name, make) in KINDS.items():
            folder = top / which / kind
            folder.mkdir()
            make(top / which, folder / name, seed)
    return top


Make = Callable[[Path, Path, int], None]
ONE, INDEX = "net.safetensors", "net.safetensors.index.json"
KINDS: dict[str, tuple[str, Make]] = {
    "ELSA file": (ONE, lambda top, out, seed: write_network(out, seed)),
    "ELSA shards": (
        INDEX,
        lambda top, out, seed: shards(top / "ELSA file" / ONE, out, level=2, keep_levels=True),
    ),
    **{
        f"{layout} level file": (
            ONE,
            lambda top, out, seed, layout=layout: elsa.extract(
                top / "ELSA file" / ONE, out, level=LEVEL, layout=layout
            ),
        )
        for layout in ("dense", "bitmask", "csr")
    },
    "level shards": (
        INDEX,
        lambda top, out, seed: shards(top / "ELSA file" / ONE, out, level=LEVEL, layout="bitmask"),
    ),
    "delivery file": (ONE, lambda top, out, seed: elsa.ship(top / "ELSA file" / ONE, out)),
    "delivery prefix": (ONE, lambda top, out, seed: cut(top / "delivery file" / ONE, out)),
    "delivery shards": (INDEX, lambda top, out, seed: elsa.ship(top / "ELSA shards" / INDEX, out)),
}


# --- Faults --------------------------------------------------------------------------------------


def files(path: Path) -> list[Path]:
    """The files that hold weights."""
    return sorted(path.parent.glob("*.safetensors"))


def header(path: Path) -> tuple[int, dict[str, Any]]:
    """Where the data begins, and what the header says."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    return 8 + length, json.loads(content[8 : 8 + length])


def flip(path: Path, position: int, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1 << bit
    path.write_bytes(content)


def flip_in_tensor(path: Path, *names: str) -> bool:
    """Change one bit, not of a counter, of the first weight that is not zero."""
    for file in files(path):
        start, tensors = header(file)
        for name in names:
            if name in tensors:
                first, last = (start + at for at in tensors[name]["data_offsets"])
                data = file.read_bytes()[first:last]
                word = next(at for at in range(0, len(data), 4) if any(data[at : at + 4]))
                flip(file, first + word + 1, 6)
                return True
    return False


def flip_weight(path: Path, other: Path) -> bool:
    if flip_in_tensor(path, NESTED, f"__elsa__.values.{NESTED}"):
        return True
    return flip_delivered(path, LEVEL)


def flip_delivered(path: Path, level: Any) -> bool:
    """Change a bit of the last byte that a level needs of a delivery file."""
    file = files(path)[0]
    with elsa.open_delivery(file) as delivery:
        end = delivery.downloads[level]
    if end > file.stat().st_size:
        return False
    flip(file, end - 1, 3)
    return True


def flip_dense(path: Path, other: Path) -> bool:
    return "__elsa__.delivery" in header(files(path)[0])[1] and flip_delivered(path, "dense")


def flip_header(path: Path, other: Path) -> bool:
    """Change a letter of a tensor's name, or of its only one."""
    file = files(path)[0]
    start, tensors = header(file)
    name = next(name for name in tensors if name != "__metadata__")
    at = file.read_bytes()[:start].index(f'"{name}":'.encode())
    flip(file, at + len(name), 0)
    return True


def shorten(path: Path, other: Path) -> bool:
    file = files(path)[-1]
    os.truncate(file, file.stat().st_size - 1)
    return True


def lengthen(path: Path, other: Path) -> bool:
    with files(path)[-1].open("ab") as file:
        file.write(b"\0")
    return True


def mix(path: Path, other: Path) -> bool:
    """Put in place of a shard that of the other network."""
    if not path.name.endswith(".json"):
        return False
    shutil.copy(files(other)[0], files(path)[0])
    return True


def lose(path: Path, other: Path) -> bool:
    if not path.name.endswith(".json"):
        return False
    files(path)[-1].unlink()
    return True


FAULTS: dict[str, Callable[[Path, Path], bool]] = {
    "a bit of a nested weight": flip_weight,
    "a bit of another tensor": lambda path, other: flip_in_tensor(path, SHARED),
    "a bit of the dense part": flip_dense,
    "a bit of a name in the header": flip_header,
    "the last byte missing": shorten,
    "a byte too many": lengthen,
    "a shard of another network": mix,
    "a shard missing": lose,
}


# --- Routes --------------------------------------------------------------------------------------


def load(path: Path, level: Any) -> Weights:
    with elsa.open(path) as file:
        return file.load(level)


def load_sparse(path: Path, level: Any) -> Weights:
    with elsa.open(path) as file:
        loaded = file.load(level, "bitmask")
    return {
        name: value.to_dense() if isinstance(value, elsa.Bitmask) else value
        for name, value in loaded.items()
    }


def one_by_one(path: Path, level: Any) -> Weights:
    with elsa.open(path) as file:
        return {name: file.tensor(name, level) for name in file.tensors}


def extracted(path: Path, level: Any, **options: Any) -> Weights:
    """Take a level out, and read it by the library of safetensors or by `load_level`."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.safetensors"
        try:
            elsa.extract(path, out, level=level, **options)
        except elsa.ElsaError:
            assert os.listdir(folder) == []
            raise
        return elsa.load_level(out, verify=False)


def shipped(path: Path, level: Any) -> Weights:
    """Make a delivery file, and read the level there."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, path.name)
        elsa.ship(path, out)
        return load(out, level)


def fetched(path: Path, level: Any) -> Weights:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, path.name)
        elsa.fetch(path, out, level=level)
        return load(out, level)


def delivered(path: Path, level: Any) -> Weights:
    with elsa.open_delivery(path) as delivery:
        return delivery.load(level)


def verified(path: Path, level: Any) -> None:
    elsa.verify(path)


ELSA = ("ELSA file", "ELSA shards")
LEVELS = ("dense level file", "bitmask level file", "csr level file", "level shards")
DELIVERY = ("delivery file", "delivery prefix", "delivery shards")
Route = Callable[[Path, Any], Weights | None]
ROUTES: dict[str, tuple[Route, tuple[str, ...]]] = {
    "load": (load, (*ELSA, *LEVELS, *DELIVERY)),
    "load, sparse": (load_sparse, (*ELSA, *LEVELS, *DELIVERY)),
    "tensor": (one_by_one, (*ELSA, *LEVELS, *DELIVERY)),
    "stream": (
        lambda path, level: dict(elsa.stream(path, level=level)),
        (*ELSA, *LEVELS, *DELIVERY),
    ),
    "extract": (extracted, (*ELSA, *LEVELS, *DELIVERY)),
    "extract, sparse": (
        lambda path, level: extracted(path, level, layout="csr"),
        (*ELSA, *LEVELS, *DELIVERY),
    ),
    "verify": (verified, (*ELSA, *LEVELS, *DELIVERY)),
    "load_level": (lambda path, level: elsa.load_level(path), LEVELS),
    "ship": (shipped, ELSA),
    "fetch": (fetched, ("delivery file", "delivery shards")),
    "open_delivery": (delivered, ("delivery file", "delivery prefix")),
}


# --- What came of it -----------------------------------------------------------------------------

REFUSED, RIGHT = "refused", "right bits"


def outcome(kind: str, fault: str, route: str) -> str | None:
    """What a route makes of a damaged file; None if there is no such file or route."""
    run, kinds = ROUTES[route]
    if kind not in kinds:
        return None
    name = KINDS[kind][0]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(shutil.copytree(built() / "ours" / kind, Path(folder) / "net")) / name
        before = {file.name: file.read_bytes() for file in path.parent.iterdir()}
        if not FAULTS[fault](path, built() / "theirs" / kind / name):
            return None
        damaged = {file.name: file.read_bytes() for file in path.parent.iterdir()}
        assert damaged != before
        try:
            found = run(path, LEVEL)
        except elsa.ElsaError:
            return REFUSED
        finally:
            assert {file.name: file.read_bytes() for file in path.parent.iterdir()} == damaged
        expected = load(built() / "ours" / "ELSA file" / ONE, LEVEL)
        assert found is None or same_bits(dict(found), expected), (kind, fault, route)
        return "valid" if found is None else RIGHT


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_damaged_gives_the_same_bits_by_every_route(kind: str) -> None:
    expected = load(built() / "ours" / "ELSA file" / ONE, LEVEL)
    path = built() / "ours" / kind / KINDS[kind][0]
    for route, (run, kinds) in ROUTES.items():
        if kind in kinds:
            found = run(path, LEVEL)
            assert found is None or same_bits(dict(found), expected), route


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fault", FAULTS)
def test_routes_that_read_a_fault_refuse_it(kind: str, fault: str) -> None:
    """Only what a level does not need may be damaged, and then its bits are right."""
    outcomes = {route: outcome(kind, fault, route) for route in ROUTES}
    found = {route: it for route, it in outcomes.items() if it is not None}
    readers = {it for route, it in found.items() if route != "verify"}
    assert len(readers) <= 1, found
    if readers == {RIGHT}:
        assert kind in DELIVERY


def table() -> str:
    """The table in SECURITY.md: what every route does with every fault of every kind of file."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for kind in KINDS:
        for fault in FAULTS:
            found = {route: outcome(kind, fault, route) for route in ROUTES}
            if any(found.values()):
                reading = {it for route, it in found.items() if it and route != "verify"}
                cells = (fault, " or ".join(sorted(reading)), str(found["verify"]))
                rows.setdefault(cells, []).append(kind)
    lines = ["| fault | in | read, extract, ship, fetch | verify |", "| --- | --- | --- | --- |"]
    order = list(FAULTS)
    for (fault, reading, verified), kinds in sorted(
        rows.items(), key=lambda r: order.index(r[0][0])
    ):
        lines.append(f"| {fault} | {_named(kinds)} | {reading} | {verified} |")
    return "\n".join(lines)


def _named(kinds: list[str]) -> str:
    """Kinds of files in few words."""
    groups = {"ELSA files": ELSA, "level files": LEVELS, "delivery files": DELIVERY}
    whole = [name for name, group in groups.items() if set(group) <= set(kinds)]
    others = [kind for kind in kinds if not any(kind in groups[name] for name in whole)]
    return "every kind" if len(whole) == len(groups) else ", ".join((*whole, *others))


def test_security_md_has_the_table() -> None:
    assert table() in SECURITY.read_text()


if __name__ == "__main__":
    print(table())
