"""All levels of a packed file as one module that trains, beside the network that it learns from.

Nested weights are one tensor for all levels: a level sees those that its mask has, the others as
zero, and so do gradients. Biases, norms and statistics are each level's own. The modules are those
of the original network: they are called with other tensors, and stay as they were.
"""

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from elsa_converters.torch import arrays, unwrapped
from torch import Tensor, nn
from torch.func import functional_call

from elsa_format import level_digest
from elsa_format.plugins import LevelNumber
from elsa_train._errors import BadData, TrainError
from elsa_train._levels import drawn, usual_shares
from elsa_train.torch import _bits
from elsa_train.torch._distance import (
    answer_of,
    divergence,
    from_labels,
    holds_logits,
    relative,
    rows_of,
)
from elsa_train.torch._file import FrozenLevel, write_file
from elsa_train.torch._options import FinetuneOptions
from elsa_train.torch._packed import Packed, read
from elsa_train.torch._parameters import buffers_of, check_finite

Metrics = dict[LevelNumber, dict[str, float]]


class Tensors(nn.Module):
    """Tensors by names of another module, of which those that learn are parameters."""

    def __init__(self, tensors: Mapping[str, Tensor], *, learn: bool = False, keep: bool = True):
        super().__init__()
        self.keys = {name: "/" + name.replace(".", "/") for name in tensors}  # no dots allowed
        for name, tensor in tensors.items():
            if learn:
                self.register_parameter(self.keys[name], nn.Parameter(tensor))
            else:
                self.register_buffer(self.keys[name], tensor, persistent=keep)

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = getattr(self, self.keys[name])
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys)

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors."""
        return ((name, self[name]) for name in self.keys)


@dataclass(frozen=True)
class Answer:
    """What a network makes of a batch."""

    output: Any
    hidden: list[Tensor]
    real: Tensor | None
    """Which places are no padding."""

    @property
    def rows(self) -> Tensor:
        """The output that is compared, as (items, features)."""
        return rows_of(answer_of(self.output), self.real)


class Student(nn.Module):
    """The levels of a packed file, which learn from the network that was packed.

    Called with a batch it returns a mapping with the `loss` of the levels that a step trains: any
    loop can make it small. `step` says which levels these are. The masks are those of the file;
    `write` makes a new one. Hand all parameters to the optimizer: those of a level that a step does
    not train have no gradient.

    >>> model = nn.Linear(100, 10)
    >>> import elsa_format
    >>> report = elsa_format.pack(model.state_dict(), "linear.safetensors", sparsities=[90, 50])
    >>> student = Student(model, "linear.safetensors")
    >>> optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3)
    >>> for student.step in range(5):
    ...     optimizer.zero_grad()
    ...     student(torch.randn(8, 100))["loss"].backward()
    ...     report = optimizer.step()
    >>> student.write("student.safetensors")
    >>> [level.nonzero for level in elsa_format.open("student.safetensors").levels]
    [100, 500]

    Args:
        model: The original network, which is the teacher. It stays as it is.
        net: A file that was packed of it, and has tensors of the names that its state dict has.
        options: What is trained, and on what.
    """

    def __init__(self, model: nn.Module, net: Any, options: FinetuneOptions | None = None) -> None:
        super().__init__()
        options = options or FinetuneOptions()
        self.options, self.step, self.dense_share = options, 0, 1.0
        self._teacher = (unwrapped(model),)  # a tuple: its parameters are not to be trained
        try:
            hidden = re.compile(options.hidden)
        except re.error as error:
            raise TrainError(f"hidden={options.hidden!r}: {error}") from None
        named = self.teacher.named_modules()
        self._hidden = [m for n, m in named if options.hidden and hidden.search(n)]
        if options.hidden and not self._hidden:
            raise TrainError(f"hidden={options.hidden!r}: no module has such a name")
        self._takes_labels = "labels" in inspect.signature(self.teacher.forward).parameters
        self._norms = [
            m for m in self.teacher.modules() if isinstance(m, nn.modules.batchnorm._NormBase)
        ]
        self._take(read(self.teacher, net))

    @property
    def teacher(self) -> nn.Module:
        """The original network."""
        return self._teacher[0]

    @property
    def numbers(self) -> tuple[LevelNumber, ...]:
        """All levels, then "dense"."""
        return (*range(1, len(self.levels) + 1), "dense")

    @property
    def trained(self) -> tuple[LevelNumber, ...]:
        """Those that are trained."""
        return self.numbers if self.options.train == "all" else self.numbers[:-1]

    def _take(self, packed: Packed) -> None:
        """Put each tensor of the file where it is trained."""
        everything, buffers = self.options.train == "all", buffers_of(self.teacher)
        self.levels, self.bits, self.metadata = packed.levels, packed.bits, packed.metadata
        self._stored, self._nested = (
            packed.stored,
            sorted(packed.stored[n] for n in packed.counters),
        )
        self._dtypes = {name: tensor.dtype for name, tensor in packed.dense.items()}
        self._computed = {name: p.dtype for name, p in self.teacher.named_parameters()}
        own = packed.own[-1].keys()
        dense = {name: packed.dense[stored] for name, stored in packed.stored.items()}
        weights = {
            name: _master(tensor)
            for name, tensor in dense.items()
            if name not in own | buffers.keys() and tensor.is_floating_point()
        }
        self.counters = Tensors(packed.counters, keep=False)
        self.shared = Tensors(weights, learn=everything)
        self.own, self.statistics = nn.ModuleList(), nn.ModuleList()
        for level, found in zip(self.numbers, packed.own, strict=True):
            biases = {n: _master(t) for n, t in found.items() if n not in buffers}
            self.own.append(Tensors(biases, learn=everything or level != "dense"))
            moments = {n: t.to(buffers[n].dtype) for n, t in found.items() if n in buffers}
            self.statistics.append(Tensors(moments))
        rest = dense.keys() - weights.keys() - own
        self.rest = Tensors({name: dense[name].clone() for name in sorted(rest)})
        trained = {packed.stored[name] for name in (*weights, *own)}
        self._constant = {n: t for n, t in packed.dense.items() if n not in trained}
        device = next(self.teacher.parameters()).device
        nn.Module._apply(self, lambda tensor: tensor.to(device))

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Move the teacher, too, when this is moved."""
        self.teacher._apply(fn)
        return super()._apply(fn, recurse)

    def _at(self, level: LevelNumber) -> int:
        return len(self.levels) if level == "dense" else level - 1

    def weights(self, level: LevelNumber) -> dict[str, Tensor]:
        """The weights, biases and norms of a level; gradients go through them."""
        found = dict(self.shared.items())
        if level != "dense":
            for name, n in self.counters.items():
                found[name] = torch.where((n > 0) & (n <= level), found[name], 0)
        return found | dict(self.own[self._at(level)].items())

    def _called(self, level: LevelNumber) -> dict[str, Tensor]:
        """What the teacher's modules are called with to be a level."""
        weights = {name: w.to(self._computed[name]) for name, w in self.weights(level).items()}
        statistics = dict(self.statistics[self._at(level)].items())
        return weights | statistics | dict(self.rest.items())

    def answer(self, batch: Any, level: LevelNumber | None = None) -> Answer:
        """What a level makes of a batch, or the original network."""
        args, options, _, real = self._given(batch)
        seen: list[Tensor] = []

        def see(_: nn.Module, __: Any, output: Any) -> None:
            seen.append(answer_of(output))

        hooks = [module.register_forward_hook(see) for module in self._hidden]
        try:
            with self._mode(level is not None and self.training):
                if level is None:
                    with torch.no_grad():
                        output = self.teacher(*args, **options)
                else:
                    output = functional_call(self.teacher, self._called(level), args, options)
        finally:
            for hook in hooks:
                hook.remove()
        return Answer(output, seen, real)

    @contextmanager
    def _mode(self, learn: bool) -> Iterator[None]:
        """Evaluation mode, but for statistics that are learned: a teacher has no dropout."""
        before = [(module, module.training) for module in self.teacher.modules()]
        self.teacher.eval()
        for module in self._norms:
            module.training = learn
        try:
            yield
        finally:
            for module, mode in before:
                module.training = mode

    def _given(self, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any], Any, Tensor | None]:
        """Of a batch the arguments, by position and by name, the labels, and what is no padding."""
        if isinstance(batch, Mapping):
            kept = self.options.labels and self._takes_labels
            named = {name: value for name, value in batch.items() if kept or name != "labels"}
            return (), named, batch.get("labels"), named.get("attention_mask")
        args = tuple(batch) if isinstance(batch, tuple | list) else (batch,)
        if self.options.labels:
            return args[:-1], {}, args[-1], None
        return args, {}, None, None

    def loss(self, batch: Any, level: LevelNumber, wanted: Answer | None = None) -> Tensor:
        """How far a level is from what is wanted: by default from the original's answer."""
        wanted = self.answer(batch) if wanted is None else wanted
        found = self.answer(batch, level)
        loss = self._distance(found, wanted)
        for one, other in zip(found.hidden, wanted.hidden, strict=True):
            loss = loss + relative(rows_of(one, found.real), rows_of(other, found.real))
        if part := self.options.labels:
            labels = self._given(batch)[2]
            if labels is None:
                raise BadData("labels: the batch has none; expected a mapping with 'labels'")
            own = found.output.get("loss") if isinstance(found.output, Mapping) else None
            right = own if own is not None else from_labels(answer_of(found.output), labels)
            loss = (1 - part) * loss + part * right
        return loss

    def _distance(self, found: Answer, wanted: Answer) -> Tensor:
        if self.classes(wanted):
            return divergence(found.rows, wanted.rows, self.options.temperature)
        return relative(found.rows, wanted.rows)

    def classes(self, answer: Answer) -> bool:
        """Whether an answer has logits of classes."""
        return self.options.classes == "logits" or holds_logits(answer.output)

    def forward(self, *args: Any, **options: Any) -> dict[str, Tensor]:
        """Return the mean loss of the levels of this step, or in evaluation mode of all."""
        batch = options or (args[0] if len(args) == 1 else args)
        wanted = self.answer(batch)
        levels = self.drawn(self.step) if self.training else self.numbers
        losses = [self.weight(level) * self.loss(batch, level, wanted) for level in levels]
        return {"loss": torch.stack(losses).mean()}

    def weight(self, level: LevelNumber) -> float:
        """How much a level's loss counts. Where a step trains one level, it comes more often."""
        heavier = level == "dense" and self.options.each == "sandwich"
        return self.dense_share if heavier else 1.0

    def drawn(self, step: int) -> list[LevelNumber]:
        """The levels that a step trains: a function of the step, the seed and `dense_share`."""
        options, count, seed = self.options, len(self.levels), (self.options.seed,)
        shares = options.shares or usual_shares(count)
        if len(shares) != count + 1 or min(shares) < 0:
            raise TrainError(
                f"shares={shares}: expected {count + 1} whole numbers, the dense network's last"
            )
        dense: list[LevelNumber] = ["dense"] if options.train == "all" else []
        if options.each == "one":
            last = round(shares[-1] * self.dense_share) if dense else 0
            number = drawn(step, (*shares[:-1], last), seed)
            return [number or "dense"]
        between = (0,) + (1,) * (count - 1) + (0,)
        return [1, *([drawn(step, between, seed)] if count > 1 else []), *dense]

    @torch.no_grad()
    def measure(self, batches: Iterable[Any], levels: Iterable[LevelNumber] = ()) -> Metrics:
        """The loss of levels, or of all, and how near they are to the original's answers."""
        wanted_levels = tuple(levels) or self.numbers
        sums = {level: torch.zeros(5, dtype=torch.float64) for level in wanted_levels}
        mode, classes = self.training, False
        self.eval()
        for batch in batches:
            wanted = self.answer(batch)
            classes, right = self.classes(wanted), wanted.rows
            for level in wanted_levels:
                found = self.answer(batch, level)
                rows = found.rows
                sums[level] += torch.tensor(
                    [
                        float(self._distance(found, wanted)) * len(rows),
                        float((rows - right).square().sum()),
                        float(right.square().sum()),
                        float((rows.argmax(-1) == right.argmax(-1)).sum()),
                        len(rows),
                    ],
                    dtype=torch.float64,
                )
        self.train(mode)
        return {level: _metrics(found.tolist(), classes) for level, found in sums.items()}

    @torch.no_grad()
    def settle(self) -> None:
        """Give weights the values that a file can hold: their counters are in the low bits."""
        for name, p in self.shared.items():
            check_finite(name, p)
            dtype = self._dtypes[self._stored[name]]
            value = p.detach().to(dtype)
            if name in self.counters.keys:
                value = _bits.flush(value, self.bits)
                n = self.counters[name]
                least = torch.full_like(value, 2 * torch.finfo(dtype).smallest_normal)
                value = torch.where((n > 0) & ~_bits.is_nonzero(value), least, value)
                value = _bits.embed(value, n.to(_bits.words_of(value).dtype), self.bits)
            p.copy_(value)
        for part in self.own:
            for name, p in part.items():
                check_finite(name, p)
                p.copy_(p.detach().to(self._dtypes[self._stored[name]]))

    @torch.no_grad()
    def write(
        self,
        path: str | Path,
        *,
        metrics: Metrics | None = None,
        metadata: Mapping[str, str] | None = None,
        force: bool = False,
    ) -> None:
        """Write the ELSA file, and check that it gives back each level.

        Args:
            path: The new file.
            metrics: What was measured of each level, and of "dense".
            metadata: Strings for the header, beside those of the file that it began with.
            force: Replace a file that exists.
        """
        self.settle()
        dense, metrics = self._tensors("dense"), metrics or {}
        frozen = []
        for t, level in enumerate(self.levels, 1):
            tensors = self._tensors(t)
            kept = sum(int(((n > 0) & (n <= t)).sum()) for _, n in self.counters.items())
            size = sum(n.numel() for _, n in self.counters.items())
            digest = level_digest(arrays(tensors), self._nested)
            own = (*self.own[t - 1], *self.statistics[t - 1])
            frozen.append(
                FrozenLevel(
                    level,
                    kept,
                    1 - kept / size,
                    digest,
                    metrics.get(t, {}),
                    {self._stored[name]: tensors[self._stored[name]] for name in own},
                )
            )
        write_file(
            path,
            arrays(dense),
            self._nested,
            frozen,
            self.bits,
            metrics=metrics.get("dense", {}),
            metadata={**self.metadata, **(metadata or {})},
            force=force,
        )

    def _tensors(self, level: LevelNumber) -> dict[str, Tensor]:
        """A level's tensors under the names of the file, in its types."""
        found = self.weights(level) | dict(self.statistics[self._at(level)].items())
        stored = {self._stored[name]: tensor.detach() for name, tensor in found.items()}
        return self._constant | {n: t.to(self._dtypes[n]) for n, t in stored.items()}


def _master(tensor: Tensor) -> Tensor:
    """A copy that small steps can move."""
    return tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32), copy=True)


def _metrics(sums: list[float], classes: bool) -> dict[str, float]:
    lost, differing, size, same, items = sums
    if not items:
        raise BadData("batches: there are none to measure levels on")
    found = {"loss": lost / items, "relative_error": (differing / max(size, 1e-30)) ** 0.5}
    return found | ({"agreement": same / items} if classes else {})
