"""Multi-level ELSA (Algorithm 2), and its result as an ELSA file."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from numpy.typing import NDArray

import elsa_format
from elsa_format import level_digest
from elsa_train import _method
from elsa_train._errors import FrozenWeightChanged, NotReproduced, TrainError
from elsa_train._levels import Level, check_levels
from elsa_train._method import Rounding
from elsa_train._tree import flatten, size
from elsa_train._wide import whole

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
    from what `on_progress` was given after a routine.

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
    freeze = jax.jit(partial(_method.freeze, bits=bits, dtype=stored, rounding=rounding))
    finish = jax.jit(partial(_method.finish, bits=bits, dtype=stored, rounding=rounding))
    now = progress or Progress(0, network, _method.counters(network.params))

    for t, level in enumerate(levels, 1):
        if now.done < 2 * t - 1:
            trained = sparsify(now.network, now.counters, level)
            _check_frozen(now, trained, f"sparsify at level {level.name}")
            params, n = freeze(trained.params, now.counters, t)
            theta = Network(params, trained.state)
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
    return Result(theta, now.counters, now.frozen, bits, stored, dict(evaluate(theta)))


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
    if not _method.frozen_unchanged(before.network.params, after.params, before.counters):
        raise FrozenWeightChanged(f"{routine} changed weights that are frozen")


def _record(network: Network, level: Level, stored: Any, evaluate: Evaluate) -> FrozenLevel:
    nonzero = sum(map(whole, _method.count_nonzero(network.params)))
    return FrozenLevel(
        level=level,
        nonzero=nonzero,
        sparsity=1 - nonzero / size(network.params),
        metrics=dict(evaluate(network)),
        digest=level_digest(host_tensors(network, stored), flatten(network.params)),
        state=jax.tree.map(np.asarray, network.state),
    )


def host_tensors(network: Network, dtype: Any = None) -> dict[str, NDArray[Any]]:
    """Return the tensors of a network by name, the parameters in their stored type."""
    params = {
        name: np.ascontiguousarray(np.asarray(p), dtype=dtype or p.dtype).reshape(p.shape)
        for name, p in flatten(network.params).items()
    }
    state = {name: np.asarray(s) for name, s in flatten(network.state).items()}
    if clash := params.keys() & state.keys():
        raise TrainError(f"{min(clash)!r} names both a parameter and a statistic")
    return params | state


def write_file(
    path: str | Path,
    result: Result,
    *,
    settings: Mapping[str, Any] | None = None,
    force: bool = False,
) -> None:
    """Write the ELSA file and check that it gives back each level as it was frozen, bit by bit.

    >>> def keep_one(network, counters, level):
    ...     return Network({"kernel": network.params["kernel"].at[1:].set(0)})
    >>> network = Network({"kernel": jax.numpy.ones(4)})
    >>> write_file("one.safetensors", multi_level(network, [Level("75%", 0.75)], keep_one))
    >>> elsa_format.open("one.safetensors").sparsity(1)
    0.75
    """
    tensors = host_tensors(result.network, result.dtype)
    per_level = {
        name: [np.asarray(flatten(frozen.state)[name]) for frozen in result.levels]
        for name in flatten(result.network.state)
    }
    elsa_format.write(
        path,
        tensors,
        bits=result.bits,
        levels=[_spec(frozen) for frozen in result.levels],
        nested=list(flatten(result.network.params)),
        per_level=per_level,
        dense_metrics=result.metrics,
        metadata={} if settings is None else {"elsa_train": json.dumps(settings, sort_keys=True)},
        force=force,
    )
    check_file(path, result)


def _spec(frozen: FrozenLevel) -> elsa_format.LevelSpec:
    level = frozen.level
    return elsa_format.LevelSpec(
        level.name,
        target=level.target,
        pattern=str(level.pattern) if level.pattern else None,
        metrics=frozen.metrics,
    )


def check_file(path: str | Path, result: Result) -> None:
    """Compare each level of the file, and the dense network, with what was trained."""
    elsa_format.verify(path)
    nested = list(flatten(result.network.params))
    with elsa_format.open(path) as file:
        for t, frozen in enumerate(result.levels, 1):
            found = {level_digest(file.load(t), nested), file.levels[t - 1].digest}
            if found != {frozen.digest} or file.levels[t - 1].nonzero != frozen.nonzero:
                raise NotReproduced(f"{path}: level {t} ({frozen.level.name}) is not as it froze")
        stored = file.load("dense")
    trained = host_tensors(result.network, result.dtype)
    if any(stored[name].tobytes() != trained[name].tobytes() for name in trained):
        raise NotReproduced(f"{path}: the dense network is not the trained one")


def without_state(frozen: FrozenLevel) -> FrozenLevel:
    """Return the record without its arrays, for a JSON file."""
    return replace(frozen, state=None)
