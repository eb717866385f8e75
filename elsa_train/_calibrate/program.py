"""A network as a sequence of equations, run in stretches between its layers."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

Array = Any
_CALLS = {
    "checkpoint": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "remat": "jaxpr",
    "remat2": "jaxpr",
}
"""Equations that stand for those of a function called, and the parameter that holds it."""


class Stretch(NamedTuple):
    """The equations between two stages, compiled.

    Values are those that depend on the samples.
    """

    tensors: Sequence[str]
    """Those of the network that it needs."""
    constants: Sequence[Array]
    takes: Sequence[Var]
    gives: Sequence[Var]
    live: Sequence[Var]
    """The values that are needed after it, those that it gives and older ones."""
    run: Callable[[Sequence[Array], Sequence[Array], Sequence[Array]], Sequence[Array]]
    """From tensors, constants and the values of `takes`, those of `gives`."""


@dataclass(frozen=True)
class Program:
    """A network for batches of one shape, without calls in it."""

    equations: Sequence[JaxprEqn]
    """Those that the outputs need."""
    tensors: Mapping[str, Var]
    constants: Mapping[Var, Array]
    batch: Sequence[Var]
    outputs: Sequence[Any]

    @cached_property
    def fixed(self) -> set[Var]:
        """What depends on no sample."""
        found = {*self.tensors.values(), *self.constants}
        for equation in self.equations:
            if found.issuperset(_variables(equation)):
                found.update(equation.outvars)
        return found

    @cached_property
    def uses(self) -> Counter[Var]:
        """How often each value is used; as one of the network's outputs, too."""
        values = [value for equation in self.equations for value in equation.invars]
        return Counter(v for v in [*values, *self.outputs] if not isinstance(v, Literal))

    @cached_property
    def made_by(self) -> dict[Var, JaxprEqn]:
        """The equation that computes each value."""
        return {value: equation for equation in self.equations for value in equation.outvars}

    @cached_property
    def used_by(self) -> dict[Var, JaxprEqn]:
        """An equation that uses each value: the only one, if there is one."""
        return {v: equation for equation in self.equations for v in _variables(equation)}

    def of_samples(self, value: Any) -> bool:
        """Whether a value depends on the samples."""
        return not isinstance(value, Literal) and value not in self.fixed

    def draws(self) -> bool:
        """Whether random numbers go into the outputs."""
        return any(equation.primitive.name == "random_bits" for equation in self.equations)

    def after(self, value: Var, output: Any) -> list[JaxprEqn] | None:
        """The equations from a value to an output; None if it needs more of the samples."""
        found, left = [], [output]
        while left:
            one = left.pop()
            if one is value or not self.of_samples(one):
                continue
            if one not in self.made_by:
                return None
            found.append(self.made_by[one])
            left += found[-1].invars
        return found

    def stages(self, layers: Sequence[JaxprEqn]) -> dict[Var, int]:
        """After how many stages each value is known: layers wait for those they need."""
        known: dict[Any, int] = dict.fromkeys(self.batch, 0)
        ends = {id(equation) for equation in layers}
        for equation in self.equations:
            needed = [known[v] for v in _variables(equation) if v in known]
            if needed:
                after = max(needed) + (id(equation) in ends)
                known |= dict.fromkeys(equation.outvars, after)
        return known

    def stretches(self, known: Mapping[Var, int]) -> list[Stretch]:
        """The equations in stretches, by the number of stages that each follows."""
        live: set[Any] = {value for value in self.outputs if self.of_samples(value)}
        found: list[Stretch] = []
        for stage in range(max(known.values()), -1, -1):
            after = [value for value in known if value in live and known[value] <= stage]
            gives = [value for value in after if known[value] == stage]
            needed, own = self._needed(gives, known, stage)
            takes = [value for value in known if value in needed and known[value] < stage]
            takes = takes if stage else list(self.batch)
            live |= needed
            names = [name for name, value in self.tensors.items() if value in needed]
            constants = [value for value in self.constants if value in needed]
            arguments = [self.tensors[name] for name in names], constants, takes
            run = _compiled(own, arguments, gives)
            arrays = [self.constants[value] for value in constants]
            found.append(Stretch(names, arrays, takes, gives, after, run))
        return found[::-1]

    def _needed(
        self, gives: Sequence[Var], known: Mapping[Var, int], stage: int
    ) -> tuple[set[Any], list[JaxprEqn]]:
        """The equations of a stretch, and all values in them."""
        inside: set[Any] = set(gives)
        needed, own = inside.copy(), []
        for equation in reversed(self.equations):
            if not inside.isdisjoint(equation.outvars):
                own.append(equation)
                inside |= {v for v in _variables(equation) if v in self.fixed or known[v] == stage}
                needed.update(_variables(equation))
        return needed, own[::-1]


def trace(apply: Callable[[Any, Any], Any], tensors: Mapping[str, Any], batch: Any) -> Program:
    """The equations of `apply(tensors, batch)`, those of the functions it calls in their place.

    Of loops and branches the calls stay: they are one equation each.
    """
    called = jax.make_jaxpr(apply)(dict(tensors), batch)
    flat = jax.make_jaxpr(lambda *args: _flat(called.jaxpr, called.consts, args))(
        *jax.tree.leaves(jax.eval_shape(lambda *both: both, dict(tensors), batch))
    )
    needed: set[Any] = {v for v in flat.jaxpr.outvars if not isinstance(v, Literal)}
    equations = []
    for equation in reversed(flat.jaxpr.eqns):
        if not needed.isdisjoint(equation.outvars):
            equations.append(equation)
            needed.update(_variables(equation))
    names = sorted(tensors)  # the order of a dictionary's leaves
    inputs = flat.jaxpr.invars
    return Program(
        equations[::-1],
        dict(zip(names, inputs[: len(names)], strict=True)),
        dict(zip(flat.jaxpr.constvars, flat.consts, strict=True)),
        inputs[len(names) :],
        flat.jaxpr.outvars,
    )


def _variables(equation: JaxprEqn) -> list[Var]:
    """What an equation needs, each once, but for literals."""
    return list(dict.fromkeys(v for v in equation.invars if not isinstance(v, Literal)))


def _flat(jaxpr: Jaxpr, constants: Sequence[Array], arguments: Sequence[Array]) -> list[Array]:
    """The results of a function, which are traced without the calls in it."""
    known: dict[Any, Array] = dict(zip(jaxpr.constvars, constants, strict=True))
    known |= dict(zip(jaxpr.invars, arguments, strict=True))
    for equation in jaxpr.eqns:
        inner = equation.params.get(_CALLS.get(equation.primitive.name, ""))
        values = _values(equation.invars, known)
        results: Sequence[Array]
        if isinstance(inner, ClosedJaxpr):
            results = _flat(inner.jaxpr, inner.consts, values)
        elif isinstance(inner, Jaxpr):
            results = _flat(inner, (), values)
        else:
            results = _results(equation, values)
        known |= dict(zip(equation.outvars, results, strict=True))
    return _values(jaxpr.outvars, known)


def _compiled(
    equations: Sequence[JaxprEqn], takes: Sequence[Sequence[Var]], gives: Sequence[Var]
) -> Callable[..., Sequence[Array]]:
    """Some equations as a function of the values that they need from elsewhere."""

    def run(*values: Sequence[Array]) -> list[Array]:
        known: dict[Any, Array] = {}
        for variables, some in zip(takes, values, strict=True):
            known |= dict(zip(variables, some, strict=True))
        for equation in equations:
            results = _results(equation, _values(equation.invars, known))
            known |= dict(zip(equation.outvars, results, strict=True))
        return _values(gives, known)

    return jax.jit(run)


def _values(variables: Iterable[Any], known: Mapping[Any, Array]) -> list[Array]:
    return [v.val if isinstance(v, Literal) else known[v] for v in variables]


def _results(equation: JaxprEqn, values: Sequence[Array]) -> Sequence[Array]:
    primitive: Any = equation.primitive
    found = primitive.get_bind_params(equation.params)
    functions, params = found if isinstance(found, tuple) else ((), found)  # before JAX 0.10
    results: Sequence[Array] = primitive.bind(*functions, *values, **params)
    return results if primitive.multiple_results else [results]
