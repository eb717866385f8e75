"""References: networks that have one level only, to compare a run's levels with."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from elsa_train import _method
from elsa_train._errors import BadRecipe
from elsa_train._files import cut, read_json, write_json
from elsa_train._folder import load_initial
from elsa_train._joint import DENSE, masked
from elsa_train._levels import Level
from elsa_train._multilevel import Network, check_level
from elsa_train._plan import Phase, Plan
from elsa_train._report import Row
from elsa_train._run import Run

REFERENCE, EQUAL_EPOCHS, ALONE = 1000, 2000, 4000
COLUMNS = ("reference", "equal_epochs", "alone")
"""Pruned from the initial network: with one phase, or all epochs that ELSA had; or from scratch."""


def check_columns(run: Run, columns: Sequence[str]) -> None:
    """Refuse references that a run has nothing to start from."""
    if run.recipe.method == "joint" and (set(columns) - {"alone"}):
        raise BadRecipe(
            "joint training has no initial network to prune: compare with --alone instead"
        )


def fill(
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
    plans = run.plans()
    if index is None:
        total = sum(plan.steps for plan in plans.values()) / run.trainer.steps_per_epoch
        if "equal_epochs" in columns:
            plan = run.plan(EQUAL_EPOCHS, "equal-epochs reference dense", total)
            yield "equal_epochs", lambda: _train(run, plan)
        if "alone" in columns:
            yield "alone", lambda: _alone(run, ALONE, ())
        return
    level, number = run.levels[index], index + 1
    if "reference" in columns:
        plan = run.plan(
            REFERENCE + number, f"reference {level.name}", run.recipe.sparsify_epochs, level
        )
        yield "reference", lambda: _train(run, plan, level)
    if "equal_epochs" in columns:
        spent = sum(p.steps for n, p in plans.items() if 0 < n <= 2 * number - 1)
        equal = run.plan(
            EQUAL_EPOCHS + number,
            f"equal-epochs reference {level.name}",
            spent / run.trainer.steps_per_epoch,
            level,
        )
        yield "equal_epochs", lambda: _train(run, equal, level)
    if "alone" in columns:
        yield "alone", lambda: _alone(run, ALONE + number, (level,))


def _train(run: Run, plan: Plan, level: Level | None = None) -> float:
    """Prune the initial network to one level alone, nothing frozen, and measure it.

    The dense network, without a level, is trained from scratch.
    """
    trainer = run.trainer
    start = load_initial(run.output.initial, trainer) if level else trainer.init()
    n = trainer.replicate(_method.counters(start.params))
    run.reporter.expect(plan.steps)
    reached = trainer.run(plan, trainer.start(start), n, run.reporter.watch, partial(_stop, run))
    return _measured(run, reached.network, level)


def _alone(run: Run, number: int, levels: tuple[Level, ...]) -> float:
    """Train one level, or the dense network, from scratch for as many steps as the whole run."""
    trainer = run.trainer
    name = f"alone {levels[0].name if levels else 'dense'}"
    plan = run.joint_plan(number, name, levels, (1, 0) if levels else ())
    run.reporter.expect(plan.steps)
    start = trainer.start_jointly(plan, trainer.init())
    reached = trainer.run(plan, start, None, run.reporter.watch, partial(_stop, run))
    params = masked(reached.network.params, reached.kept, 1 if levels else DENSE)
    network = Network(params, trainer.statistics(params))
    return _measured(run, network, levels[0] if levels else None)


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
