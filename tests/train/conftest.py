"""Shared settings and runs; everything here is small, since compiling dominates."""

import os
import tempfile

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Programs are compiled fast rather than to be fast, here and in processes that tests start.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
# Runs of the same shapes, in this process and in those that tests start, compile once.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _CACHE = tempfile.TemporaryDirectory(prefix="elsa-train-tests-")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _CACHE.name
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("jax")
pytest.importorskip("flax")
pytest.importorskip("orbax.checkpoint")

import jax
import numpy as np
from internals import Output, Reporter, Run, flatten, train_run

from elsa_train import Network, Recipe, Result, read_recipe

TINY = {
    "width": 8,
    "epochs": 2.0,
    "sparsify_epochs": 2.0,
    "densify_epochs": 0.5,
    "warmup_epochs": 0.5,
    "mask_every": 5,
    "test_images": 128,
}


def host_tensors(network: Network, dtype: Any) -> dict[str, np.ndarray[Any, Any]]:
    """Return the tensors of a network by name, the parameters in their stored type."""
    params = {name: np.asarray(p, dtype) for name, p in flatten(network.params).items()}
    return params | flatten(network.state)


class Trained(NamedTuple):
    """A run, its result, and the networks as they were measured."""

    run: Run
    result: Result
    measured: list[dict[str, np.ndarray[Any, Any]]]


def environment(devices: int) -> dict[str, str]:
    """Return the environment of a process with so many devices, and with what tests share."""
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}"
    return {**os.environ, "XLA_FLAGS": flags, "PYTHONPATH": str(Path(__file__).parents[1])}


def tiny(**values: Any) -> Recipe:
    """Return the digits recipe cut down to seconds."""
    return read_recipe("digits", {**TINY, **values})


@pytest.fixture(scope="session")
def train_tiny(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that trains and writes, once for each setting."""
    done: dict[tuple[str, str], Trained] = {}

    def train(scope: str, store_dtype: str) -> Trained:
        key = (scope, store_dtype)
        if key not in done:
            folder = tmp_path_factory.mktemp(f"{scope}-{store_dtype}")
            compute = store_dtype if scope == "nm" else "float32"
            recipe = tiny(scope=scope, store_dtype=store_dtype, dtype=compute)
            with open(os.devnull, "w") as quiet:
                run = Run(recipe, 0, Output(Path(folder)), Reporter(quiet))
                measured = []
                evaluate = run.trainer.evaluate

                def keep(network: Any, part: Any = "test") -> Any:
                    if part == "test":
                        copy = jax.tree.map(np.array, network)
                        measured.append(host_tensors(copy, np.dtype(jax.numpy.dtype(store_dtype))))
                    return evaluate(network, part)

                run.trainer.evaluate = keep  # type: ignore[method-assign]
                result, _ = train_run(run)
                run.trainer.evaluate = evaluate  # type: ignore[method-assign]
                run.write(result)
            done[key] = Trained(run, result, measured)
        return done[key]

    return train
