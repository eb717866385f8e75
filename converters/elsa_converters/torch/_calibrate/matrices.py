"""Experts that one tensor holds: solved one by one, stored together."""

from collections.abc import Generator, Mapping, Sequence
from typing import Any

import numpy as np

from elsa_converters.calibrate import Nested
from elsa_converters.torch._calibrate.model import TorchModel
from elsa_format.plugins import CalibrationOptions, Checkpoint, Progress, SolvedTensor


class Joined(Nested):
    """A network some of whose tensors hold a matrix for each expert.

    The layers of `experts.w` are called `experts.w[0]`, `experts.w[1]` and so on.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        model: TorchModel,
        options: CalibrationOptions,
        *,
        left: Mapping[str, str] = {},
        notes: Sequence[str] = (),
    ) -> None:
        super().__init__(checkpoint, model, options, left=left, notes=notes)
        self._counts: dict[str, int] = {}
        for name in self.nested:
            if (whole := _whole(name, checkpoint)) is not None:
                self._counts[whole] = self._counts.get(whole, 0) + 1
        parts = (_whole(name, checkpoint) or name for name in self.nested)
        self.nested = list(dict.fromkeys(parts))

    def solve(self, progress: Progress) -> Generator[SolvedTensor]:
        """Run the sweep; what is in one tensor comes when all of it is solved."""
        parts: dict[str, dict[int, Any]] = {}
        for solved in super().solve(progress):
            whole = _whole(solved.name, self.checkpoint)
            if whole is None:
                yield solved
                continue
            found = parts.setdefault(whole, {})
            found[int(solved.name[len(whole) + 1 : -1])] = solved.array
            if len(found) == self._counts[whole]:
                array = np.stack([found[at] for at in range(len(found))])
                del parts[whole]
                yield SolvedTensor(whole, solved.level, array)


def _whole(name: str, checkpoint: Checkpoint) -> str | None:
    """The tensor that a layer is part of; None if the layer's is stored by itself."""
    if name in checkpoint.tensors:
        return None
    return name.rpartition("[")[0]
