"""A network's variables as the tensors of a file, and back: linen's, nnx modules, any tree."""

import fnmatch
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from numpy.typing import NDArray

from elsa_format import NoSuchTensor
from elsa_format.plugins import Checkpoint, TensorInfo, of_array
from elsa_train._calibrate.program import Program
from elsa_train._errors import BadRecipe, TrainError
from elsa_train._tree import names

PyTree = Any


def tensors_of(variables: PyTree) -> dict[str, Any]:
    """The tensors of a network, with the names that they have in files of `write_file`.

    >>> list(tensors_of({"params": {"w": np.ones(2)}, "batch_stats": {"mean": np.zeros(2)}}))
    ['mean', 'w']
    """
    tree, _ = _split(variables)
    found: dict[str, Any] = {}
    for name, leaf in zip(_names(tree), jax.tree.leaves(tree), strict=True):
        if name in found:
            raise TrainError(f"two leaves of the variables are both called {name!r}")
        found[name] = leaf
    return found


def restore(variables: PyTree, tensors: Mapping[str, Any]) -> PyTree:
    """Give a network the tensors of a level.

    >>> restore({"params": {"w": np.ones(2)}}, {"w": np.array([0.0, 3.0])})
    {'params': {'w': array([0., 3.])}}

    Args:
        variables: What the file was made of: variables of linen, a module of nnx, or any tree.
        tensors: Those of a level, as `elsa_format.load` returns them.

    Returns:
        The same variables, with the values of the level.
    """
    tree, joined = _split(variables)
    leaves = []
    for name, like in zip(_names(tree), jax.tree.leaves(tree), strict=True):
        if name not in tensors:
            raise TrainError(f"tensor {name!r} is missing")
        if tensors[name].shape != np.shape(like):
            found, expected = tensors[name].shape, np.shape(like)
            raise TrainError(f"tensor {name!r}: found shape {found}, expected {expected}")
        leaves.append(tensors[name])
    return joined(jax.tree.unflatten(jax.tree.structure(tree), leaves))


class Variables(Checkpoint):
    """A network's variables as what is packed."""

    path = "<variables>"

    def __init__(self, variables: PyTree) -> None:
        self.variables = variables
        self.arrays = {name: _array(name, leaf) for name, leaf in tensors_of(variables).items()}
        self.dtypes = {name: array.dtype for name, array in self.arrays.items()}
        self.tensors = {
            name: TensorInfo(name, of_array(array.dtype), array.shape)
            for name, array in self.arrays.items()
        }
        self.refuse_reserved()

    def blocks(self, name: str, size: int) -> Iterator[NDArray[np.uint8]]:
        """Slices of the array."""
        flat = np.ascontiguousarray(self.arrays[name]).reshape(-1).view(np.uint8)
        for start in range(0, flat.size, size):
            yield flat[start : start + size]

    def check_use(self, program: Program) -> None:
        """Refuse a network that runs as in training."""
        statistics = [program.tensors[name] for name in _statistics(self.variables)]
        if statistics and not any(program.uses[value] for value in statistics):
            raise BadRecipe(
                "apply uses no running averages of batch norm; run the network as when it is "
                "used: use_running_average=True, or eval() of an nnx module"
            )
        if isinstance(self.variables, nnx.Module) and program.draws():
            raise BadRecipe("apply draws random numbers; call the module's eval() before")

    def check_names(self, patterns: Iterable[str]) -> None:
        """Refuse shell patterns that no tensor matches."""
        for pattern in patterns:
            if not fnmatch.filter(self.tensors, pattern):
                raise NoSuchTensor.of(self.path, "no tensor matches", pattern, self.tensors)


def _split(variables: PyTree) -> tuple[PyTree, Callable[[PyTree], PyTree]]:
    """The tree that is stored, and what makes variables of it: states of random keys are not."""
    if not isinstance(variables, nnx.Module):
        return variables, lambda tree: tree
    graph, *states = nnx.split(variables, nnx.RngState, ...)
    keys, state = states
    # Mapped, the keys are new objects, which a network being traced may change.
    return state, lambda tree: nnx.merge(graph, jax.tree.map(lambda key: key, keys), tree)


def _array(name: str, leaf: Any) -> NDArray[Any]:
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        raise TrainError(f"{name!r} is a random key; variables are arrays of numbers")
    return np.asarray(leaf)


def _statistics(variables: PyTree) -> list[str]:
    """The tensors that hold running averages."""
    if isinstance(variables, nnx.Module):
        return _names(nnx.state(variables, nnx.BatchStat))
    found = variables.get("batch_stats", {}) if isinstance(variables, Mapping) else {}
    return _names(found)


def _names(tree: PyTree) -> list[str]:
    found: list[str] = jax.tree.leaves(names(tree))
    if isinstance(tree, Mapping) and "params" in tree:  # linen's collections are no part of names
        found = [name.partition("/")[2] or name for name in found]
    return found
