"""What test_eight_devices runs: rules and joint training, whole and resumed, and split."""

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from click.testing import CliRunner
from internals import Checkpoints, _run, flatten, train
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from resumed import run_and_resume
from test_joint import WORDS

import elsa_format
from elsa_train import Joint, Network, Schedule, Scope, masked, nest, parse_levels, write_file

LEVELS = {"global": "90,80", "uniform": "90,80", "nm": "1:8,1:4"}
FEW = ["--train-images", "192", "--batch-size", "32", "--test-images", "64"]


def counters_of(path):
    with elsa_format.open(path) as file:
        dense = file.load("dense")
        return {n: elsa_format.read_counters(dense[n], file.bits) for n in file.nested}


def run(folder, scope):
    """Train by the command, and tell whether the file has the counters that training ended with."""
    reached = []

    def watched(network, counters, levels, *rest, **settings):
        reached.append(flatten(counters))
        return nest(network, counters, levels, *rest, **settings)

    _run.nest = watched
    words = [*WORDS, *FEW, "--scope", scope, "--levels", LEVELS[scope], "-o", str(folder)]
    found = CliRunner().invoke(train, words)
    _run.nest = nest
    path = folder / "seed-0" / "model.safetensors"
    if found.exit_code:
        return {"code": found.exit_code, "said": found.output}
    (ended,) = reached
    stored = counters_of(path)
    return {
        "code": 0,
        "devices": len(next(iter(ended.values())).sharding.device_set),
        "same": all(np.array_equal(stored[name], np.asarray(n)) for name, n in ended.items()),
        "kept": {
            name: [int(np.sum((n > 0) & (n <= t))) for t in (1, 2)] for name, n in stored.items()
        },
    }


def run_in_two(folder, scope):
    """Stop after a checkpoint, and resume."""
    save = Checkpoints.save

    def die(self, progress, phase=None):
        save(self, progress, phase)
        if phase and phase.step == 10:
            raise KeyboardInterrupt

    Checkpoints.save = die
    stopped = run(folder, scope)
    Checkpoints.save = save
    return [stopped["code"], run(folder, scope)["code"]]


def steps(params, place, scope, levels):
    """Train a few steps whose sums are exact, so that they don't depend on how they are split."""
    joint = Joint(scope, levels, Schedule(1, 5, 2))
    inputs = place("inputs", np.random.default_rng(1).integers(-2, 3, (16, 64)).astype(np.float32))

    def loss(params, n, t):
        hidden = inputs @ masked(params, n, t)["first/kernel"]
        return jnp.sum(hidden @ masked(params, n, t)["second/kernel"])

    @jax.jit
    def step(params, n, t):
        grads = jax.grad(loss)(params, n, t)
        return jax.tree.map(lambda p, g: p - jnp.sign(g) / 64, params, grads)

    n = joint.start(params)
    for number in range(8):
        if joint.updates_at(number):
            n = joint.rank(params, number)
        params = step(params, n, joint.draw(number, (0,)))
    for name, leaf in params.items():
        assert n[name].sharding.is_equivalent_to(leaf.sharding, leaf.ndim), name
    return params, n


def split(folder, scope, spec):
    mesh = Mesh(np.array(jax.devices()), ("all",))

    def place(name, array):
        if spec is None:
            return jnp.asarray(array)
        return jax.device_put(
            array, NamedSharding(mesh, PartitionSpec() if name == "inputs" else spec)
        )

    rng = np.random.default_rng(0)
    shapes = {"first/kernel": (64, 48), "second/kernel": (48, 16)}
    drawn = {name: rng.integers(-64, 65, shape) / 64 for name, shape in shapes.items()}
    params = {name: place(name, array.astype(np.float32)) for name, array in drawn.items()}
    levels = parse_levels(LEVELS[scope])
    params, n = steps(params, place, Scope(scope), levels)
    path = folder / f"{scope}-{spec}.safetensors"
    write_file(path, nest(Network(params), n, levels))  # compares the file with what was frozen
    stored = counters_of(path)
    # Weights that are exactly zero are in no level.
    expected = {name: np.where(np.asarray(params[name]) == 0, 0, n[name]) for name in n}
    same = all(np.array_equal(stored[name], expected[name]) for name in n)
    with elsa_format.open(path) as file:
        return same, [level.digest for level in file.levels]


def main(folder):
    splits = {"none": None, "rows": PartitionSpec("all")}
    found = {
        "runs": {scope: run(folder / scope, scope) for scope in LEVELS},
        "in two": run_in_two(folder / "two", "global"),
        "rules": run_and_resume(folder, ["gmp", "rigl"], *FEW),
        "split": {
            scope: {name: split(folder, scope, spec) for name, spec in splits.items()}
            for scope in LEVELS
        },
    }
    (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
