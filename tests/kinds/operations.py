"""What can be done with a network: one function an operation.

Each reads one level from a source, and gives its weights, or None if it only tells of them; what
else it promises it asserts itself. `Work` has what it may need beside.
"""

import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from bits import by_index, by_safetensors, same_bits
from click.testing import CliRunner
from internals import main

import elsa_format as elsa
from kinds.files import ELSA, ELSA_SHARDS, INDEX, LAYOUT_NAMES, ONE, SHARD, Group, Kind
from kinds.networks import METADATA, Weights
from kinds.places import NAMED, PLACES, SEEKABLE
from kinds.shelf import Shelf

EVERY: tuple[Group, ...] = ("ELSA", "level", "delivery")


@dataclass(frozen=True)
class Work:
    """What an operation is done with, beside its source."""

    kind: Kind
    shelf: Shelf
    folder: Path
    """For outputs, which are removed with it."""

    @property
    def out(self) -> Path:
        """A file, or an index if the source is one."""
        return self.folder / self.kind.file

    def name(self, level: Any) -> str:
        """The name of a level that has one."""
        names = dict(enumerate(self.shelf.network.names, 1))
        return names.get(level, level)


@dataclass(frozen=True)
class Operation:
    """A function below, and what it is for."""

    name: str
    run: Callable[[Any, Any, Work], Weights | None]
    groups: tuple[Group, ...] = EVERY
    refusal: tuple[tuple[type[elsa.ElsaError], ...], str] = ((), "")
    """The error about what it is not for, and some of its words."""
    places: tuple[str, ...] = tuple(PLACES)
    dense: bool = True
    """Whether it takes the dense network, too."""
    whole: bool = False
    """Whether the dense network has to be there."""
    chooses: bool = True
    """Whether it is told which level."""
    reads: bool = True
    """Whether it reads the data of the level."""
    all: bool = False
    """Whether it reads more than the level."""
    grows: bool = False
    """Whether its output stays when it fails, to be resumed."""

    def takes(self, kind: Kind) -> bool:
        """Whether it is for a kind of file."""
        return kind.group in self.groups

    def reaches(self, kind: Kind, place: str) -> bool:
        """Whether it takes a kind of file from a place; an index has to find its shards there."""
        found = place in self.places and (place in NAMED or not kind.sharded)
        return found and self.takes(kind)

    def levels(self, kind: Kind, shelf: Shelf) -> list[Any]:
        """Those of a kind that it can be used for."""
        available = shelf.available(kind)
        if self.whole and "dense" not in available:
            return []
        return [level for level in available if self.dense or level != "dense"]

    def __repr__(self) -> str:
        return self.name


OPERATIONS: dict[str, Operation] = {}


def operation(name: str, **about: Any) -> Callable[[Any], Any]:
    def add(run: Any) -> Any:
        OPERATIONS[name] = Operation(name, run, **about)
        return run

    return add


def dense(loaded: Weights) -> Weights:
    """Weights in a sparse layout as arrays."""
    return {
        name: value.to_dense() if isinstance(value, elsa.Bitmask | elsa.Csr) else value
        for name, value in loaded.items()
    }


# --- Into memory ---------------------------------------------------------------------------------


@operation("load", places=SEEKABLE)
def load(source: Any, level: Any, work: Work) -> Weights:
    with elsa.open(source) as file:
        return file.load(level)


@operation("load as bitmask", dense=False, places=SEEKABLE)
def load_bitmask(source: Any, level: Any, work: Work) -> Weights:
    with elsa.open(source) as file:
        return dense(file.load(work.name(level), "bitmask"))


@operation("load as csr", dense=False, places=SEEKABLE)
def load_csr(source: Any, level: Any, work: Work) -> Weights:
    with elsa.open(source) as file:
        return dense(file.load(level, "csr"))


@operation("tensor", places=SEEKABLE)
def tensor(source: Any, level: Any, work: Work) -> Weights:
    """One after the other, those that come last first, and into arrays that are there."""
    with elsa.open(source) as file:
        found = {name: file.tensor(name, work.name(level)) for name in reversed(file.tensors)}
        for name, array in found.items():
            again = array.copy()
            again.reshape(-1).view("u1")[:] = 255
            file.tensor(name, level, out=again)
            assert same_bits({name: again}, {name: array})
    return found


@operation("stream")
def stream(source: Any, level: Any, work: Work) -> Weights:
    return dict(elsa.stream(source, level=level))


NO_LEVEL_FILE = ((elsa.InvalidLayout,), r"not a level file.*open\(\.\.\.\)\.load\(level\)")


@operation("load_level", groups=("level",), refusal=NO_LEVEL_FILE, dense=False, chooses=False)
def load_level(source: Any, level: Any, work: Work) -> Weights:
    return elsa.load_level(source)


NO_DELIVERY_FILE = (elsa.NotElsa, elsa.InvalidIndex, elsa.InvalidOption), "is not a delivery file"


@operation("open_delivery", groups=("delivery",), refusal=NO_DELIVERY_FILE)
def open_delivery(source: Any, level: Any, work: Work) -> Weights:
    with elsa.open_delivery(source) as delivery:
        return delivery.load(level)


# --- Into files ----------------------------------------------------------------------------------


def extract(source: Any, level: Any, work: Work, layout: Any) -> Weights:
    """To a file and a stream from what can be read again, else to a stream: the same bytes."""
    written, wish = io.BytesIO(), {"level": work.name(level)}
    out = work.folder / ONE
    if again := isinstance(source, str):
        assert elsa.extract(source, out, level=level, layout=layout, jobs=2) == level
        wish = {} if work.kind.group == "level" else wish  # a level file has but one
    assert elsa.extract(source, written, layout=layout, **wish) == level
    content = written.getvalue()
    assert not again or out.read_bytes() == content
    expected = work.shelf.level(level, layout).read_bytes()
    assert len(content) == len(expected)
    if work.kind.group != "level" and not work.kind.sharded:  # else tensors may change places
        assert content == expected
    if level != "dense":
        assert elsa.verify(io.BytesIO(content)).digests == 1
    loaded = elsa.load_level(io.BytesIO(content))
    if layout == "dense":
        assert same_bits(by_safetensors(content), loaded)
    return loaded


for layout in LAYOUT_NAMES:
    operation(f"extract as {layout}", dense=layout == "dense")(
        lambda source, level, work, layout=layout: extract(source, level, work, layout)
    )


def extract_shards(source: Any, level: Any, work: Work, layout: Any) -> Weights:
    """To an index: in the shards of the source, or in those that it takes."""
    index, size = work.folder / INDEX, None if work.kind.sharded else SHARD
    elsa.extract(source, index, level=level, layout=layout, max_shard_size=size, jobs=2)
    shards = set(json.loads(index.read_text())["weight_map"].values())
    assert {path.name for path in work.folder.iterdir()} == {*shards, INDEX}
    if work.kind.sharded:
        held = json.loads(work.shelf.path(work.kind).read_text())["weight_map"]
        assert len(shards) == len(set(held.values()))
    assert len(shards) > 1
    stored = by_index(index)
    if level != "dense":
        assert elsa.verify(index, jobs=2).digests == 1
    loaded = elsa.load_level(index)
    assert layout != "dense" or same_bits(stored, loaded)
    return loaded


for layout in LAYOUT_NAMES:
    operation(f"extract as {layout} shards", places=NAMED, dense=layout == "dense")(
        lambda source, level, work, layout=layout: extract_shards(source, level, work, layout)
    )


def keep_levels(source: Any, level: Any, work: Work, out: Path, **options: Any) -> Weights:
    """The levels up to one stay, and that is what the dense network is then."""
    elsa.extract(source, out, level=level, keep_levels=True, **options)
    assert elsa.verify(out).digests == level
    with elsa.open(out) as file, elsa.open(work.shelf.path(work.kind)) as first:
        assert file.levels == first.levels[:level]
        assert file.metadata == METADATA
        for lower in range(1, level, max(1, level // 3)):
            assert same_bits(file.load(lower), work.shelf.network.level(lower))
        assert same_bits(file.load(), file.load(level))
        return file.load(level)


KEEPS: Any = {"groups": ("ELSA", "delivery"), "dense": False, "all": True}
KEEPS["refusal"] = (elsa.NoSuchLevel,), "a level file has no levels to keep"


@operation("keep levels", **KEEPS)
def keep(source: Any, level: Any, work: Work) -> Weights:
    out = work.folder / ONE
    found = keep_levels(source, level, work, out)
    assert work.kind.sharded or out.read_bytes() == work.shelf.kept(level).read_bytes()
    return found


@operation("keep levels in shards", places=NAMED, **KEEPS)
def keep_in_shards(source: Any, level: Any, work: Work) -> Weights:
    index = work.folder / INDEX
    found = keep_levels(source, level, work, index, max_shard_size=SHARD)
    assert by_index(index).keys() == by_safetensors(work.shelf.kept(level).read_bytes()).keys()
    return found


NO_ELSA_FILE = ((elsa.NotElsa,), "is a level, not a network|is a delivery file already")


@operation("ship", groups=("ELSA",), refusal=NO_ELSA_FILE, chooses=False, all=True)
def ship(source: Any, level: Any, work: Work) -> Weights:
    elsa.ship(source, work.out)
    return load(work.out, level, work)


@operation("fetch", groups=("delivery",), refusal=NO_DELIVERY_FILE, places=NAMED, grows=True)
def fetch(source: Any, level: Any, work: Work) -> Weights:
    report = elsa.fetch(source, work.out, level=level)
    assert report.level == level
    return load(work.out, level, work)


RESTORES: Any = {"groups": ("delivery",), "refusal": NO_DELIVERY_FILE}


@operation("restore", **RESTORES, chooses=False, whole=True, all=True)
def restore(source: Any, level: Any, work: Work) -> Weights:
    """Byte for byte, if the dense network is there."""
    assert elsa.extract(source, work.out, restore=True) == "dense"
    held = work.shelf.path(ELSA_SHARDS if work.kind.sharded else ELSA).parent
    for path in held.iterdir():
        assert (work.folder / path.name).read_bytes() == path.read_bytes()
    return load(work.out, level, work)


# --- Commands ------------------------------------------------------------------------------------


def command(source: Any, *words: Any) -> bytes:
    """What a command answers; errors are raised as in Python."""
    piped = not isinstance(source, str)
    first, *others = map(str, words)
    done = CliRunner().invoke(
        main,
        [first, "-" if piped else source, *others],
        input=source.read() if piped else None,
    )
    if done.exit_code:
        assert done.stderr.startswith("error: ")
        assert done.stderr.count("\n") == 1
        raise elsa.ElsaError(done.stderr[7:-1])
    return done.stdout_bytes


@operation("elsa-extract")
def elsa_extract(source: Any, level: Any, work: Work) -> Weights:
    content = command(source, "extract", "--level", level, "-o", "-")
    if work.kind.group != "level" and not work.kind.sharded:
        assert content == work.shelf.level(level).read_bytes()
    return elsa.load_level(io.BytesIO(content))


@operation("elsa-verify", chooses=False, all=True)
def elsa_verify(source: Any, level: Any, work: Work) -> None:
    assert b": valid" in command(source, "verify")


@operation("elsa-inspect", chooses=False, reads=False)
def elsa_inspect(source: Any, level: Any, work: Work) -> None:
    """Every level's name, digest and counts, as far as a header has them."""
    told = json.loads(command(source, "inspect", "--json"))
    network, top = work.shelf.network, work.shelf.top
    with elsa.open(work.shelf.path(ELSA)) as file:
        levels, nested = file.levels, file.nested
        data_size = file.data_size
    shown = {tensor["name"]: tensor for tensor in told["tensors"]}
    assert set(shown) == set(network.tensors)
    assert {name for name in shown if shown[name]["kind"] == "nested"} == set(nested)
    assert told["nested_weights"] == sum(network.tensors[name].size for name in nested)
    assert told["metadata"] == METADATA
    if work.kind.group == "level":
        entry, counted = levels[level - 1], work.kind.name.split()[0] != "dense"
        assert (told["level"], told["name"]) == (level, entry.name)
        assert told["layout"] == work.kind.name.split()[0]
        assert told["digest"] == entry.digest
        assert told["nonzero"] == (entry.nonzero if counted else None)
        for name, counts in nested.items():
            assert shown[name]["kept"] == (counts[level - 1] if counted else None)
        return
    assert [found["digest"] for found in told["levels"]] == [entry.digest for entry in levels]
    assert [found["nonzero"] for found in told["levels"]] == [entry.nonzero for entry in levels]
    assert {name: tuple(shown[name]["kept"]) for name in nested} == dict(nested)
    assert told["data_size"] >= data_size or work.kind.group == "delivery"
    assert ("delivery" in told) == (work.kind.group == "delivery")
    if "delivery" in told:
        assert told["delivery"]["available"] == work.shelf.available(work.kind)[-1]
        entries = told["delivery"]["levels"]
        assert [found["level"] for found in entries] == [*range(1, top + 1), "dense"]


# --- Questions -----------------------------------------------------------------------------------


@operation("verify", chooses=False, all=True)
def verify(source: Any, level: Any, work: Work) -> None:
    report = elsa.verify(source)
    last = vars(report).get("available", report.levels)
    assert report.digests == (report.levels if last == "dense" else last or 0)


@operation("questions", dense=False, places=SEEKABLE, chooses=False, reads=False)
def questions(source: Any, level: Any, work: Work) -> None:
    """Sizes, counts, and the level that fits, without an array of it."""
    with elsa.open(source) as file, elsa.open(work.shelf.path(ELSA)) as first:
        assert file.metadata == first.metadata == METADATA
        assert {**file.tensors}.keys() == {**first.tensors}.keys()
        assert file.nested.keys() == first.nested.keys()
        assert file.nested_weights == first.nested_weights
        assert file.per_level == (() if work.kind.group == "level" else first.per_level)
        if work.kind.group == "ELSA":
            files = work.shelf.path(work.kind).parent.glob("*.safetensors")
            assert file.file_size == sum(path.stat().st_size for path in files)
            assert file.data_size == first.data_size
        entry = first.levels[level - 1]
        if work.kind.group != "level" and not work.kind.sharded:
            assert (file.levels, file.profile.bits) == (first.levels, first.profile.bits)
        (found,) = [found for found in file.levels if found.name == entry.name]
        assert (found.name, found.digest) == (entry.name, entry.digest)
        counted = work.kind.group != "level" or work.kind.name.split()[0] != "dense"
        known = (first.sparsity(level), entry.nonzero) if counted else (None, None)
        assert (file.sparsity(level), found.nonzero) == known
        for layout in LAYOUT_NAMES:
            size = work.shelf.level(level, layout).stat().st_size
            assert file.size(level, layout) == size
            any_fits = layout == "dense" and work.kind.group != "level"
            fits = file.choose(max_size=size, layout=layout)
            assert fits == ("dense" if any_fits else level)
            if (level == 1 and layout != "dense") or work.kind.group == "level":
                with pytest.raises(elsa.NoSuchLevel, match=f"level {level} takes .*{size}"):
                    file.choose(max_size=size - 1, layout=layout)
        assert file.choose(sparsity=first.sparsity(level)) == level
        with pytest.raises(elsa.NoSuchLevel, match="the sparsest has"):
            file.choose(sparsity=99)
        assert (file.sparsity(level), found.nonzero) == known  # the header is what it was
