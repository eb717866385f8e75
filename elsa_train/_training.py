"""The two methods under way, sequential and joint: phases trained, saved and resumed."""

from dataclasses import dataclass
from typing import Any

from elsa_train import _method
from elsa_train._checkpointing import Checkpoints, Saved
from elsa_train._files import cut
from elsa_train._folder import load_initial, save_initial
from elsa_train._joint import nest
from elsa_train._levels import Level
from elsa_train._multilevel import Network, Progress, Result, multi_level
from elsa_train._plan import Phase, Plan
from elsa_train._run import JOINT, Run

PyTree = Any
Metrics = dict[str, float]


def train(run: Run) -> tuple[Result, Metrics | None]:
    """Train a run's levels; return also what the initial network measured, if there was one."""
    saving = _Saving(Checkpoints(run.output, run.settings), run)
    try:
        if run.recipe.method == "joint":
            return _train_jointly(run, saving), None
        return _Sequential(run, saving).train()
    finally:
        saving.checkpoints.close()


@dataclass
class _Saving:
    """When a run is saved, and when it stops."""

    checkpoints: Checkpoints
    run: Run

    def step(self, plan: Plan, reached: Phase, progress: Progress) -> None:
        """Save after a step if that is due, and stop if that was asked for."""
        last = reached.step == plan.steps
        stopping = self.run.stop.agreed(reached.step)
        due = reached.step % self.run.output.checkpoint_every == 0
        if not last and (stopping or due):
            self.checkpoints.save(progress, reached)
        if stopping and not last:
            raise self.run.stop.interrupted(
                f"stopped at step {reached.step} of {plan.name}; its state is saved"
            )


def _train_jointly(run: Run, saving: _Saving) -> Result:
    trainer, reporter = run.trainer, run.reporter
    plan = run.joint_plan(JOINT, "joint", run.levels, run.shares)
    reporter.expect(plan.steps)
    start = trainer.init()
    progress = Progress(-1, start, trainer.replicate(_method.counters(start.params)))
    phase = trainer.start_jointly(plan, start)
    saved = saving.checkpoints.restore(progress, phase)
    if saved:
        if saved.progress.done != -1 or saved.phase is None or saved.phase.step >= plan.steps:
            raise cut(run.output.checkpoints, "not of joint training")
        phase = saved.phase
        reporter.resumed(phase.step)

    def on_step(plan: Plan, reached: Phase) -> None:
        saving.step(plan, reached, progress)

    def on_progress(reached: Progress) -> None:
        if reached.done % 2:
            reporter.level(reached.frozen[-1])

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


class _Sequential:
    """The paper's method under way: how far it is, and what is saved of that."""

    def __init__(self, run: Run, saving: _Saving) -> None:
        self.run, self.trainer, self.reporter = run, run.trainer, run.reporter
        self.saving = saving
        self.plans = run.plans()
        self.reporter.expect(sum(plan.steps for plan in self.plans.values()))
        self.start = self.trainer.init()
        counters = self.trainer.replicate(_method.counters(self.start.params))
        self.progress = Progress(-1, self.start, counters)
        self.phase: Phase | None = None
        """Where the run was within a phase when it was stopped."""
        saved = saving.checkpoints.restore(self.progress, self.trainer.start(self.start))
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

    def train(self) -> tuple[Result, Metrics]:
        """Train what is left."""
        recipe, path = self.run.recipe, self.run.output.initial
        if self.progress.done < 0:
            initial = self._train_phase(self.progress.network, self.progress.counters)
            save_initial(path, initial)
            self.progress = self.progress._replace(done=0, network=initial)
            self.saving.checkpoints.save(self.progress)
        before = self.trainer.evaluate(load_initial(path, self.trainer))
        self.reporter.dense("initial dense", before)
        result = multi_level(
            self.progress.network,
            self.run.levels,
            self._train_phase,
            self._densify,
            **self.run.storage,
            densify_between=recipe.densify_between,
            evaluate=self.trainer.evaluate,
            progress=self.progress,
            on_progress=self._on_progress,
        )
        self.reporter.dense("dense", result.metrics)
        return result, before

    def _train_phase(
        self, network: Network, counters: PyTree, level: Level | None = None
    ) -> Network:
        """Train the phase that follows what is done, from where it was stopped."""
        plan = self.plans[self.progress.done + 1]
        resumed, self.phase = self.phase, None
        start = resumed or self.trainer.start(network)
        return self.trainer.run(plan, start, counters, self.reporter.watch, self._on_step).network

    def _densify(self, network: Network, counters: PyTree, level: Level) -> Network:
        dense = self._train_phase(network, counters, level)
        return self.run.choose(network, dense) if level == self.run.levels[-1] else dense

    def _on_step(self, plan: Plan, reached: Phase) -> None:
        self.saving.step(plan, reached, self.progress)

    def _on_progress(self, progress: Progress) -> None:
        self.progress = progress
        self.saving.checkpoints.save(progress)
        if progress.done % 2:
            self.reporter.level(progress.frozen[-1])
