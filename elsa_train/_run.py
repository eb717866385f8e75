"""A recipe from data to ELSA file: what is trained in which phases, and what is written."""

import dataclasses
import json
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from elsa_train._checkpointing import StopSignal
from elsa_train._errors import BadRecipe, NotReproduced
from elsa_train._file import write_file
from elsa_train._folder import PLACES, Output, load_network, wait
from elsa_train._jaxpruner import JaxprunerRule, jaxpruner_rules, make_updater
from elsa_train._joint import Joint
from elsa_train._levels import Level, parse_levels
from elsa_train._loop import Part, Trainer
from elsa_train._multilevel import Network, Result, zeros
from elsa_train._plan import MaskRule, Plan
from elsa_train._recipe import MOST, Recipe
from elsa_train._report import Reporter, Row
from elsa_train._schedule import Schedule
from elsa_train._sparsify import Pruner, Scope
from elsa_train.data import load
from elsa_train.data.protocol import identity_of

PyTree = Any
JOINT = 3000
SAME = 0.01
"""Part by which a metric, or what it is out of 1, may differ when a level is evaluated again."""


class Run:
    """One seed of a recipe."""

    def __init__(self, recipe: Recipe, seed: int, output: Output, reporter: Reporter) -> None:
        """Load the data and refuse what can't be trained."""
        self.recipe, self.seed, self.output, self.reporter = recipe, seed, output, reporter
        self.trainer = Trainer(recipe, load(recipe.dataset, recipe.source), seed)
        self.levels = parse_levels(recipe.levels)
        self.scope = Scope(recipe.scope, recipe.prune, recipe.exclude, recipe.axis)  # type: ignore[arg-type]
        self.bits = self.scope.check(
            self.trainer.like.params,
            self.levels,
            bits=recipe.bits or None,
            dtype=recipe.store_dtype,
        )
        if recipe.store_dtype == "bfloat16" and self.bits > 2:
            reporter.note(
                f"{self.bits} of bfloat16's 7 mantissa bits hold the counters, at a cost; "
                "store float32 for this many levels"
            )
        plans = self.plans()
        for plan in plans.values():
            if plan.steps > MOST:
                raise BadRecipe(f"{plan.name}: {plan.steps} steps, expected at most {MOST}")
        if recipe.updater:
            rules = [p.rule for n, p in plans.items() if n % 2]
            steps = min(p.steps for n, p in plans.items() if n % 2)
            updaters = [rule.updater for rule in rules if isinstance(rule, JaxprunerRule)]
            jaxpruner_rules(updaters, self.trainer.like.params, steps)
        if recipe.method == "joint":
            self.joint_plan(JOINT, "joint", self.levels, self.shares)
        self.settings = settings_of(recipe, seed) | identity_of(self.trainer.data)
        self.stop = StopSignal(quiet=reporter.silent)
        self.measure = self.trainer.task.measure

    @property
    def storage(self) -> dict[str, Any]:
        """Return how levels are checked and stored, as `multi_level` takes it."""
        recipe = self.recipe
        dtype = jnp.dtype(recipe.store_dtype)
        return {"scope": self.scope, "bits": self.bits, "dtype": dtype, "rounding": recipe.rounding}

    @property
    def shares(self) -> tuple[int, ...]:
        """Return how many steps of a round each level gets, the dense network last."""
        given = self.recipe.joint_shares
        return tuple(int(share) for share in given.split(",")) if given else ()

    def plan(
        self,
        number: int,
        name: str,
        epochs: float,
        level: Level | None = None,
        *,
        factor: float = 1.0,
    ) -> Plan:
        """Lay out a phase."""
        recipe = self.recipe
        steps = round(epochs * self.trainer.steps_per_epoch)
        rule: MaskRule | None = None
        if level is not None:
            steps = max(2, steps)
            start, end = round(recipe.prune_start * steps), round(recipe.prune_end * steps)
            end = min(end, steps - 1)
            schedule = Schedule(start, start if recipe.one_shot else end, recipe.mask_every)
            rule = Pruner(self.scope, level, schedule, recipe.score)
            if recipe.updater:
                updater = make_updater(recipe.updater, self.scope, level, schedule)
                rule = JaxprunerRule(updater)
        return self._phase(number, name, steps, rule, factor)

    def _phase(
        self, number: int, name: str, steps: int, rule: MaskRule | Joint | None, factor: float = 1.0
    ) -> Plan:
        """Give a phase the recipe's warmup, and its learning rate times a factor."""
        recipe = self.recipe
        rate = recipe.learning_rate * recipe.batch_size / 256 * factor
        warmup = min(round(recipe.warmup_epochs * self.trainer.steps_per_epoch), steps // 2)
        return Plan(number, name, steps, rate, warmup, rule)

    def plans(self) -> dict[int, Plan]:
        """Lay out all phases of ELSA: 0 the initial network, 2t-1 sparsify, 2t densify."""
        recipe, last = self.recipe, len(self.levels)
        plans = [self.plan(0, "dense", recipe.epochs)]
        for t, level in enumerate(self.levels, 1):
            plans.append(
                self.plan(2 * t - 1, f"sparsify {level.name}", recipe.sparsify_epochs, level)
            )
            if recipe.densify_between or t == last:
                factor = recipe.densify_factor if t == last else recipe.densify_between_factor
                name = f"densify {level.name}"
                plans.append(self.plan(2 * t, name, recipe.densify_epochs, factor=factor))
        return {plan.number: plan for plan in plans}

    def joint_plan(
        self, number: int, name: str, levels: tuple[Level, ...], shares: tuple[int, ...]
    ) -> Plan:
        """Lay out the one phase of joint training: as many steps as all phases of `plans`."""
        recipe = self.recipe
        steps = sum(plan.steps for plan in self.plans().values())
        if steps > MOST:
            raise BadRecipe(f"{name}: {steps} steps, expected at most {MOST}")
        start = round(recipe.joint_dense * steps)
        end = max(start, min(round((1 - recipe.joint_fixed) * steps), steps - 1))
        rule = Joint(self.scope, levels, Schedule(start, end, recipe.joint_every), shares)
        return self._phase(number, name, steps, rule)

    def measured(self, network: Network, part: Part | None = None) -> float:
        """Return the number by which a network is judged."""
        return self.trainer.evaluate(network, part)[self.measure.metric]

    def choose(self, sparse: Network, dense: Network) -> Network:
        """Return the dense network, unless held-out images say that the last level is better."""
        if not self.trainer.size("validation"):
            return dense
        before, after = (self.measured(network, "validation") for network in (sparse, dense))
        if not self.measure.better(before, after):
            return dense
        self.reporter.note(
            f"held out of training, the last level has a better {self.measure.metric} "
            f"({before:.4f}) than the dense network ({after:.4f}), and is kept as that"
        )
        return sparse

    def write(self, result: Result) -> None:
        """Write the file, and measure each level again from it.

        Bits are compared exactly, metrics are not: a resumed run may have other devices than the
        one that froze the level, and take its sums in another order.
        """
        settings = {k: v for k, v in self.settings.items() if k not in PLACES}
        write_file(self.output.model, result, settings=settings, force=True)
        for t, frozen in enumerate(result.levels, 1):
            found = self.trainer.evaluate(load_network(self.output.model, t, self.trainer))
            if not self._same(found, frozen.metrics):
                raise NotReproduced(
                    f"{self.output.model}: level {t} measures {found}, at its freeze "
                    f"{frozen.metrics}"
                )

    def _same(self, found: dict[str, float], frozen: dict[str, float]) -> bool:
        """Tell whether metrics are of one network: within 1 %, or one example of those tested."""
        part: Part = "test" if self.recipe.judge == "test" else "validation"
        one = 1 / self.trainer.size(part)
        return found.keys() == frozen.keys() and all(
            abs(found[name] - value) <= max(SAME, one) * max(1, abs(value))
            for name, value in frozen.items()
        )


def settings_of(recipe: Recipe, seed: int) -> dict[str, Any]:
    """Return what decides a run's bits, as it is kept in checkpoints and in the file."""
    values = dataclasses.asdict(recipe)
    del values["summary"]
    return {**values, "seed": seed}


def run_seed(
    recipe: Recipe,
    seed: int,
    output: Output,
    reporter: Reporter,
    *,
    restart: bool = False,
    columns: Sequence[str] = (),
    only: Sequence[str] | None = None,
) -> list[Row]:
    """Train one seed, write its file, and return its rows of the table, with these references.

    `only` names the levels to train alone, if not all.
    """
    from elsa_train import _references

    started = time.monotonic()
    run = _prepare(recipe, seed, output, reporter, columns)
    with run.stop:
        done = None if restart else output.read_results(run.settings, run.levels)
        if done and output.model.exists():
            rows, seconds = done
        else:
            rows = _train(run, restart)
            seconds = time.monotonic() - started
            output.write_results(run.settings, rows, seconds)
        if columns:
            rows = _references.fill(run, rows, columns, only)
            output.write_results(run.settings, rows, seconds)
    if run.stop.seen:
        raise run.stop.interrupted(f"stopped after seed {seed}; its file is written")
    return rows


def _prepare(
    recipe: Recipe, seed: int, output: Output, reporter: Reporter, columns: Sequence[str]
) -> Run:
    """Refuse what can't be trained, on any host, before anything is written."""
    from elsa_train import _references

    together, made = output.together, []

    def make() -> bytes:
        run = Run(recipe, seed, output, reporter)
        _references.check_columns(run, columns)
        made.append(run)
        decisive = {k: v for k, v in run.settings.items() if k not in PLACES}
        return json.dumps(decisive, sort_keys=True).encode()

    first, *others = [json.loads(said) for said in together.agree(make)]
    for process, settings in enumerate(others, 1):
        if settings != first:
            key = min(k for k in first | settings if first.get(k) != settings.get(k))
            raise BadRecipe(
                f"process {process} has other settings or data than process 0: {key} is "
                f"{settings.get(key)!r}, not {first.get(key)!r}"
            )
    output.prepare()
    return made[0]


def _train(run: Run, restart: bool) -> list[Row]:
    """Train all levels, write the file, and return its rows of the table."""
    from elsa_train import _training

    run.output.check(run.trainer.init())
    if restart and jax.process_index() == 0:
        run.output.forget()
    wait("restart")
    result, before = _training.train(run)
    run.write(result)
    metric = run.measure.metric
    rows = [Row(f.level.name, f.sparsity, f.nonzero, f.metrics[metric]) for f in result.levels]
    initial = before[metric] if before else None
    sparsity, nonzero = zeros(result.network.params)  # those of the last level, if it is kept
    rows.append(Row("dense", sparsity, nonzero, result.metrics[metric], reference=initial))
    return rows
