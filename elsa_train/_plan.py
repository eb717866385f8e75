"""The phases of a run: how long each is, at which rate and by which rule it trains."""

from dataclasses import dataclass

import numpy as np

from elsa_train._errors import BadRecipe
from elsa_train._jaxpruner import JaxprunerRule, make_updater
from elsa_train._joint import Joint
from elsa_train._levels import DENSE, Level, Schedule
from elsa_train._recipe import MOST, Recipe
from elsa_train._rules import RULES, MaskRule
from elsa_train._sparsify import Scope

REFERENCE, EQUAL_EPOCHS, JOINT, ALONE = 1000, 2000, 3000, 4000
"""Numbers of phases that are none of the levels'; a reference adds its level's number."""


@dataclass(frozen=True)
class Plan:
    """One phase: its number in the run (which decides its random numbers), length and rate."""

    number: int
    name: str
    steps: int
    peak: float
    warmup: int
    rule: MaskRule | Joint | None = None

    @property
    def revives_at(self) -> int | None:
        """Return the step before which weights that stayed at zero are drawn anew.

        The first at which the mask changes: all that has a gradient has moved by then, whether or
        not a densify phase came before.
        """
        if self.rule is None or isinstance(self.rule, Joint):
            return None
        return next((step for step in range(self.steps) if self.rule.updates_at(step)), None)

    def level_name(self, t: int) -> str:
        """Return what a level of joint training is called."""
        assert isinstance(self.rule, Joint)
        return self.rule.levels[t - 1].name if t != DENSE else "dense"

    def rate(self, step: int) -> float:
        """Return the learning rate: linear warmup, then half a cosine."""
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.peak * 0.5 * (1 + float(np.cos(np.pi * done)))


@dataclass(frozen=True)
class Plans:
    """The phases that a recipe asks for."""

    recipe: Recipe
    levels: tuple[Level, ...]
    scope: Scope
    steps_per_epoch: int

    def phase(
        self,
        number: int,
        name: str,
        epochs: float,
        level: Level | None = None,
        *,
        factor: float = 1.0,
    ) -> Plan:
        """Lay out a phase, which prunes to a level if there is one."""
        recipe, steps = self.recipe, round(epochs * self.steps_per_epoch)
        if level is None:
            return self._plan(number, name, steps, None, factor)
        steps = max(2, steps)
        start, end = round(recipe.prune_start * steps), round(recipe.prune_end * steps)
        end = start if recipe.one_shot else min(end, steps - 1)
        schedule = Schedule(start, end, recipe.mask_every)
        rule: MaskRule = RULES[recipe.sparsify](self.scope, level, schedule, recipe.score)
        if recipe.updater:
            rule = JaxprunerRule(make_updater(recipe.updater, self.scope, level, schedule))
        return self._plan(number, name, steps, rule, factor)

    def sequential(self) -> dict[int, Plan]:
        """Lay out all phases of ELSA: 0 the initial network, 2t-1 sparsify, 2t densify."""
        recipe, last = self.recipe, len(self.levels)
        plans = [self.phase(0, "dense", recipe.epochs)]
        for t, level in enumerate(self.levels, 1):
            name, number = f"sparsify {level.name}", 2 * t - 1
            plans.append(self.phase(number, name, recipe.sparsify_epochs, level))
            if recipe.densify_between or t == last:
                factor = recipe.densify_factor if t == last else recipe.densify_between_factor
                name = f"densify {level.name}"
                plans.append(self.phase(2 * t, name, recipe.densify_epochs, factor=factor))
        return {plan.number: plan for plan in plans}

    def joint(self) -> Plan:
        """Lay out the one phase of joint training."""
        given = self.recipe.joint_shares
        shares = tuple(int(share) for share in given.split(",")) if given else ()
        fixed = self.recipe.start_masks == "calibrated"
        return self._together(JOINT, "joint", self.levels, shares, fixed=fixed)

    def alone(self, t: int | None) -> Plan:
        """Lay out training one level, or (None) the dense network, for as long as all of them."""
        if t is None:
            return self._together(ALONE, "alone dense", (), ())
        level = self.levels[t - 1]
        return self._together(ALONE + t, f"alone {level.name}", (level,), (1, 0))

    def _together(
        self,
        number: int,
        name: str,
        levels: tuple[Level, ...],
        shares: tuple[int, ...],
        *,
        fixed: bool = False,
    ) -> Plan:
        """Lay out joint training of some levels: as many steps as all phases of `sequential`."""
        recipe = self.recipe
        steps = sum(plan.steps for plan in self.sequential().values())
        if steps > MOST:
            raise BadRecipe(f"{name}: {steps} steps, expected at most {MOST}")
        start = round(recipe.joint_dense * steps)
        end = max(start, min(round((1 - recipe.joint_fixed) * steps), steps - 1))
        rule = Joint(self.scope, levels, Schedule(start, end, recipe.joint_every), shares, fixed)
        return self._plan(number, name, steps, rule)

    def _plan(
        self, number: int, name: str, steps: int, rule: MaskRule | Joint | None, factor: float = 1.0
    ) -> Plan:
        """Give a phase the recipe's warmup, and its learning rate times a factor."""
        recipe = self.recipe
        rate = recipe.learning_rate * recipe.batch_size / 256 * factor
        warmup = min(round(recipe.warmup_epochs * self.steps_per_epoch), steps // 2)
        return Plan(number, name, steps, rate, warmup, rule)
