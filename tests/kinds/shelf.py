"""A network in every kind of file."""

from pathlib import Path
from typing import Any

import elsa_format as elsa
from kinds.files import ELSA, Kind
from kinds.networks import Network


class Shelf:
    """A network as every kind of file, each made when it is asked for."""

    def __init__(self, network: Network, folder: Path) -> None:
        self.network, self.folder = network, folder

    @property
    def top(self) -> int:
        """The densest of the nested levels."""
        return len(self.network.names)

    @property
    def middle(self) -> int:
        """A level in between, if there are that many."""
        return (self.top + 1) // 2

    def path(self, kind: Kind) -> Path:
        """The file, or index, of a kind; in a folder of its own."""
        folder = self.folder / kind.name
        path = folder / kind.file
        if not folder.exists():
            folder.mkdir(parents=True)
            kind.make(self, path)
        return path

    def level(self, level: Any, layout: Any = "dense") -> Path:
        """A level as it leaves the ELSA file."""
        path = self.folder / f"level {level} as {layout}"
        if not path.exists():
            elsa.extract(self.path(ELSA), path, level=level, layout=layout)
        return path

    def kept(self, level: Any) -> Path:
        """The ELSA file with the levels up to one."""
        path = self.folder / f"levels up to {level}"
        if not path.exists():
            elsa.extract(self.path(ELSA), path, level=level, keep_levels=True)
        return path

    def available(self, kind: Kind) -> list[Any]:
        """The levels that a kind of file has."""
        return list(kind.levels(self))

    def missing(self, kind: Kind) -> list[Any]:
        """The levels of the network that a kind of file has not."""
        every = [*range(1, self.top + 1), "dense"]
        return [level for level in every if level not in self.available(kind)]
