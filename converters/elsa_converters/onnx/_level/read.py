"""One pass over an ELSA file that gives a level's bytes to a template's initializers."""

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elsa_converters._errors import TemplateMismatch
from elsa_converters.onnx._level.bind import Binding, ValueCheck, bind
from elsa_converters.onnx._model.read import Model, read_model
from elsa_format.plugins import (
    BLOCK,
    Arena,
    LevelLike,
    LevelNumber,
    LevelReader,
    Meter,
    PlannedTensor,
    Progress,
    Source,
    as_array,
    counted,
    no_progress,
    open_network,
)

Template = str | os.PathLike[str] | Model
Choice = Callable[[Binding], LevelNumber]
"""Decides on a level once both files are known."""
Block = NDArray[np.uint8]
_EMPTY: Block = np.empty(0, np.uint8)


@dataclass(frozen=True)
class LevelPass:
    """A level about to be read; `blocks` can be run through once."""

    binding: Binding
    level: LevelNumber
    reader: LevelReader

    def plan(self) -> list[PlannedTensor]:
        """What becomes of each stored tensor, in stored order."""
        return self.binding.network.plan(self.level)

    def names(self) -> list[str]:
        """The tensors of the file that the template uses, in the order their bytes arrive."""
        used = self.binding.names
        return [t.name for t in self.plan() if t.name in used and t.name is not None]

    def blocks(self) -> Iterator[tuple[str, Block]]:
        """(tensor, bytes of the level), then what only the template has; blocks are reused."""
        yield from self._of_file(lambda name: None)
        for name, weight in self.binding.rest.items():
            for block in weight.blocks(BLOCK):
                yield name, block

    def _of_file(self, room: Callable[[str], Block | None]) -> Iterator[tuple[str, Block]]:
        """The level's bytes: parts of the room for a tensor, or else blocks are reused."""
        rows = []
        for planned in self.plan():
            if planned.name is None or planned.name not in self.binding.names:
                self.reader.skip(planned.info)
                continue
            check = self._check(planned)
            on_block = check.update if check is not None else None
            for block in self.reader.level_blocks(planned, room(planned.name), on_block):
                yield planned.name, block
            row = check.row() if check is not None else None
            if row is not None:
                rows.append(row)
        self.reader.finish()
        if rows:
            raise TemplateMismatch(str(self.binding.model.path), rows)

    def arrays(self) -> dict[str, NDArray[Any]]:
        """The whole level in memory, and what only the template has."""
        infos = {name: self.binding.info(name) for name in self.names()}
        infos |= {name: weight.info for name, weight in self.binding.rest.items()}
        arena = Arena(sum(info.nbytes for info in infos.values()))
        flat: dict[str, Block] = {}

        def room(name: str) -> Block:
            # Not all at once: a stream may declare what it does not have.
            flat[name] = arena.empty(infos[name].nbytes)
            return flat[name]

        for _ in self._of_file(room):
            pass
        for name, weight in self.binding.rest.items():
            copies = [block.copy() for block in weight.blocks(BLOCK)]
            flat[name] = np.concatenate([_EMPTY, *copies])
        where = self.reader.name
        return {name: as_array(flat[name], info, where) for name, info in infos.items()}

    def _check(self, planned: PlannedTensor) -> ValueCheck | None:
        # Per-level tensors are replaced whatever the template has: its values are some level's.
        assert planned.name is not None
        info = self.binding.info(planned.name)
        bits = self.binding.network.slack(info)
        if bits is None:
            return None
        return ValueCheck(self.binding.model.weights[planned.name], info, bits, BLOCK)


@contextlib.contextmanager
def open_level(
    source: Source,
    template: Template,
    level: LevelLike | Choice,
    *,
    verify: bool = True,
    max_bytes: int | None = None,
    counts: bool = False,
    progress: Progress = no_progress,
) -> Iterator[LevelPass]:
    """Read the headers of both files, bind one to the other, and get ready to read the level.

    If `counts` are needed, a level file without them is read once more.
    """
    with open_network(source, sequential=True, max_bytes=max_bytes) as opened:
        network = counted(opened) if counts else opened
        if not isinstance(template, Model):
            template = read_model(template, also=set(network.tensors))
        binding = bind(template, network)
        number = level(binding) if callable(level) else network.level_number(level)
        meter = Meter(progress, network.header.data_size)
        with LevelReader(network, number, verify=verify, on_bytes=meter.tick) as reader:
            yield LevelPass(binding, number, reader)
