"""Levels of a trained file: measured again, and given new batch-norm statistics."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import IO, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

import elsa_format
from elsa_train._errors import BadRecipe, TrainError, UnknownModel
from elsa_train._folder import load_network
from elsa_train._loop import Trainer
from elsa_train._own import is_own
from elsa_train._recipe import TEXT_MODELS, Recipe
from elsa_train._tree import flatten, unflatten
from elsa_train.data import NAMES, in_processes
from elsa_train.data import load as load_data
from elsa_train.data.augment import normalize
from elsa_train.data.protocol import Data, check_data, take_batch
from elsa_train.data.workers import Workers
from elsa_train.models import build, total_statistics

PyTree = Any
BATCH = 256
Target = str | Path | IO[bytes]


def recalibrate(
    source: str | Path,
    out: Target,
    *,
    level: int | str,
    data: Data,
    images: int = 1024,
    batch_size: int = 128,
    model: str | None = None,
    force: bool = False,
) -> int | Literal["dense"]:
    """Write the file anew, with one level's statistics those of the given images.

    Returns the level's number, which may be given as such, by name, or as "dense".
    The weights, and so every level's weights, keep their bits; measures and digest of the level
    change with its statistics: its old measures are left out.
    """
    if images < 1 or batch_size < 1:
        raise ValueError(f"images={images}, batch_size={batch_size}: expected at least 1")
    data = check_data(type(data).__name__, data)
    with elsa_format.open(source) as file:
        number = _number(file, level)
        if not file.per_level:
            raise UnknownModel(f"{source}: has no per-level tensors to recompute")
        recipe = _recipe_of(source, file.metadata, model)
        tensors = file.load(number)
        dense = file.load("dense")
        variants = {
            name: [file.tensor(name, t) for t in range(1, len(file.levels) + 1)]
            for name in file.per_level
        }
        specs = [
            elsa_format.LevelSpec(
                found.name,
                target=found.target,
                pattern=found.pattern,
                metrics={} if t == number else found.metrics,
                errors={} if t == number else found.errors,
            )
            for t, found in enumerate(file.levels, 1)
        ]
        profile = file.profile
        dense_metrics, dense_errors = profile.dense_metrics, profile.dense_errors
        if number == "dense":
            dense_metrics, dense_errors = {}, {}
        bits, nested, metadata = file.bits, list(file.nested), dict(file.metadata)

    found = statistics(source, recipe, tensors, data, images, batch_size)
    if found.keys() != variants.keys():
        raise UnknownModel(f"{source}: its per-level tensors are not the model's statistics")
    for name, value in found.items():
        if number == "dense":
            dense[name] = value
        else:
            assert isinstance(number, int)
            variants[name][number - 1] = value
    elsa_format.write(
        out,
        dense,
        bits=bits,
        levels=specs,
        nested=nested,
        per_level=variants,
        dense_metrics=dense_metrics,
        dense_errors=dense_errors,
        metrics=profile.metrics,
        metadata={k: v for k, v in metadata.items() if k != "elsa"},
        force=force,
    )
    return number


def evaluate(
    source: str | Path,
    levels: Sequence[int | str] = (),
    *,
    dataset: str | None = None,
    data_dir: str | Path = "",
    model: str | None = None,
    limit: int | None = None,
) -> list[dict[str, Any]]:
    """Measure levels, or all and the dense network, on the test examples of a data set.

    Data set and model are those that the file names, if they are bundled: what it names otherwise
    would be code, and is never imported.
    """
    with elsa_format.open(source) as file:
        numbers = [_number(file, level) for level in levels]
        numbers = numbers or [*range(1, len(file.levels) + 1), "dense"]
        names = {t: found.name for t, found in enumerate(file.levels, 1)}
        said = _said(file.metadata)
        recipe = _recipe_of(source, file.metadata, model)
    name = dataset or said.get("dataset")
    if name not in NAMES and dataset is None:
        raise BadRecipe(f"{source}: names no bundled data set; give --dataset")
    data = in_processes(load_data(str(name), data_dir))
    count = len(jax.devices())
    size = max(count, min(BATCH, data.size("train") // 2) // count * count)
    settings: dict[str, Any] = {"dataset": str(name), "batch_size": size, "test_images": limit or 0}
    with data if isinstance(data, Workers) else nullcontext():
        try:
            trainer = Trainer(dataclasses.replace(recipe, **settings), data, seed=0)
            networks = {number: load_network(Path(source), number, trainer) for number in numbers}
        except BadRecipe:
            raise
        except TrainError as error:
            problem = f"is not a {recipe.model!r} for {name!r}: {error}"
            raise UnknownModel(f"{source}: {problem}") from None
        return [
            {
                "level": t,
                "name": "" if t == "dense" else names[t],
                "metrics": trainer.evaluate(network, "test"),
            }
            for t, network in networks.items()
        ]


def _said(metadata: Mapping[str, str]) -> dict[str, Any]:
    try:
        found = json.loads(metadata.get("elsa_train", "{}"))
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _recipe_of(source: str | Path, metadata: Mapping[str, str], model: str | None) -> Recipe:
    """Read which model a file holds from what the trainer wrote into it, unless that is given."""
    if model is None and "elsa_train" not in metadata:
        raise UnknownModel(
            f"{source}: does not say which model it is (no elsa_train metadata); give --model"
        )
    try:
        found = json.loads(metadata.get("elsa_train", "{}"))
        if model is not None:
            found = {"model": model, "width": 0, "dtype": "float32"} | found | {"model": model}
        elif is_own(str(found["model"])):
            raise UnknownModel(
                f"{source}: its model is {found['model']!r}; a file's code is never run: give "
                "--model yourself"
            )
        values = {name: found[name] for name in ("model", "width", "dtype")}
        text: dict[str, Any] = {"dataset": "text"} if values["model"] in TEXT_MODELS else {}
        return Recipe(**values, **text)
    except UnknownModel:
        raise
    except (TypeError, KeyError, ValueError, RecursionError, TrainError) as error:
        raise UnknownModel(f"{source}: elsa_train metadata: {error!r}") from None


def statistics(
    source: str | Path,
    recipe: Recipe,
    tensors: dict[str, Any],
    data: Data,
    images: int,
    batch_size: int,
) -> dict[str, Any]:
    """Run the network on images and return mean and variance of what each batch norm sees."""
    # Momentum 0: a forward pass in training mode leaves exactly the batch's own statistics.
    model = build(
        recipe.model,
        num_classes=data.num_classes,
        width=recipe.width,
        dtype=jnp.dtype(recipe.dtype),
        momentum=0.0,
    )
    try:
        like = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, *data.shape())))
        params = jax.tree.map(
            lambda x, t: jnp.asarray(x, t.dtype), unflatten(like["params"], tensors), like["params"]
        )
        state = jax.tree.map(jnp.asarray, unflatten(like["batch_stats"], tensors))
    except Exception as error:
        first, *_ = str(error).splitlines() or [""]
        raise BadRecipe(
            f"{source}: its {recipe.model} does not fit the data set: {first}"
        ) from None

    @jax.jit
    def seen(batch: jax.Array) -> PyTree:
        inputs = normalize(batch, data.mean, data.std)
        variables = {"params": params, "batch_stats": state}
        return model.apply(variables, inputs, train=True, mutable=["batch_stats"])[1]["batch_stats"]

    order = np.random.default_rng(0).permutation(data.size("train"))[:images]
    size = min(batch_size, len(order))
    batches = [
        flatten(
            jax.tree.map(np.asarray, seen(take_batch(data, "train", order[i : i + size], 0)[0]))
        )
        for i in range(0, len(order) - size + 1, size)
    ]
    return total_statistics(batches)


def _number(file: elsa_format.File, level: int | str) -> int | Literal["dense"]:
    text = str(level)
    if text == "dense":
        return "dense"
    names = [found.name for found in file.levels]
    numbers = [str(t) for t in range(1, len(names) + 1)]
    for known in (numbers, names):  # a name may look like a number
        if text in known:
            return known.index(text) + 1
    raise elsa_format.NoSuchLevel(f"{file.path}: level {text!r}: found {', '.join(names)}")
