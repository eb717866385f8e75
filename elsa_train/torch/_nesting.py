"""Multi-level ELSA (Algorithm 2) around a training loop that is not ours.

All is done after a step of the optimizer: what is frozen gets its bits back, what is pruned is set
to zero. Masking gradients would not do, as momentum and weight decay move weights without any.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch
from elsa_converters.torch import arrays, unwrapped, without_aliases
from torch import Tensor, nn
from torch.optim import Optimizer

from elsa_format import level_digest
from elsa_format.levels import kept_count
from elsa_train._errors import (
    FrozenWeightChanged,
    InfeasibleTraining,
    TrainError,
)
from elsa_train._levels import (
    Level,
    Schedule,
    check_blocks,
    check_budget,
    check_growth,
    check_levels,
    parse_levels,
)
from elsa_train.torch import _bits
from elsa_train.torch._file import FrozenLevel, write_file
from elsa_train.torch._options import FinetuneOptions
from elsa_train.torch._parameters import buffers_of, check_finite, input_axis, prunable
from elsa_train.torch._select import keys, select, select_blocks
from elsa_train.torch._student import Student

Score = Callable[[nn.Parameter], Tensor]
Evaluate = Callable[[], Mapping[str, Any]]
NOW = Schedule(0, 0, 1)


def magnitude(parameter: nn.Parameter) -> Tensor:
    """Score |theta|.

    >>> magnitude(nn.Parameter(torch.tensor([-2.0]))).tolist()
    [2.0]
    """
    return parameter.detach().abs()


class Nesting:
    """Levels nested into a module while any loop trains it.

    For each level: `sparsify`, train, `freeze`, `densify`, train. Then `write`. The levels keep
    so much of the prunable weights, together (`scope="global"`), in each tensor ("uniform"), or N
    of M neighbours along a layer's inputs. Prunable are tensors of two or more dimensions but
    embeddings, unless `prune`, a regular expression on names, says otherwise; `exclude`, another,
    leaves some out. All other parameters are frozen with the first level, and buffers are stored
    for each level. `dtype` is what the file is to hold, if not the module's own types. `fresh`
    makes another initial network, of which weights that stayed at zero are taken before pruning.

    >>> model = torch.nn.Linear(20, 10)
    >>> optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    >>> def train(steps):
    ...     for _ in range(steps):
    ...         optimizer.zero_grad()
    ...         model(torch.randn(8, 20)).square().mean().backward()
    ...         optimizer.step()
    >>> nesting = Nesting(model, optimizer, levels="90,50")
    >>> for level in nesting.levels:
    ...     nesting.sparsify(Schedule(start=0, end=5, every=2))
    ...     train(10)
    ...     frozen = nesting.freeze()
    ...     nesting.densify()
    ...     train(10)
    >>> nesting.write("linear.safetensors")
    >>> import elsa_format
    >>> [level.nonzero for level in elsa_format.open("linear.safetensors").levels]
    [30, 110]
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        levels: str | Sequence[str | float] = "90,80,50",
        *,
        scope: Literal["global", "uniform"] = "global",
        prune: str | None = None,
        exclude: str = "",
        axis: int | None = None,
        score: Score = magnitude,
        fresh: Callable[[], nn.Module] | None = None,
        dtype: torch.dtype | None = None,
        bits: int | None = None,
    ) -> None:
        if scope not in ("global", "uniform"):
            raise TrainError(f"scope {scope!r}, expected 'global' or 'uniform'")
        model = unwrapped(model)
        self.model, self.levels, self.score, self.dtype = model, parse_levels(levels), score, dtype
        self.fresh = fresh
        self.params = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self._dtypes = {n: p.dtype for n, p in self.params.items()}
        for name, p in self.params.items():
            if p.is_meta or hasattr(p, "to_local"):
                raise TrainError(
                    f"{name}: is on the meta device or sharded, which is not supported"
                )
        self.patterns = any(level.pattern for level in self.levels)
        self.bits = 0
        for stored in {self._stored_dtype(p) for p in self.params.values()}:
            name = str(stored).removeprefix("torch.")
            self.bits = check_levels(self.levels, bits=bits, dtype=name)
        self.prunable = prunable(model, self.params, prune, exclude)
        self.axes = {n: input_axis(model, n) if axis is None else axis for n in self.prunable}
        names = list(self.prunable)
        self._groups = [[n] for n in names] if scope == "uniform" or self.patterns else [names]
        self._check_budgets()
        self.counters = {
            n: torch.zeros(p.shape, dtype=torch.uint8, device=p.device)
            for n, p in self.params.items()
        }
        self.frozen: list[FrozenLevel] = []
        self.step = 0
        self.schedule: Schedule | None = None
        # Words: all ones where a weight may change, and what the others are held at.
        self._free: dict[str, Tensor] = {}
        self._kept: dict[str, Tensor] = {}
        if optimizer is not None:
            self.watch(optimizer)

    @staticmethod
    def from_file(model: nn.Module, net: Any, options: FinetuneOptions | None = None) -> Student:
        """Go on from a packed file: its masks stay, and all levels train together.

        `model` is the network that was packed, from which they learn. See `Student`, and `finetune`
        for a loop.
        """
        return Student(model, net, options)

    @property
    def sparsifying(self) -> bool:
        """Whether a level is being made: between `sparsify` and `freeze`."""
        return self.schedule is not None

    @property
    def level(self) -> Level:
        """The level that is made next, or now."""
        if len(self.frozen) == len(self.levels):
            raise TrainError(f"all {len(self.levels)} levels are frozen")
        return self.levels[len(self.frozen)]

    def watch(self, optimizer: Optimizer, *, counts: bool = True) -> Any:
        """Hold weights after each step of an optimizer; `remove()` ends it.

        Of several that take turns, each with its own parameters, one counts the steps.
        """
        while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
            optimizer = inner  # accelerate's wrapper calls no hooks

        def after_step(*_: Any) -> None:
            self._after_step(counts)

        return optimizer.register_step_post_hook(after_step)

    @torch.no_grad()
    def sparsify(self, schedule: Schedule = NOW) -> None:
        """Begin the next level: weights are pruned at once, or along a schedule of steps."""
        if self.sparsifying:
            raise TrainError(f"level {self.level.name}: is being made already; freeze it")
        self._check_frozen(f"before level {self.level.name}")
        self.schedule, self.step = schedule, 0
        if schedule.updates_at(0):
            self._prune()
        self._project()

    @torch.no_grad()
    def freeze(self, evaluate: Evaluate = dict) -> FrozenLevel:
        """End the level: what is not zero keeps its value from now on, with its counter in it.

        `evaluate` measures the level, which the module then is. A level that misses its budget by
        more than 0.1 % of all weights is refused (`MissedBudget`), and nothing is frozen.
        """
        level, schedule = self.level, self.schedule
        if schedule is None:
            raise TrainError(f"level {level.name}: sparsify comes before freeze")
        if self.step < schedule.end:
            raise TrainError(
                f"level {level.name}: frozen after {self.step} steps, but its schedule ends at "
                f"{schedule.end}"
            )
        self._check_frozen(f"while level {level.name} was made")
        t = len(self.frozen) + 1
        self._check_level(level)
        for name, p in self.params.items():
            n = self.counters[name]
            stored = self._stored(p)
            new = (n == 0) & _bits.is_nonzero(stored)
            value = _bits.embed(stored, t, self.bits).to(p.dtype)
            p.copy_(torch.where(new, value, torch.where(n == 0, torch.zeros_like(p), p)))
            n[new] = t
        self.schedule = None
        self._hold({})
        frozen = self._record(level)
        frozen.metrics.update(_numbers(evaluate()))
        self.frozen.append(frozen)
        return frozen

    @torch.no_grad()
    def densify(self) -> None:
        """Let the weights that are not frozen train again; `freeze` has begun this already."""
        if self.sparsifying:
            raise TrainError(f"level {self.level.name}: freeze comes before densify")
        self._check_frozen("before densify")
        self._hold({})

    @torch.no_grad()
    def write(
        self,
        path: str | Path,
        *,
        evaluate: Evaluate = dict,
        metadata: Mapping[str, str] | None = None,
        force: bool = False,
    ) -> None:
        """Write the ELSA file, and check that it gives back each level as it was frozen.

        Weights that no level has get counter 0: the module becomes the file's dense network, which
        `evaluate` measures.
        """
        if len(self.frozen) < len(self.levels):
            raise TrainError(f"{len(self.frozen)} of {len(self.levels)} levels are frozen")
        self._check_frozen("after the last level")
        for name, p in self.params.items():
            check_finite(name, p)
            dense = _bits.embed(self._stored(p), 0, self.bits).to(p.dtype)
            p.copy_(torch.where(self.counters[name] == 0, dense, p))
        tensors, aliases = self._tensors()
        write_file(
            path,
            arrays(tensors),
            list(self.params),
            self.frozen,
            self.bits,
            metrics=_numbers(evaluate()),
            metadata={**aliases, "format": "pt", **(metadata or {})},
            force=force,
        )

    def state_dict(self) -> dict[str, Any]:
        """All that resuming needs beside the module and the optimizer; `torch.save` takes it."""
        return {
            "levels": [level.name for level in self.levels],
            "frozen": [{**asdict(frozen), "level": frozen.level.name} for frozen in self.frozen],
            "counters": self.counters,
            "held": {name: free == 0 for name, free in self._free.items()},
            "step": self.step,
            "schedule": asdict(self.schedule) if self.schedule else None,
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume, after the module's own state was loaded."""
        self._check_state(state)
        for name, n in self.counters.items():
            n.copy_(state["counters"][name])
        self.frozen = [
            FrozenLevel(**{**frozen, "level": level})
            for frozen, level in zip(state["frozen"], self.levels, strict=False)
        ]
        self.step = int(state["step"])
        self.schedule = Schedule(**state["schedule"]) if state["schedule"] else None
        pruned = {
            name: held.to(self.params[name].device) & (self.counters[name] == 0)
            for name, held in state["held"].items()
        }
        self._hold(pruned if self.sparsifying else {})

    def _check_state(self, state: Mapping[str, Any]) -> None:
        """Refuse a state of other levels, parameters or weights: these hold their counters."""
        levels, counters = state.get("levels"), state.get("counters")
        if levels is None or counters is None:
            raise TrainError("not a state that Nesting.state_dict has returned")
        shapes = {name: tuple(n.shape) for name, n in self.counters.items()}
        if levels != [level.name for level in self.levels] or shapes != {
            name: tuple(n.shape) for name, n in counters.items()
        }:
            raise TrainError(f"a state of levels {', '.join(levels)} of another training")
        for name, p in self.params.items():
            words = _bits.words_of(p.detach().to(self._stored_dtype(p)))
            found = (words & ((1 << self.bits) - 1)).to(torch.uint8)
            expected = counters[name].to(p.device)
            if not bool(((found == expected) | (expected == 0)).all()):
                raise TrainError(
                    f"{name}: frozen weights are not those of the state; load the module's first"
                )

    def _after_step(self, counts: bool) -> None:
        with torch.no_grad():
            self.step += counts
            if counts and self.schedule is not None and self.schedule.updates_at(self.step):
                self._project()
                self._prune()
            self._project()

    def _project(self) -> None:
        """Give held weights their values: as bits, so that NaN does no harm, and it is quick."""
        for name, free in self._free.items():
            p = self.params[name].data
            self._check_dtype(name, p)
            words = _bits.words_of(p)
            words.bitwise_and_(free).bitwise_or_(self._kept[name])

    def _hold(self, pruned: Mapping[str, Tensor]) -> None:
        """Hold what is frozen at its value, and what is pruned at zero."""
        self._free, self._kept = {}, {}
        for name, p in self.params.items():
            frozen = self.counters[name] > 0
            held = frozen | pruned[name] if name in pruned else frozen
            if bool(held.any()):
                words = _bits.words_of(p.detach())
                self._free[name] = held.to(words.dtype) - 1
                self._kept[name] = torch.where(frozen, words, 0)

    def _prune(self) -> None:
        assert self.schedule is not None
        if self.step == self.schedule.first:
            self._revive()
        level, progress = self.level, self.schedule.progress(self.step)
        pruned: dict[str, Tensor] = {}
        for group in self._groups:
            ranked = [keys(self.score(self.params[n]), self.counters[n] > 0) for n in group]
            if level.pattern is not None:
                (name,) = group
                kept = [select_blocks(ranked[0], level.pattern, self.axes[name])]
            else:
                total = sum(k.numel() for k in ranked)
                final = kept_count(1 - level.density, total)
                kept = select(ranked, round(total - (total - final) * progress))
            pruned |= {name: ~keep for name, keep in zip(group, kept, strict=True)}
        self._hold(pruned)

    def _revive(self) -> None:
        """Draw free weights that are exactly zero anew.

        Behind a channel that is silent for good, with nothing kept and a frozen negative bias, no
        gradient would ever move them; what has one has moved by now.
        """
        if self.fresh is None:
            return
        drawn = dict(unwrapped(self.fresh()).named_parameters())
        for name, p in self.params.items():
            found = tuple(drawn[name].shape) if name in drawn else "none"
            if found != tuple(p.shape):
                raise TrainError(
                    f"{name}: found {found} in what fresh has made, expected {tuple(p.shape)}"
                )
        for name, p in self.params.items():
            dead = (self.counters[name] == 0) & ~_bits.is_nonzero(p.detach())
            p.copy_(torch.where(dead, drawn[name].detach().to(p), p))

    def _stored_dtype(self, p: Tensor) -> torch.dtype:
        return self.dtype or p.dtype

    def _stored(self, p: Tensor) -> Tensor:
        """The values to store; what a counter could make denormal is zero."""
        return _bits.flush(p.detach().to(self._stored_dtype(p)), self.bits)

    def _check_level(self, level: Level) -> None:
        """Refuse, before it is frozen, a level without the weights that it was to have."""
        for name, p in self.params.items():
            check_finite(name, p)
        nonzero = sum(
            int(((self.counters[n] > 0) | _bits.is_nonzero(self._stored(self.params[n]))).sum())
            for n in self.prunable
        )
        check_budget(
            level,
            nonzero,
            self._budget(level),
            sum(p.numel() for p in self.params.values()),
            len(self.params),
            "where there are fewer, they are exactly zero: train before freeze, or give fresh=, "
            "which reinitializes weights that stayed at zero",
        )
        check_growth(level, nonzero, sum(int((self.counters[n] > 0).sum()) for n in self.prunable))

    def _budget(self, level: Level) -> int:
        sizes = [sum(self.params[n].numel() for n in group) for group in self._groups]
        return sum(kept_count(1 - level.density, size) for size in sizes)

    def _check_budgets(self) -> None:
        """Refuse, before training, levels that can't be nested in these weights."""
        shapes = {name: tuple(self.params[name].shape) for name in self.prunable}
        for name, shape in shapes.items():
            check_blocks({name: shape}, self.levels, self.axes[name])
        for sparser, denser in pairwise(self.levels):
            before, after = self._budget(sparser), self._budget(denser)
            if after <= before:
                raise InfeasibleTraining(
                    f"level {denser.name} keeps {after} weights, no more than the {before} that "
                    f"level {sparser.name} has frozen"
                )

    def _check_dtype(self, name: str, p: Tensor) -> None:
        if p.dtype != self._dtypes[name]:
            raise TrainError(
                f"{name}: was {self._dtypes[name]} and is {p.dtype}; cast before Nesting, or give "
                "it the dtype to store"
            )

    def _check_frozen(self, when: str) -> None:
        """Compare frozen weights with what they are held at, in the parameters the module has."""
        now = dict(self.model.named_parameters())
        for name, p in self.params.items():
            if now.get(name) is not p:
                raise TrainError(
                    f"{name}: was replaced in the module; train the one that was there"
                )
            self._check_dtype(name, p)
        for name, kept in self._kept.items():
            frozen = self.counters[name] > 0
            words = _bits.words_of(self.params[name].detach())
            if not bool(((words == kept) | ~frozen).all()):
                raise FrozenWeightChanged(
                    f"{name}: frozen weights have changed {when}; is the optimizer that trains "
                    "them watched?"
                )

    def _tensors(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        """The module's tensors as they are to be stored, of tied ones the first; other names."""
        state = self.model.state_dict(keep_vars=True)
        own, aliases = without_aliases({n: t for n, t in state.items() if isinstance(t, Tensor)})
        stored = {n: p.detach().to(self._stored_dtype(p)) for n, p in self.params.items()}
        return {name: stored.get(name, tensor) for name, tensor in own.items()}, aliases

    def _record(self, level: Level) -> FrozenLevel:
        kept = {n: int((c > 0).sum()) for n, c in self.counters.items()}
        nonzero = sum(kept.values())
        buffers = {name: b.detach().clone() for name, b in buffers_of(self.model).items()}
        total = sum(p.numel() for p in self.params.values())
        digest = level_digest(arrays(self._tensors()[0]), list(self.params))
        return FrozenLevel(level, nonzero, 1 - nonzero / total, digest, buffers=buffers)


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items()}
