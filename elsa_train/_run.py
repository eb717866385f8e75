"""A recipe from data to ELSA file: the initial network, multi-level ELSA, and the references."""

import dataclasses
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from elsa_train import _method
from elsa_train._checkpointing import Checkpoints, Saved, StopSignal
from elsa_train._errors import BadRecipe, Interrupted, NotReproduced
from elsa_train._file import write_file
from elsa_train._files import cut, read_json, replacing, write_json
from elsa_train._jaxpruner import JaxprunerRule, jaxpruner_rules, make_updater
from elsa_train._levels import Level, parse_levels
from elsa_train._loop import MaskRule, Phase, Plan, Trainer
from elsa_train._multilevel import Network, Progress, Result, multi_level
from elsa_train._recipe import MOST, Recipe
from elsa_train._report import Reporter, Row
from elsa_train._schedule import Schedule
from elsa_train._sparsify import Pruner, Scope
from elsa_train._tree import flatten, unflatten
from elsa_train.data import load

PyTree = Any
REFERENCE, EQUAL_EPOCHS = 1000, 2000


@dataclass(frozen=True)
class Output:
    """Where a run's files go, and how often it is saved."""

    folder: Path
    checkpoint_every: int = 500

    @property
    def model(self) -> Path:
        """Return the path of the ELSA file."""
        return self.folder / "model.safetensors"

    @property
    def results(self) -> Path:
        """Return the path of the finished run's numbers."""
        return self.folder / "results.json"

    @property
    def references(self) -> Path:
        """Return the path of the references measured so far."""
        return self.folder / "references.json"

    @property
    def initial(self) -> Path:
        """Return the path of the initial network."""
        return self.folder / "initial.npz"

    @property
    def checkpoints(self) -> Path:
        """Return the folder of the unfinished run's checkpoints."""
        return self.folder / "checkpoints"

    @property
    def metrics(self) -> Path:
        """Return the path of the JSON lines."""
        return self.folder / "metrics.jsonl"

    def forget(self) -> None:
        """Remove what a run has left, and nothing else."""
        files = (self.model, self.results, self.references, self.initial, self.metrics)
        for path in files:
            path.unlink(missing_ok=True)
        if self.checkpoints.is_dir():
            shutil.rmtree(self.checkpoints)


class Run:
    """One seed of a recipe."""

    def __init__(self, recipe: Recipe, seed: int, output: Output, reporter: Reporter) -> None:
        """Load the data and refuse what can't be trained."""
        self.recipe, self.seed, self.output, self.reporter = recipe, seed, output, reporter
        self.trainer = Trainer(recipe, load(recipe.dataset, recipe.data_dir), seed)
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
        self.settings = settings_of(recipe, seed)

    def plan(self, number: int, name: str, epochs: float, level: Level | None = None) -> Plan:
        """Lay out a phase."""
        recipe, per_epoch = self.recipe, self.trainer.steps_per_epoch
        steps = round(epochs * per_epoch)
        rate = recipe.learning_rate * recipe.batch_size / 256
        if name.startswith("densify"):
            rate *= recipe.densify_factor
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
        warmup = min(round(recipe.warmup_epochs * per_epoch), steps // 2)
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
                plans.append(self.plan(2 * t, f"densify {level.name}", recipe.densify_epochs))
        return {plan.number: plan for plan in plans}

    def train(self) -> tuple[Result, Network, dict[str, float]]:
        """Train the initial network and the levels; return these, and the initial one measured."""
        checkpoints = Checkpoints(self.output.checkpoints, self.settings)
        with StopSignal() as stop:
            try:
                return _Training(self, checkpoints, stop).train()
            finally:
                checkpoints.close()

    def write(self, result: Result) -> None:
        """Write the file, and measure each level again from it."""
        settings = {k: v for k, v in self.settings.items() if k != "data_dir"}
        write_file(self.output.model, result, settings=settings, force=True)
        for t, frozen in enumerate(result.levels, 1):
            found = self.trainer.evaluate(load_network(self.output.model, t, self.trainer))
            if found != frozen.metrics:
                raise NotReproduced(
                    f"{self.output.model}: level {t} measures {found}, at its freeze "
                    f"{frozen.metrics}"
                )

    def reference(self, number: int, level: Level, epochs: float, initial: Network) -> float:
        """Prune the initial network to one level alone, nothing frozen, and measure it."""
        kind = "reference" if number < EQUAL_EPOCHS else "equal-epochs reference"
        plan = self.plan(number, f"{kind} {level.name}", epochs, level)
        n = self.trainer.replicate(_method.counters(initial.params))
        self.reporter.expect(plan.steps)
        network = self.trainer.run(
            plan, self.trainer.start(initial), n, self.reporter.watch, lambda *_: None
        )
        return self.trainer.evaluate(network)["accuracy"]

    def references(self, initial: Network, rows: Sequence[Row], equal_epochs: bool) -> list[Row]:
        """Fill the reference columns, resuming from those already measured."""
        cache = self.output.references
        known: dict[str, float] = read_json(cache) or {}
        if not (isinstance(known, dict) and all(_is_accuracy(x) for x in known.values())):
            raise cut(cache, "expected accuracies")
        plans = self.plans()
        filled = []
        for t, row in enumerate(rows[:-1], 1):
            level = self.levels[t - 1]
            spent = sum(p.steps for n, p in plans.items() if 0 < n <= 2 * t - 1)
            wanted = {"reference": (REFERENCE + t, self.recipe.sparsify_epochs)}
            if equal_epochs:
                epochs = spent / self.trainer.steps_per_epoch
                wanted["equal_epochs"] = (EQUAL_EPOCHS + t, epochs)
            for column, (number, epochs) in wanted.items():
                key = f"{column} {row.level}"
                if key not in known:
                    known[key] = self.reference(number, level, epochs, initial)
                    write_json(cache, known)
                row = dataclasses.replace(row, **{column: known[key]})  # type: ignore[arg-type]
            filled.append(row)
        dense = rows[-1]
        if equal_epochs:
            if "equal_epochs dense" not in known:
                total = sum(p.steps for p in plans.values()) / self.trainer.steps_per_epoch
                plan = self.plan(EQUAL_EPOCHS, "equal-epochs reference dense", total)
                self.reporter.expect(plan.steps)
                start = self.trainer.init()
                n = self.trainer.replicate(_method.counters(start.params))
                network = self.trainer.run(
                    plan, self.trainer.start(start), n, self.reporter.watch, lambda *_: None
                )
                known["equal_epochs dense"] = self.trainer.evaluate(network)["accuracy"]
                write_json(cache, known)
            dense = dataclasses.replace(dense, equal_epochs=known["equal_epochs dense"])
        return [*filled, dense]


class _Training:
    """A run under way: how far it is, and what is saved of that."""

    def __init__(self, run: Run, checkpoints: Checkpoints, stop: StopSignal) -> None:
        self.run, self.trainer, self.reporter = run, run.trainer, run.reporter
        self.checkpoints, self.stop = checkpoints, stop
        self.plans = run.plans()
        self.reporter.expect(sum(plan.steps for plan in self.plans.values()))
        self.start = self.trainer.init()
        counters = self.trainer.replicate(_method.counters(self.start.params))
        self.progress = Progress(-1, self.start, counters)
        self.phase: Phase | None = None
        """Where the run was within a phase when it was stopped."""
        saved = checkpoints.restore(self.progress, self.trainer.start(self.start))
        if saved:
            self._resume(saved)

    def _resume(self, saved: Saved) -> None:
        step, phase = saved.phase.step if saved.phase else 0, saved.progress.done + 1
        if not 0 <= phase <= 2 * len(self.run.levels) + 1 or (
            step and (phase not in self.plans or step >= self.plans[phase].steps)
        ):
            raise cut(self.run.output.checkpoints, f"step {step} of phase {phase}")
        done = sum(plan.steps for n, plan in self.plans.items() if n <= saved.progress.done)
        self.reporter.resumed(done + step)
        self.progress, self.phase = saved.progress, saved.phase

    def train(self) -> tuple[Result, Network, dict[str, float]]:
        """Train what is left."""
        recipe, path = self.run.recipe, self.run.output.initial
        if self.progress.done < 0:
            initial = self._train_phase(self.progress.network, self.progress.counters)
            _save_network(path, initial)
            self.progress = self.progress._replace(done=0, network=initial)
            self.checkpoints.save(self.progress)
        initial = _load_network(path, self.start, self.trainer)
        before = self.trainer.evaluate(initial)
        self.reporter.dense("initial dense", before)
        result = multi_level(
            self.progress.network,
            self.run.levels,
            self._train_phase,
            self._train_phase,
            bits=self.run.bits,
            dtype=jnp.dtype(recipe.store_dtype),
            rounding=recipe.rounding,  # type: ignore[arg-type]
            densify_between=recipe.densify_between,
            evaluate=self.trainer.evaluate,
            progress=self.progress,
            on_progress=self._on_progress,
        )
        self.reporter.dense("dense", result.metrics)
        return result, initial, before

    def _train_phase(
        self, network: Network, counters: PyTree, level: Level | None = None
    ) -> Network:
        """Train the phase that follows what is done, from where it was stopped."""
        plan = self.plans[self.progress.done + 1]
        resumed, self.phase = self.phase, None
        start = resumed or self.trainer.start(network)
        return self.trainer.run(plan, start, counters, self.reporter.watch, self._on_step)

    def _on_step(self, plan: Plan, reached: Phase) -> None:
        last = reached.step == plan.steps
        stopping = self.stop.agreed(reached.step)
        due = reached.step % self.run.output.checkpoint_every == 0
        if not last and (stopping or due):
            self.checkpoints.save(self.progress, reached)
        if stopping and not last:
            raise Interrupted(
                f"stopped at step {reached.step} of {plan.name}; "
                "its state is saved, the same command resumes"
            )

    def _on_progress(self, progress: Progress) -> None:
        self.progress = progress
        self.checkpoints.save(progress)
        if progress.done % 2:
            self.reporter.level(progress.frozen[-1])


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
    reference: bool = False,
    equal_epochs: bool = False,
) -> list[Row]:
    """Train one seed, write its file, and return its rows of the table."""
    started = time.monotonic()
    run = Run(recipe, seed, output, reporter)  # what can't be trained is refused before writing
    if restart and jax.process_index() == 0:
        output.forget()
    _wait("restart")
    output.folder.mkdir(parents=True, exist_ok=True)
    done = _read_results(output, run)
    if done and output.model.exists():
        rows, seconds = done
    else:
        result, _, before = run.train()
        run.write(result)
        rows = [
            Row(f.level.name, f.sparsity, f.nonzero, f.metrics["accuracy"]) for f in result.levels
        ]
        total = sum(p.size for p in jax.tree.leaves(result.network.params))
        rows.append(
            Row("dense", 0.0, total, result.metrics["accuracy"], reference=before["accuracy"])
        )
        seconds = time.monotonic() - started
        _save_results(output, run, rows, seconds)
    if reference or equal_epochs:
        initial = _load_network(output.initial, run.trainer.init(), run.trainer)
        rows = run.references(initial, rows, equal_epochs)
        _save_results(output, run, rows, seconds)
    return rows


def load_network(path: Path, level: int | Literal["dense"], trainer: Trainer) -> Network:
    """Read a level of an ELSA file into the trainer's types."""
    import elsa_format

    with elsa_format.open(path) as file:
        tensors = file.load(level)
    like = trainer.like

    def place(tree: PyTree) -> PyTree:
        found = unflatten(tree, tensors)
        return trainer.replicate(jax.tree.map(lambda x, t: np.asarray(x, t.dtype), found, tree))

    return Network(place(like.params), place(like.state))


def _save_results(output: Output, run: Run, rows: Sequence[Row], seconds: float) -> None:
    if jax.process_index() == 0:
        write_json(
            output.results,
            {
                "settings": run.settings,
                "seconds": round(seconds, 1),
                "rows": [dataclasses.asdict(row) for row in rows],
            },
        )


def _read_results(output: Output, run: Run) -> tuple[list[Row], float] | None:
    """Read a finished run's numbers, if they are there and of this recipe."""
    found = read_json(output.results)
    if found is None:
        return None
    try:
        if found["settings"] == run.settings:
            rows = [Row(**row) for row in found["rows"]]
            if [row.level for row in rows] != [*(level.name for level in run.levels), "dense"]:
                raise ValueError("its rows are not the levels")
            return rows, float(found["seconds"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise cut(output.results, error) from None
    raise BadRecipe(
        f"{output.folder} holds a run with other settings: give another --output, or --force"
    )


def _is_accuracy(value: Any) -> bool:
    return type(value) is float and 0 <= value <= 1


def _wait(what: str) -> None:
    """Wait for the other processes."""
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(what)


def _save_network(path: Path, network: Network) -> None:
    if jax.process_index() == 0:
        arrays = {f"params/{k}": np.asarray(v) for k, v in flatten(network.params).items()}
        arrays |= {f"state/{k}": np.asarray(v) for k, v in flatten(network.state).items()}
        with replacing(path) as temporary:
            np.savez(temporary, **arrays)  # type: ignore[arg-type]


def _load_network(path: Path, like: Network, trainer: Trainer) -> Network:
    _wait("initial network")
    try:
        with np.load(path) as file:
            params = {k.removeprefix("params/"): file[k] for k in file if k.startswith("params/")}
            state = {k.removeprefix("state/"): file[k] for k in file if k.startswith("state/")}
        found = Network(unflatten(like.params, params), unflatten(like.state, state))
        for leaf, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(like), strict=True):
            if leaf.dtype != wanted.dtype or not np.isfinite(leaf).all():
                raise ValueError(f"found {leaf.dtype}, expected finite {wanted.dtype}")
    except OSError:
        raise
    except Exception as error:  # zip files and arrays can be wrong in too many ways to list
        raise cut(path, error) from None
    return Network(trainer.replicate(found.params), trainer.replicate(found.state))
