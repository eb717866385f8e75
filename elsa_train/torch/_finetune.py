"""A short fine-tune of all levels of a packed file together; its teacher is the network they had.

The loop is `_Run.step`: the original's answer to a batch, then each level that this step trains
moves towards it. Everything else is what a loop needs: batches, a rate, what is saved.
"""

import math
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as processes
from torch import Tensor, nn
from torch.optim import Optimizer

from elsa_format import OutputExists
from elsa_format.plugins import Progress, no_progress
from elsa_train._errors import BadData, BadRecipe, NonFiniteLoss, TrainError
from elsa_train.torch._options import FinetuneOptions
from elsa_train.torch._student import Metrics, Student

LOOKS = 10
"""How often in all the dense network is measured on what is held back."""
MOST = 16.0
"""The dense network's largest share of the loss, relative to its first."""


@dataclass(frozen=True)
class FinetuneReport:
    """What levels were worth on held-back batches.

    >>> FinetuneReport({"dense": {"loss": 0.2}}, {"dense": {"loss": 0.1}}).after["dense"]["loss"]
    0.1
    """

    before: Metrics
    """Of each level and "dense": `loss`, `relative_error`, and of classes `agreement`."""
    after: Metrics


def finetune(
    model: nn.Module,
    net: Any,
    batches: Iterable[Any],
    *,
    steps: int,
    out: str | Path,
    options: FinetuneOptions | None = None,
    validation: Iterable[Any] | None = None,
    state: str | Path | None = None,
    save_every: int = 100,
    force: bool = False,
    progress: Progress = no_progress,
    **fields: Any,
) -> FinetuneReport:
    """Fine-tune all levels of a packed file together, and write a new file.

    Every level learns to answer as the original network does; labels are not needed. The masks
    stay. Biases, norms and statistics are each level's own.

    In a process group of `torch.distributed` each process gives batches of its own, gradients are
    averaged, and the first process writes.

    >>> model = nn.Sequential(nn.Linear(20, 40), nn.ReLU(), nn.Linear(40, 10))
    >>> import elsa_format
    >>> report = elsa_format.pack(model.state_dict(), "mlp.safetensors", sparsities=[90, 50])
    >>> batches = [torch.randn(16, 20) for _ in range(40)]
    >>> found = finetune(model, "mlp.safetensors", batches, steps=50, out="tuned.safetensors")
    >>> found.after[1]["relative_error"] < found.before[1]["relative_error"]
    True

    Args:
        model: The original network: the teacher. It stays as it is.
        net: The packed file, by magnitude or by calibration.
        batches: What the model is called with: tensors, tuples of arguments or mappings of them.
            When they end, they are gone through again.
        steps: Steps of the optimizer.
        out: The new file.
        options: What can be chosen.
        validation: Batches to measure levels on. Default: the first batches, which are then not
            trained on.
        state: A file to which the state is saved, and from which the same call resumes. It is
            removed when `out` is written. Batches must come in the same order again.
        save_every: Steps after which the state is saved.
        force: Replace a file that exists.
        progress: Is called with the number of steps done, and of all.
        **fields: Of `FinetuneOptions`, instead of those in `options`.

    Returns:
        What each level was worth before and after, on held-back batches.

    Raises:
        BadData: The batches are too few.
        NonFiniteLoss: The gradient became infinite or NaN.
    """
    options = replace(options or FinetuneOptions(), **fields)
    if steps < 1 or save_every < 1:
        raise BadRecipe(f"steps={steps}, save_every={save_every}: expected 1 or more")
    if Path(out).exists() and not force:
        raise OutputExists(f"{out}: exists already", "{force} replaces it", force=True)
    student = Student(model, net, options)
    held, rest = _held_back(batches, validation, options.held_back)
    run = _Run(student, steps)
    if state is not None and Path(state).exists():
        run.load(Path(state))
    else:
        run.before = _measure(student, held)
    source = islice(_endless(rest), run.done * options.accumulate, None)
    student.train()
    while run.done < steps:
        run.step(list(islice(source, options.accumulate)))
        if options.dense_bound is not None and run.done % max(1, steps // LOOKS) == 0:
            run.bound_dense(held, options.dense_bound)
        if state is not None and run.done % save_every == 0:
            run.save(Path(state))
        progress(run.done, steps)
    run.finish()
    report = FinetuneReport(run.before, _measure(student, held))
    _warn(report, options)
    if _first():
        stored = {
            level: {name: value for name, value in found.items() if name != "loss"}
            for level, found in report.after.items()
        }
        student.write(out, metrics=stored, force=force)
        if state is not None:
            Path(state).unlink(missing_ok=True)
    if processes.is_initialized():
        processes.barrier()
    return report


class _Run:
    """A student, its optimizer, and how far it has come."""

    before: Metrics

    def __init__(self, student: Student, steps: int) -> None:
        self.student, self.options, self.steps, self.done = student, student.options, steps, 0
        self.parameters = [p for p in student.parameters() if p.requires_grad]
        self.optimizer: Optimizer = self.options.optimizer(self.parameters)
        self.device = self.parameters[0].device.type
        half = self.options.amp is torch.float16
        self.scaler = torch.amp.GradScaler(self.device, enabled=half)
        averaged = [*self.parameters, *_statistics(student)] if self.options.ema else []
        self.average = [tensor.detach().clone() for tensor in averaged]

    def step(self, batches: list[Any]) -> None:
        """Move each level that this step trains towards the original's answers."""
        student, levels = self.student, self.student.drawn(self.done)
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate()
        self.optimizer.zero_grad()
        for batch in batches:
            batch = _moved(batch, self.parameters[0].device)
            with self._autocast():
                wanted = student.answer(batch)
            for level in levels:  # one backward each: no two graphs in memory
                with self._autocast():
                    loss = student.weight(level) * student.loss(batch, level, wanted)
                self.scaler.scale(loss / len(levels) / len(batches)).backward()
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        _mean(gradients)
        self.scaler.unscale_(self.optimizer)
        norm = nn.utils.clip_grad_norm_(self.parameters, self.options.clip)
        if not self.scaler.is_enabled() and not bool(norm.isfinite()):
            raise NonFiniteLoss(f"step {self.done}: the gradient is not finite; lower the rate")
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.done += 1
        if self.average:
            now = [*self.parameters, *_statistics(student)]
            torch._foreach_lerp_(self.average, [t.detach() for t in now], 1 - self.options.ema)

    def rate(self) -> float:
        """The learning rate of this step."""
        warmup = self.options.warmup * self.steps
        if self.done < warmup:
            return self.options.rate * (self.done + 1) / (warmup + 1)
        progress = (self.done - warmup) / (self.steps - warmup)
        return self.options.rate * 0.5 * (1 + math.cos(math.pi * progress))

    def bound_dense(self, held: list[Any], bound: float) -> None:
        """Double the dense network's share of the loss where it has become worse than it may."""
        if "dense" in self.student.trained:
            now = _measure(self.student, held, "dense")["dense"]["loss"]
            above = now > max(bound, self.before["dense"]["loss"])
            share = self.student.dense_share
            self.student.dense_share = min(share * 2, MOST) if above else max(1.0, share / 2)

    @torch.no_grad()
    def finish(self) -> None:
        """Take the averages, and the values that the file can hold."""
        if self.average:
            for tensor, average in zip(
                [*self.parameters, *_statistics(self.student)], self.average, strict=True
            ):
                tensor.copy_(average)
        _mean(_statistics(self.student))
        self.student.settle()

    def _autocast(self) -> torch.autocast:
        amp = self.options.amp
        return torch.autocast(self.device, amp or torch.bfloat16, enabled=amp is not None)

    def _fingerprint(self) -> str:
        """What a state is of."""
        levels = ", ".join(level.name for level in self.student.levels)
        chosen = {k: v for k, v in vars(self.options).items() if k != "optimizer"}
        return f"{self.steps} steps of {levels}; {chosen}"

    def save(self, path: Path) -> None:
        """Save what resuming needs; a state that was cut short never takes the place of another."""
        if not _first():
            return
        content = {
            "of": self._fingerprint(),
            "done": self.done,
            "before": self.before,
            "dense_share": self.student.dense_share,
            "student": self.student.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "average": self.average,
        }
        new = path.with_name(path.name + ".new")
        with new.open("wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)

    @torch.no_grad()
    def load(self, path: Path) -> None:
        """Go on from a state."""
        content = torch.load(path, map_location=self.parameters[0].device, weights_only=True)
        if content["of"] != self._fingerprint():
            raise TrainError(
                f"{path}: is the state of another fine-tune ({content['of']}); remove it to start "
                "over"
            )
        self.done, self.before = content["done"], content["before"]
        self.student.dense_share = content["dense_share"]
        self.student.load_state_dict(content["student"])
        self.optimizer.load_state_dict(content["optimizer"])
        self.scaler.load_state_dict(content["scaler"])
        self.average = content["average"]


def _statistics(student: Student) -> list[Tensor]:
    return [tensor for part in student.statistics for _, tensor in part.items()]


def _held_back(
    batches: Iterable[Any], validation: Iterable[Any] | None, count: int
) -> tuple[list[Any], Iterable[Any]]:
    """Batches to measure on, and those to train on."""
    if validation is not None:
        return list(validation), batches
    if isinstance(batches, Iterator):
        return list(islice(batches, count)), batches
    return list(islice(batches, count)), _Without(batches, count)


@dataclass
class _Without:
    """Batches without the first ones."""

    batches: Iterable[Any]
    count: int

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.batches), self.count, None)


def _endless(batches: Iterable[Any]) -> Iterator[Any]:
    """The batches, again and again."""
    while True:
        empty = True
        for batch in batches:
            empty = False
            yield batch
        if empty:
            raise BadData(
                "batches: there are too few; give more, or what can be gone through again, such as "
                "a list or a DataLoader"
            )


def _moved(value: Any, device: torch.device) -> Any:
    """A batch on a device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {name: _moved(inner, device) for name, inner in value.items()}
    if isinstance(value, tuple | list):
        return tuple(_moved(inner, device) for inner in value)
    return value


def _measure(student: Student, held: list[Any], *levels: Any) -> Metrics:
    """What levels are worth, to all processes."""
    device = next(student.parameters()).device
    found: Metrics = student.measure([_moved(batch, device) for batch in held], levels)
    if processes.is_initialized():
        keys = [(level, name) for level, metrics in found.items() for name in metrics]
        values = torch.tensor([found[level][name] for level, name in keys], device=device)
        _mean([values])
        for (level, name), value in zip(keys, values.tolist(), strict=True):
            found[level][name] = value
    return found


def _mean(tensors: list[Tensor]) -> None:
    """Average tensors over all processes, in place."""
    if processes.is_initialized() and (count := processes.get_world_size()) > 1:
        waits = [processes.all_reduce(tensor, async_op=True) for tensor in tensors]
        for wait, tensor in zip(waits, tensors, strict=True):
            wait.wait()
            tensor.div_(count)


def _first() -> bool:
    return not processes.is_initialized() or processes.get_rank() == 0


def _warn(report: FinetuneReport, options: FinetuneOptions) -> None:
    """Say so where the dense network is worse than it may be."""
    before, after = report.before["dense"]["loss"], report.after["dense"]["loss"]
    if options.dense_bound is not None and after > max(options.dense_bound, before):
        warnings.warn(
            f"the dense network's loss on held-back batches is {after:.4g}, above dense_bound="
            f"{options.dense_bound:g}: give it a lower rate or more steps",
            stacklevel=3,
        )
