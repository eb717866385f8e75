"""Multi-level ELSA (Algorithm 2)."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from elsa_format.plugins import TensorInfo, digest_of_lines, of_array, tensor_line
from elsa_train import _method
from elsa_train._errors import FrozenWeightChanged, TrainError
from elsa_train._levels import Level, check_budget, check_growth, check_levels, check_sparsity
from elsa_train._method import Rounding
from elsa_train._sharded.hosts import Hosts
from elsa_train._sharded.wide import whole
from elsa_train._sparsify import Scope
from elsa_train._tree import flatten, size

PyTree = Any
Metrics = Mapping[str, float]


class Network(NamedTuple):
    """Learnable parameters, and what each level keeps for itself: batch-norm statistics.

    >>> Network({"layer": {"kernel": np.ones((2, 2))}}).state
    ()
    """

    params: PyTree
    state: PyTree = ()


class Sparsify(Protocol):
    """theta_sparse <- sparsify(theta, M, alpha): must keep frozen weights (N > 0)."""

    def __call__(self, network: Network, counters: PyTree, level: Level) -> Network:
        """Return the network with the weights that don't belong to the level at zero."""
        ...


class Densify(Protocol):
    """theta_dense <- densify(theta_sparse, M): trains the weights that are not frozen."""

    def __call__(self, network: Network, counters: PyTree, level: Level) -> Network:
        """Return the network with the learnable weights trained."""
        ...


Evaluate = Callable[[Network], Metrics]


@dataclass(frozen=True)
class FrozenLevel:
    """What is remembered of a level: its own statistics and measures, never its weights.

    See `multi_level` for where they come from.

    >>> frozen = FrozenLevel(Level("90%", 0.9), 100, 0.9, {"accuracy": 0.98}, "sha256:…", ())
    >>> without_state(frozen).state is None
    True
    """

    level: Level
    nonzero: int
    sparsity: float
    metrics: dict[str, float]
    digest: str
    state: PyTree


class Progress(NamedTuple):
    """Where Algorithm 2 is: `done` counts finished routines, sparsify and densify of each level.

    >>> Progress(0, Network({}), {}).frozen
    ()
    """

    done: int
    network: Network
    counters: PyTree
    frozen: tuple[FrozenLevel, ...] = ()


class Result(NamedTuple):
    """theta(T) with the counters in its low bits, N(T), and the levels.

    >>> Result._fields
    ('network', 'counters', 'levels', 'bits', 'dtype', 'metrics')
    """

    network: Network
    counters: PyTree
    levels: tuple[FrozenLevel, ...]
    bits: int
    dtype: Any
    metrics: dict[str, float]


def no_densify(network: Network, counters: PyTree, level: Level) -> Network:
    """Leave the network as it is, for sparsify routines that start dense by themselves.

    >>> no_densify(Network({"kernel": 1}), {}, Level("90%", 0.9)).params
    {'kernel': 1}
    """
    del counters, level
    return network


def no_evaluation(network: Network) -> Metrics:
    """Measure nothing."""
    del network
    return {}


def multi_level(
    network: Network,
    levels: Sequence[Level],
    sparsify: Sparsify,
    densify: Densify = no_densify,
    *,
    scope: Scope | None = None,
    bits: int | None = None,
    dtype: Any = None,
    rounding: Rounding = "nearest",
    densify_between: bool = True,
    evaluate: Evaluate = no_evaluation,
    progress: Progress | None = None,
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> Result:
    """Train levels of falling sparsity inside one network (Algorithm 2).

    Memory does not grow with the number of levels but for their statistics. `progress` resumes
    from what `on_progress` was given after a routine. Parameters may have any sharding, over one
    process or several, which then all call this; what they can't share is refused first.

    A level that misses its sparsity is refused when it is frozen (`MissedBudget`). With a `scope`,
    the one that sparsify prunes by, it must have its budget within 0.1 % of all weights. Without
    one it is unknown which tensors were to be pruned: the zeros must be at least the level's
    sparsity times the tensors that have zeros, and at most that times all tensors, within 1 %.
    A level that adds no weight to those that are frozen is refused in any case.

    >>> def sparsify(network, counters, level):  # a real one trains; frozen weights stay
    ...     kernel, n = network.params["kernel"], counters["kernel"]
    ...     keep = jax.numpy.arange(kernel.size) < float(kernel.size * level.density)
    ...     return Network({"kernel": jax.numpy.where(n > 0, kernel, 1.5 * keep)})
    >>> network = Network({"kernel": jax.numpy.full(10, 1.5)})
    >>> result = multi_level(network, [Level("90%", 0.9), Level("50%", 0.5)], sparsify)
    >>> result.counters["kernel"].tolist(), result.bits
    ([1, 2, 2, 2, 2, 0, 0, 0, 0, 0], 2)
    """
    own = _check_params(network.params)
    stored = np.dtype(dtype or own)
    bits = check_levels(levels, bits=bits, dtype=stored.name)
    if clash := flatten(network.params).keys() & flatten(network.state).keys():
        raise TrainError(f"{min(clash)!r} names both a parameter and a statistic")
    hosts = Hosts(network)
    hosts.check(network)
    if scope is not None:
        scope.check(network.params, levels, bits=bits, dtype=stored.name)
    freeze = jax.jit(partial(_method.freeze, bits=bits, dtype=stored, rounding=rounding))
    finish = jax.jit(partial(_method.finish, bits=bits, dtype=stored, rounding=rounding))
    now = progress or Progress(0, network, _method.counters(network.params))

    for t, level in enumerate(levels, 1):
        if now.done < 2 * t - 1:
            trained = sparsify(now.network, now.counters, level)
            _check_frozen(now, trained, f"sparsify at level {level.name}")
            params, n = freeze(trained.params, now.counters, t)
            theta = Network(params, trained.state)
            check_level(level, params, scope, now.counters)
            record = _record(theta, level, stored, evaluate)
            now = Progress(2 * t - 1, theta, n, (*now.frozen, record))
            on_progress(now)
        if now.done < 2 * t:
            if densify_between or t == len(levels):
                dense = densify(now.network, now.counters, level)
                _check_frozen(now, dense, f"densify after level {level.name}")
                now = now._replace(network=dense)
            now = now._replace(done=2 * t)
            on_progress(now)

    theta = Network(finish(now.network.params, now.counters), now.network.state)
    metrics = _measure(theta, evaluate, hosts)
    return Result(theta, now.counters, now.frozen, bits, stored, metrics)


def _check_params(params: PyTree) -> Any:
    """Refuse what is no float array, such as the random keys of a whole nnx model; give a type."""
    leaves = flatten(params)
    for name, leaf in leaves.items():
        found = getattr(leaf, "dtype", None)
        if found is None or not jax.numpy.issubdtype(found, jax.numpy.floating):
            raise TrainError(
                f"parameter {name!r} is {found or type(leaf).__name__}, expected an array of "
                "floats; an nnx model is split into nnx.Param, nnx.BatchStat and the rest"
            )
    if not leaves:
        raise TrainError("the network has no parameters")
    return next(iter(leaves.values())).dtype


def _check_frozen(before: Progress, after: Network, routine: str) -> None:
    given = jax.tree.leaves((before.network.params, before.counters))
    if any(isinstance(x, jax.Array) and x.is_deleted() for x in given):
        raise TrainError(
            f"{routine} donated the network or counters that it was given, which are compared "
            "with what it returns; copy them first: jax.tree.map(jnp.copy, network)"
        )
    if not _method.frozen_unchanged(before.network.params, after.params, before.counters):
        raise FrozenWeightChanged(f"{routine} changed weights that are frozen")


def _record(network: Network, level: Level, stored: Any, evaluate: Evaluate) -> FrozenLevel:
    hosts = Hosts(network)
    sparsity, nonzero = zeros(network.params)
    return FrozenLevel(
        level=level,
        nonzero=nonzero,
        sparsity=sparsity,
        metrics=_measure(network, evaluate, hosts),
        digest=_digest(network, stored, hosts),
        state=jax.tree.map(hosts.everywhere, network.state),
    )


def check_level(level: Level, params: PyTree, scope: Scope | None, counters: PyTree) -> None:
    """Refuse a level without the zeros, or the other weights, that it was to have.

    Counters are above 0 where weights were frozen before it.
    """
    leaves = flatten(params)
    nonzero, frozen = (
        dict(zip(leaves, map(whole, counts), strict=True))
        for counts in (_method.count_nonzero(params), _method.count_frozen(counters))
    )
    matrices = [name for name, leaf in leaves.items() if leaf.ndim > 1] or list(leaves)
    pruned = [name for name in leaves if scope.matches(name)] if scope else matrices
    found = sum(nonzero[name] for name in pruned)
    if scope is None:
        check_sparsity(level, [(leaf.shape, nonzero[name]) for name, leaf in leaves.items()])
    else:
        check_budget(
            level,
            found,
            sum(scope.budgets(params, level)),
            size(params),
            len(leaves),
            "where there are fewer, they are exactly zero or too small for the stored dtype: train "
            "longer or at a higher learning rate, or prune less",
        )
    check_growth(level, found, sum(frozen[name] for name in pruned))


def zeros(params: PyTree) -> tuple[float, int]:
    """Return the fraction of weights that are zero, and how many are not."""
    nonzero = sum(map(whole, _method.count_nonzero(params)))
    return 1 - nonzero / size(params), nonzero


def _measure(network: Network, evaluate: Evaluate, hosts: Hosts) -> dict[str, float]:
    """Measure a network; what all remember is what the first process found."""
    found = {name: float(value) for name, value in evaluate(network).items()}
    first: dict[str, float] = json.loads(hosts.exchange(json.dumps(found).encode())[0])
    return first


def _digest(network: Network, stored: Any, hosts: Hosts) -> str:
    """Digest a level of which everything is non-zero that it keeps; each tensor by its owner."""
    tensors = {name: (p, stored) for name, p in flatten(network.params).items()}
    nested = set(tensors)
    tensors |= {name: (s, np.dtype(s.dtype)) for name, s in flatten(network.state).items()}
    owners = hosts.owners({name: array.nbytes for name, (array, _) in tensors.items()})
    lines = {}
    for name, (array, dtype) in tensors.items():
        info = TensorInfo(name, of_array(dtype), array.shape)
        line = tensor_line(info, hosts.blocks(array, owners[name], dtype), nested=name in nested)
        if owners[name] == hosts.number:
            lines[name] = line
    for said in hosts.exchange(json.dumps(lines).encode()):
        lines |= json.loads(said)
    return digest_of_lines(lines)


def without_state(frozen: FrozenLevel) -> FrozenLevel:
    """Return the record without its arrays, for a JSON file."""
    return replace(frozen, state=None)
