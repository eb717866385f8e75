"""Nested levels in Hugging Face's Trainer.

>>> from elsa_train.torch.trainer import NestingCallback
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from elsa_train._errors import TrainError
from elsa_train._levels import Schedule, parse_levels
from elsa_train.torch._nesting import Nesting

FILE = "nesting.pt"
"""Beside the Trainer's own files in a checkpoint."""


class NestingCallback(TrainerCallback):
    """Makes one level after the other while a Trainer trains: so many steps each.

    Of a level's steps, the first three quarters prune gradually, unless a `schedule` says
    otherwise; then it is frozen, measured by `evaluate`, and `densify_steps` train the rest.
    `steps` is how many there are in all: `TrainingArguments(max_steps=callback.steps)`. Other
    options are those of `Nesting`. When the Trainer is done, `callback.nesting.write(path)`.

    >>> callback = NestingCallback("90,50", sparsify_steps=100, densify_steps=20)
    >>> callback.steps
    240
    """

    def __init__(
        self,
        levels: str | Sequence[str | float],
        *,
        sparsify_steps: int,
        densify_steps: int = 0,
        schedule: Schedule | None = None,
        evaluate: Callable[[], Mapping[str, Any]] = dict,
        **options: Any,
    ) -> None:
        self.levels, self.evaluate, self.options = levels, evaluate, options
        self.sparsify_steps, self.densify_steps = sparsify_steps, densify_steps
        end = sparsify_steps * 3 // 4
        self.schedule = schedule or Schedule(0, end, max(1, end // 20))
        if not 0 <= self.schedule.end < sparsify_steps:
            raise TrainError(
                f"a schedule that ends at step {self.schedule.end} of {sparsify_steps} steps"
            )
        self._nesting: Nesting | None = None

    @property
    def steps(self) -> int:
        """Steps of all levels."""
        return len(parse_levels(self.levels)) * self._round

    @property
    def _round(self) -> int:
        return self.sparsify_steps + self.densify_steps

    @property
    def nesting(self) -> Nesting:
        """What was trained."""
        if self._nesting is None:
            raise TrainError("the Trainer has not trained yet")
        return self._nesting

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **objects: Any,
    ) -> None:
        """Watch the optimizer, and begin the first level or resume."""
        self._nesting = Nesting(objects["model"], objects["optimizer"], self.levels, **self.options)
        if state.global_step:
            saved = self._folder(args, state) / FILE
            self._nesting.load_state_dict(torch.load(saved, weights_only=True))
        else:
            self._nesting.sparsify(self.schedule)

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **objects: Any,
    ) -> None:
        """Freeze or begin a level where its steps end or begin."""
        nesting, at = self.nesting, state.global_step
        if nesting.sparsifying and at == len(nesting.frozen) * self._round + self.sparsify_steps:
            nesting.freeze(self.evaluate)
        left = len(nesting.frozen) < len(nesting.levels)
        if left and not nesting.sparsifying and at == len(nesting.frozen) * self._round:
            nesting.sparsify(self.schedule)

    def on_save(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **objects: Any,
    ) -> None:
        """Keep what resuming needs."""
        if state.is_world_process_zero:
            torch.save(self.nesting.state_dict(), self._folder(args, state) / FILE)

    def _folder(self, args: TrainingArguments, state: TrainerState) -> Path:
        return Path(args.output_dir) / f"checkpoint-{state.global_step}"
