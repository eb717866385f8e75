"""Nested levels in Hugging Face's Trainer.

>>> from elsa_train.torch.trainer import FinetuneCallback, NestingCallback
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from elsa_format import OutputExists
from elsa_train._errors import TrainError
from elsa_train._levels import Schedule, parse_levels
from elsa_train.torch._nesting import Nesting
from elsa_train.torch._student import Student

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


class FinetuneCallback(TrainerCallback):
    """Tells the `Student` that a Trainer trains which step it is, and writes its file at the end.

    The Trainer's model is the student, as `Nesting.from_file` returns it, and its loss is the
    distance from the original network. `TrainingArguments(remove_unused_columns=False)`, as the
    student takes whatever the original takes.

    Args:
        student: What the Trainer trains.
        out: The file to write when it is done.
        force: Replace a file that exists.

    >>> model = torch.nn.Linear(100, 10)
    >>> import elsa_format
    >>> report = elsa_format.pack(model.state_dict(), "line.safetensors", sparsities=[90, 50])
    >>> student = Nesting.from_file(model, "line.safetensors")
    >>> callback = FinetuneCallback(student, "tuned.safetensors")  # Trainer(student, callbacks=[…])
    """

    def __init__(self, student: Student, out: str | Path, *, force: bool = False) -> None:
        self.student, self.out, self.force = student, Path(out), force
        if self.out.exists() and not force:
            raise OutputExists(f"{out}: exists already", "{force} replaces it", force=True)

    def on_step_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **objects: Any,
    ) -> None:
        """Choose the levels of the step."""
        self.student.step = state.global_step

    def on_train_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **objects: Any,
    ) -> None:
        """Write the file."""
        if state.is_world_process_zero:
            self.student.write(self.out, force=self.force)
