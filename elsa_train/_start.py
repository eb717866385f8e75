"""A run that begins with a trained network: where it is read, and its calibrated levels."""

import hashlib
import tempfile
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

import elsa_format
from elsa_format import AlreadyPacked
from elsa_format.plugins import as_array, open_checkpoint
from elsa_train._errors import BadRecipe, TrainError
from elsa_train._file import load_counters
from elsa_train._folder import load_initial
from elsa_train._levels import Level
from elsa_train._multilevel import Network
from elsa_train._sparsify import Scope
from elsa_train._tree import flatten, names, unflatten

if TYPE_CHECKING:
    from elsa_train._loop import Trainer

PyTree = Any
SAMPLES, BATCH = 256, 16
"""Training examples that levels are calibrated with."""


class Nested(NamedTuple):
    """A network whose levels were calibrated, and the counters of its weights."""

    network: Network
    counters: PyTree


def read_start(path: str, trainer: "Trainer") -> Network:
    """Read a trained network: any checkpoint of the model, an ELSA file, or a run's folder."""
    folder = Path(path)
    if folder.is_dir():
        folder = folder / "seed-0" if (folder / "seed-0").is_dir() else folder
        if (folder / "initial.npz").exists():
            return load_initial(folder / "initial.npz", trainer)
        folder /= "model.safetensors"
    like = trainer.like
    tensors = _tensors(str(folder))
    try:
        params, state = (unflatten(tree, tensors) for tree in like)
    except TrainError as error:
        raise TrainError(f"start: {folder}: {error}") from None

    def place(tree: PyTree, wanted: PyTree) -> PyTree:
        return trainer.replicate(jax.tree.map(lambda x, t: np.asarray(x, t.dtype), tree, wanted))

    return Network(place(params, like.params), place(state, like.state))


def _tensors(path: str) -> dict[str, NDArray[Any]]:
    try:
        checkpoint = open_checkpoint(path)
    except AlreadyPacked:
        with elsa_format.open(path) as file:
            return dict(file.load("dense"))
    found = {}
    for name, info in checkpoint.tensors.items():
        parts = [np.array(block, copy=True) for block in checkpoint.blocks(name, 1 << 26)]
        memory = np.concatenate([part.view(np.uint8).reshape(-1) for part in parts])
        found[name] = as_array(memory, info, checkpoint.path)
    checkpoint.close()
    return found


def checksum(network: Network) -> str:
    """Identify a network by its bits."""
    digest = hashlib.sha256()
    for name, leaf in sorted((flatten(network.params) | flatten(network.state)).items()):
        digest.update(name.encode() + b"\0" + np.asarray(leaf).tobytes())
    return digest.hexdigest()


def calibrated(
    trainer: "Trainer", scope: Scope, levels: Iterable[Level], network: Network
) -> Nested:
    """Nest levels into a trained network by calibration with training examples."""
    from elsa_train._calibrate import calibrate

    if jax.process_count() > 1:
        raise BadRecipe("start_masks: calibrated levels need a run of one process")
    batches = trainer.batches
    chosen = batches.indices["train"][:: max(1, batches.size("train") // SAMPLES)][:SAMPLES]
    inputs = [
        trainer.task.inputs(jnp.asarray(batches.data.batch("train", some, 0)[0]))
        for some in np.array_split(chosen, max(1, len(chosen) // BATCH))
    ]
    wanted = [name for name in flatten(network.params) if scope.matches(name)]
    variables = {"params": network.params, "batch_stats": network.state}
    with tempfile.TemporaryDirectory(prefix="elsa-start-") as folder:
        path = Path(folder) / "calibrated.safetensors"
        report = calibrate(
            lambda given, x: trainer.model.apply(given, x, train=False),
            variables,
            inputs,
            path,
            sparsities=[1 - level.density for level in levels],
            classes="logits",
            scope="uniform" if scope.kind == "uniform" else None,
            include=[_literal(name) for name in wanted],
        )
        for name in wanted:
            if name not in report.nested:
                why = next((w for n, w in report.shared.items() if fnmatchcase(n, name)), "")
                raise TrainError(
                    f"start_masks: {name!r} can't be calibrated{why and f' ({why})'}; leave it out "
                    "with --exclude"
                )
        with elsa_format.open(path) as file:
            tensors = file.load("dense")
        params = jax.tree.map(
            lambda name, leaf: np.asarray(tensors[name], leaf.dtype), names(network.params),
            network.params,
        )  # fmt: skip
        counters = load_counters(path, like=network.params)
    return Nested(Network(trainer.replicate(params), network.state), trainer.replicate(counters))


def _literal(name: str) -> str:
    """A shell pattern of one name."""
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)
