"""A recipe from data to ELSA file: its levels by either method, and networks to compare with."""

import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, nullcontext
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from elsa_train import _method
from elsa_train._batches import Part
from elsa_train._errors import BadRecipe, NotReproduced
from elsa_train._file import write_file
from elsa_train._folder import (
    PLACES,
    Checkpoints,
    Output,
    Row,
    Saved,
    cut,
    load_initial,
    load_network,
    read_json,
    save_initial,
    wait,
    write_json,
)
from elsa_train._jaxpruner import JaxprunerRule, jaxpruner_rules
from elsa_train._joint import masked, nest
from elsa_train._levels import DENSE, Level, parse_levels
from elsa_train._loop import Phase, Trainer
from elsa_train._multilevel import Network, Progress, Result, check_level, multi_level, zeros
from elsa_train._plan import EQUAL_EPOCHS, REFERENCE, Plan, Plans
from elsa_train._recipe import MOST, Recipe
from elsa_train._report import Reporter
from elsa_train._sparsify import Scope
from elsa_train._start import calibrated, checksum, read_start
from elsa_train._stop import StopSignal
from elsa_train.data import in_processes, load
from elsa_train.data.protocol import identity_of
from elsa_train.data.workers import Workers

PyTree = Any
Metrics = dict[str, float]
SAME = 0.01
"""Part by which a metric, or what it is out of 1, may differ when a level is evaluated again."""


class Run:
    """One seed of a recipe."""

    def __init__(
        self,
        recipe: Recipe,
        seed: int,
        output: Output,
        reporter: Reporter,
        workers: int | None = None,
    ) -> None:
        """Load the data and refuse what can't be trained."""
        self.recipe, self.seed, self.output, self.reporter = recipe, seed, output, reporter
        data = in_processes(load(recipe.dataset, recipe.source), workers)
        self.trainer = Trainer(recipe, data, seed)
        self.levels = parse_levels(recipe.levels)
        self.scope = Scope(recipe.scope, recipe.prune, recipe.exclude, recipe.axis)  # type: ignore[arg-type]
        self.plans = Plans(recipe, self.levels, self.scope, self.trainer.batches.per_epoch)
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
        plans = self.plans.sequential()
        for plan in plans.values():
            if plan.steps > MOST:
                raise BadRecipe(f"{plan.name}: {plan.steps} steps, expected at most {MOST}")
        if recipe.updater:
            rules = [p.rule for n, p in plans.items() if n % 2]
            steps = min(p.steps for n, p in plans.items() if n % 2)
            updaters = [rule.updater for rule in rules if isinstance(rule, JaxprunerRule)]
            jaxpruner_rules(updaters, self.trainer.like.params, steps)
        if recipe.method == "joint":
            self.plans.joint()
            self.trainer.check_statistics()
        self.settings = settings_of(recipe, seed) | identity_of(self.trainer.data)
        together = recipe.start and recipe.method == "joint"
        if (recipe.distill or recipe.start_masks == "calibrated") and not together:
            raise BadRecipe("distill and start_masks need start, and method 'joint'")
        self.start = read_start(recipe.start, self.trainer) if recipe.start else None
        """The network that training begins with, if it is not drawn."""
        if self.start is not None:
            self.settings["start_checksum"] = checksum(self.start)
            self.trainer.teacher = self.start if recipe.distill else None
        self.stop = StopSignal(quiet=reporter.silent)
        self.measure = self.trainer.task.measure

    @property
    def storage(self) -> dict[str, Any]:
        """Return how levels are checked and stored, as `multi_level` takes it."""
        recipe = self.recipe
        dtype = jnp.dtype(recipe.store_dtype)
        return {"scope": self.scope, "bits": self.bits, "dtype": dtype, "rounding": recipe.rounding}

    def measured(self, network: Network, part: Part | None = None) -> float:
        """Return the number by which a network is judged."""
        return self.trainer.evaluate(network, part)[self.measure.metric]

    def choose(self, sparse: Network, dense: Network) -> Network:
        """Return the dense network, unless held-out images say that the last level is better."""
        if not self.trainer.batches.size("validation"):
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

    def _same(self, found: Metrics, frozen: Metrics) -> bool:
        """Tell whether metrics are of one network: within 1 %, or one example of those tested."""
        part: Part = "test" if self.recipe.judge == "test" else "validation"
        one = 1 / self.trainer.batches.size(part)
        return found.keys() == frozen.keys() and all(
            abs(found[name] - value) <= max(SAME, one) * max(1, abs(value))
            for name, value in frozen.items()
        )

    def rows(self, result: Result, initial: Metrics | None) -> list[Row]:
        """Return the table's rows: the levels, then the dense network."""
        metric = self.measure.metric
        rows = [Row(f.level.name, f.sparsity, f.nonzero, f.metrics[metric]) for f in result.levels]
        before = initial[metric] if initial else None
        sparsity, nonzero = zeros(result.network.params)  # those of the last level, if it is kept
        rows.append(Row("dense", sparsity, nonzero, result.metrics[metric], reference=before))
        return rows


def settings_of(recipe: Recipe, seed: int) -> dict[str, Any]:
    """Return what decides a run's bits, as it is kept in checkpoints and in the file."""
    values = dataclasses.asdict(recipe)
    del values["summary"]
    if not recipe.start:  # as runs of earlier versions say it
        for key in ("start", "start_masks", "distill"):
            del values[key]
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
    workers: int | None = None,
) -> list[Row]:
    """Train one seed, write its file, and return its rows of the table, with these references.

    `only` names the levels to train alone, if not all; `workers` is as in `in_processes`.
    """
    started = time.monotonic()
    run = _prepare(recipe, seed, output, reporter, columns, workers)
    data = run.trainer.data
    with run.stop, data if isinstance(data, Workers) else nullcontext():
        done = None if restart else output.read_results(run.settings, run.levels)
        if done and output.model.exists():
            rows, seconds = done
        else:
            output.check(run.trainer.init())
            if restart and jax.process_index() == 0:
                output.forget()
            wait("restart")
            result, initial = train(run)
            run.write(result)
            rows, seconds = run.rows(result, initial), time.monotonic() - started
            output.write_results(run.settings, rows, seconds)
        if columns:
            rows = _fill(run, rows, columns, only)
            output.write_results(run.settings, rows, seconds)
    if run.stop.seen:
        raise run.stop.interrupted(f"stopped after seed {seed}; its file is written")
    return rows


def _prepare(
    recipe: Recipe,
    seed: int,
    output: Output,
    reporter: Reporter,
    columns: Sequence[str],
    workers: int | None,
) -> Run:
    """Refuse what can't be trained, on any host, before anything is written."""
    together, made = output.together, []

    def make() -> bytes:
        run = Run(recipe, seed, output, reporter)
        if recipe.method == "joint" and (set(columns) - {"alone"}):
            raise BadRecipe(
                "joint training has no initial network to prune: compare with --alone instead"
            )
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


def train(run: Run) -> tuple[Result, Metrics | None]:
    """Train a run's levels; return also what the initial network measured, if there was one."""
    with closing(Checkpoints(run.output, run.settings)) as checkpoints:
        if run.recipe.method == "joint":
            return _train_jointly(run, checkpoints), None
        phases = _Phases(run, checkpoints)
        initial = phases.initial()
        result = multi_level(
            phases.progress.network,
            run.levels,
            phases.train,
            phases.train,
            **run.storage,
            densify_between=run.recipe.densify_between,
            evaluate=run.trainer.evaluate,
            progress=phases.progress,
            on_progress=phases.on_progress,
        )
    run.reporter.dense("dense", result.metrics)
    return result, initial


class _Phases:
    """The paper's method under way: how far it is, and what is saved of that."""

    def __init__(self, run: Run, checkpoints: Checkpoints) -> None:
        self.run, self.trainer, self.checkpoints = run, run.trainer, checkpoints
        self.plans = run.plans.sequential()
        run.reporter.expect(sum(plan.steps for plan in self.plans.values()))
        start = run.start or self.trainer.init()
        counters = self.trainer.replicate(_method.counters(start.params))
        self.progress = Progress(-1, start, counters)
        self.within: Phase | None = None
        """Where the run was within a phase when it was stopped."""
        saved = checkpoints.restore(self.progress, self.trainer.start(start))
        if saved:
            self._resume(saved)

    def _resume(self, saved: Saved) -> None:
        step, phase = saved.phase.step if saved.phase else 0, saved.progress.done + 1
        if not 0 <= phase <= 2 * len(self.run.levels) + 1 or (
            step and (phase not in self.plans or step >= self.plans[phase].steps)
        ):
            raise cut(self.run.output.checkpoints, f"step {step} of phase {phase}")
        done = sum(plan.steps for n, plan in self.plans.items() if n <= saved.progress.done)
        self.run.reporter.resumed(done + step)
        self.progress, self.within = saved.progress, saved.phase

    def initial(self) -> Metrics:
        """Train and keep the initial network, unless that is done, and measure it."""
        path = self.run.output.initial
        if self.progress.done < 0:
            network = self.train(self.progress.network, self.progress.counters)
            save_initial(path, network)
            self.progress = self.progress._replace(done=0, network=network)
            self.checkpoints.save(self.progress)
        found = self.trainer.evaluate(load_initial(path, self.trainer))
        self.run.reporter.dense("initial dense", found)
        return found

    def train(self, network: Network, counters: PyTree, level: Level | None = None) -> Network:
        """Train the phase that follows what is done, from where it was stopped."""
        plan = self.plans[self.progress.done + 1]
        resumed, self.within = self.within, None
        start = resumed or self.trainer.start(network)
        on_step = partial(_save, self.run, self.checkpoints, self.progress)
        watch = self.run.reporter.watch
        reached = self.trainer.run(plan, start, counters, watch, on_step).network
        last = plan.number == 2 * len(self.run.levels)
        return self.run.choose(network, reached) if last else reached

    def on_progress(self, progress: Progress) -> None:
        """Save what a routine has reached."""
        self.progress = progress
        self.checkpoints.save(progress)
        if progress.done % 2:
            self.run.reporter.level(progress.frozen[-1])


def _save(
    run: Run, checkpoints: Checkpoints, progress: Progress, plan: Plan, reached: Phase
) -> None:
    """Save after a step if that is due, and stop if that was asked for."""
    stopping, due = run.stop.asked(reached.step, checkpoints.due)
    if reached.step == plan.steps:
        return
    if stopping or due or reached.step % run.output.checkpoint_every == 0:
        checkpoints.save(progress, reached)
    if stopping:
        raise run.stop.interrupted(
            f"stopped at step {reached.step} of {plan.name}; its state is saved"
        )


def _train_jointly(run: Run, checkpoints: Checkpoints) -> Result:
    trainer, reporter, plan = run.trainer, run.reporter, run.plans.joint()
    reporter.expect(plan.steps)
    start = run.start or trainer.init()
    progress = Progress(-1, start, trainer.replicate(_method.counters(start.params)))
    phase = trainer.start_jointly(plan, start)
    saved = checkpoints.restore(progress, phase)
    if saved:
        if saved.progress.done != -1 or saved.phase is None or saved.phase.step >= plan.steps:
            raise cut(run.output.checkpoints, "not of joint training")
        phase = saved.phase
        reporter.resumed(phase.step)
    elif run.recipe.start_masks == "calibrated":
        nested = calibrated(trainer, run.scope, run.levels, start)
        phase = trainer.start(nested.network)._replace(kept=nested.counters)

    def on_progress(reached: Progress) -> None:
        if reached.done % 2:
            reporter.level(reached.frozen[-1])

    on_step = partial(_save, run, checkpoints, progress)
    reached = trainer.run(plan, phase, None, reporter.watch, on_step)
    result = nest(
        reached.network,
        reached.kept,
        run.levels,
        trainer.statistics,
        choose=run.choose,
        evaluate=trainer.evaluate,
        on_progress=on_progress,
        **run.storage,
    )
    reporter.dense("dense", result.metrics)
    return result


# References: networks that have one level only, to compare a run's levels with. They are pruned
# from the initial network, with one phase or all epochs that ELSA had, or trained from scratch.


def _fill(
    run: Run, rows: Sequence[Row], columns: Sequence[str], only: Sequence[str] | None
) -> list[Row]:
    """Measure the references of these columns, resuming from those already measured."""
    cache = run.output.references
    known: dict[str, float] = read_json(cache) or {}
    if not (isinstance(known, dict) and all(_is_measured(x) for x in known.values())):
        raise cut(cache, f"expected {run.measure.axis}")
    filled = []
    for t, row in enumerate(rows):
        for column, train in _wanted(run, columns, t if t < len(run.levels) else None):
            if column == "alone" and only is not None and row.level not in only:
                continue
            key = f"{column} {row.level}"
            if key not in known:
                known[key] = train()
                write_json(cache, known)
            row = dataclasses.replace(row, **{column: known[key]})  # type: ignore[arg-type]
        filled.append(row)
    return filled


def _wanted(
    run: Run, columns: Sequence[str], index: int | None
) -> Iterator[tuple[str, Callable[[], float]]]:
    """Name the references of a level, None for dense, each with what trains and measures it."""
    plans, per_epoch, done = run.plans, run.plans.steps_per_epoch, run.plans.sequential()
    if index is None:
        total = sum(plan.steps for plan in done.values()) / per_epoch
        if "equal_epochs" in columns:
            plan = plans.phase(EQUAL_EPOCHS, "equal-epochs reference dense", total)
            yield "equal_epochs", lambda: _train_reference(run, plan)
        if "alone" in columns:
            yield "alone", lambda: _train_alone(run, plans.alone(None))
        return
    level, number = run.levels[index], index + 1
    if "reference" in columns:
        name, epochs = f"reference {level.name}", run.recipe.sparsify_epochs
        plan = plans.phase(REFERENCE + number, name, epochs, level)
        yield "reference", lambda: _train_reference(run, plan, level)
    if "equal_epochs" in columns:
        spent = sum(p.steps for n, p in done.items() if 0 < n <= 2 * number - 1) / per_epoch
        name = f"equal-epochs reference {level.name}"
        equal = plans.phase(EQUAL_EPOCHS + number, name, spent, level)
        yield "equal_epochs", lambda: _train_reference(run, equal, level)
    if "alone" in columns:
        yield "alone", lambda: _train_alone(run, plans.alone(number), level)


def _train_reference(run: Run, plan: Plan, level: Level | None = None) -> float:
    """Prune the initial network to one level alone, nothing frozen, and measure it.

    The dense network, without a level, is trained from scratch.
    """
    trainer = run.trainer
    start = load_initial(run.output.initial, trainer) if level else trainer.init()
    n = trainer.replicate(_method.counters(start.params))
    run.reporter.expect(plan.steps)
    reached = trainer.run(plan, trainer.start(start), n, run.reporter.watch, partial(_stop, run))
    return _measured(run, reached.network, level)


def _train_alone(run: Run, plan: Plan, level: Level | None = None) -> float:
    """Train one level, or the dense network, from scratch for as many steps as the whole run."""
    trainer = run.trainer
    run.reporter.expect(plan.steps)
    start = trainer.start_jointly(plan, trainer.init())
    reached = trainer.run(plan, start, None, run.reporter.watch, partial(_stop, run))
    params = masked(reached.network.params, reached.kept, 1 if level else DENSE)
    return _measured(run, Network(params, trainer.statistics(params)), level)


def _measured(run: Run, network: Network, level: Level | None) -> float:
    """Measure a reference, which must have the sparsity that it is compared at."""
    if level:
        check_level(level, network.params, run.scope, _method.counters(network.params))
    return run.measured(network)


def _stop(run: Run, plan: Plan, phase: Phase) -> None:
    """Save nothing, but stop if that was asked for: an interrupted reference is trained again."""
    if run.stop.agreed(phase.step):
        raise run.stop.interrupted(f"stopped in {plan.name}; references before it are saved")


def _is_measured(value: object) -> bool:
    return type(value) is float and 0 <= value < math.inf
