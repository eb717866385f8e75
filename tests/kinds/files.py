"""How a network is held: one small class a kind."""

import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import elsa_format as elsa

if TYPE_CHECKING:
    from kinds.shelf import Shelf

ONE, INDEX = "net.safetensors", "net.safetensors.index.json"
SHARD = 300
"""Bytes of a shard: few, so that most have one tensor."""
Group = Literal["ELSA", "level", "delivery"]


class Kind(ABC):
    """A kind of file: how it is made, and which levels are in it."""

    name: str
    group: Group
    file = ONE
    lacks: tuple[type[elsa.ElsaError], str] = (
        elsa.NoSuchLevel,
        r"no level '?(9|no such)'?, expect",
    )
    """The error about a level that is not in it, and some of its words."""

    @abstractmethod
    def make(self, shelf: "Shelf", out: Path) -> None:
        """Write it."""

    def levels(self, shelf: "Shelf") -> Iterable[Any]:
        """The levels that are available."""
        return [*range(1, shelf.top + 1), "dense"]

    @property
    def sharded(self) -> bool:
        """Whether it is several files and an index."""
        return self.file == INDEX

    def __repr__(self) -> str:
        return self.name


class ElsaFile(Kind):
    name, group = "ELSA file", "ELSA"

    def make(self, shelf: "Shelf", out: Path) -> None:
        shelf.network.write(out)


class ElsaShards(Kind):
    name, group, file = "ELSA shards", "ELSA", INDEX

    def make(self, shelf: "Shelf", out: Path) -> None:
        elsa.pack(
            shelf.level("dense"),
            out,
            levels=[shelf.level(level) for level in range(1, shelf.top + 1)],
            per_level=shelf.network.per_level,
            names=shelf.network.names,
            max_shard_size=SHARD,
        )


class LevelFile(Kind):
    group = "level"
    lacks = (elsa.NoSuchLevel, r"no level .*, it holds level 2 \(medium\)")

    def __init__(self, layout: Literal["dense", "bitmask", "csr"]) -> None:
        self.layout, self.name = layout, f"{layout} level file"

    def make(self, shelf: "Shelf", out: Path) -> None:
        elsa.extract(shelf.path(ELSA), out, level=shelf.middle, layout=self.layout)

    def levels(self, shelf: "Shelf") -> Iterable[Any]:
        return [shelf.middle]


class LevelShards(LevelFile):
    file = INDEX

    def __init__(self, layout: Literal["dense", "bitmask", "csr"]) -> None:
        self.layout, self.name = layout, f"{layout} level shards"

    def make(self, shelf: "Shelf", out: Path) -> None:
        words: Any = {"level": shelf.middle, "layout": self.layout}
        elsa.extract(shelf.path(ELSA), out, max_shard_size=SHARD, **words)


class DeliveryFile(Kind):
    name, group = "delivery file", "delivery"
    lacks = (elsa.Incomplete, r"fetch|ends at byte \d+, expected \d+")

    def make(self, shelf: "Shelf", out: Path) -> None:
        elsa.ship(shelf.path(ELSA), out, block=10)  # several of wide tensors


class DeliveryPrefix(DeliveryFile):
    """The first bytes of a delivery file, just those of a level."""

    name = "delivery prefix"

    def last(self, shelf: "Shelf") -> int:
        return shelf.middle

    def make(self, shelf: "Shelf", out: Path) -> None:
        shutil.copy(shelf.path(DELIVERY), out)
        cut(out, self.last(shelf))

    def levels(self, shelf: "Shelf") -> Iterable[Any]:
        return range(1, self.last(shelf) + 1)


class ShortPrefix(DeliveryPrefix):
    name = "shortest delivery prefix"

    def last(self, shelf: "Shelf") -> int:
        return 1


class LongPrefix(DeliveryPrefix):
    """All but the dense network."""

    name = "longest delivery prefix"

    def last(self, shelf: "Shelf") -> int:
        return shelf.top


class DeliveryShards(DeliveryFile):
    name, file = "delivery shards", INDEX

    def make(self, shelf: "Shelf", out: Path) -> None:
        elsa.ship(shelf.path(ELSA_SHARDS), out)


class UnevenShards(DeliveryShards):
    """Delivery files of which one is shorter than the others."""

    name = "uneven delivery shards"

    def make(self, shelf: "Shelf", out: Path) -> None:
        super().make(shelf, out)
        cut(sorted(out.parent.glob("*.safetensors"))[-1], shelf.middle)

    def levels(self, shelf: "Shelf") -> Iterable[Any]:
        return range(1, shelf.middle + 1)


def cut(path: Path, level: int) -> None:
    """Leave the bytes of a delivery file that a level needs."""
    with elsa.open_delivery(path) as delivery:
        size = delivery.downloads[level]
    os.truncate(path, size)


LAYOUT_NAMES: tuple[Literal["dense", "bitmask", "csr"], ...] = ("dense", "bitmask", "csr")
ELSA, ELSA_SHARDS, DELIVERY = ElsaFile(), ElsaShards(), DeliveryFile()
KINDS: list[Kind] = [
    *(ELSA, ELSA_SHARDS),
    *(LevelFile(layout) for layout in LAYOUT_NAMES),
    *(LevelShards(layout) for layout in LAYOUT_NAMES),
    *(DELIVERY, ShortPrefix(), DeliveryPrefix(), LongPrefix()),
    *(DeliveryShards(), UnevenShards()),
]
