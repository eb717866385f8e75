"""What test_sharded runs in processes of its own: networks split in several ways, trained alike."""

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from internals import Hosts, apply_mask
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import elsa_format
from elsa_train import (
    Network,
    Pruner,
    RigL,
    Schedule,
    Scope,
    apply_updates,
    check_target,
    multi_level,
    parse_levels,
    write_file,
)

SHAPES = {
    "embed/kernel": (30, 24),
    "first/kernel": (64, 48),
    "first/bias": (48,),
    "stack/kernel": (3, 16, 40),
    "odd/kernel": (7, 9),
    "scale": (),
    "empty/kernel": (0, 8),
}


def values(seed):
    """Draw weights, few of them different: ties at every threshold."""
    rng = np.random.default_rng(seed)
    drawn = {name: rng.integers(-6, 7, shape) / 4 for name, shape in SHAPES.items()}
    return {name: np.asarray(array, np.float32) for name, array in drawn.items()}


def unsplit(name, shape, mesh):
    return None


def fully_sharded(name, shape, mesh):
    """Split each tensor along its largest axis that all devices divide."""
    axes = [a for a in range(len(shape)) if shape[a] and shape[a] % mesh.size == 0]
    if not axes:
        return PartitionSpec()
    axis = max(axes, key=lambda a: shape[a])
    return PartitionSpec(*[None] * axis, ("host", "local"))


def tensor_parallel(name, shape, mesh):
    """Split the last axis over the devices of a host, here and there the first over hosts."""
    if not shape or shape[-1] % 4 or 0 in shape:
        return PartitionSpec()
    first = "host" if len(shape) > 1 and shape[0] % 2 == 0 and name != "embed/kernel" else None
    return PartitionSpec(*[first, None, None][: len(shape) - 1], "local")


def crossed(name, shape, mesh):
    """Split over hosts along the last axis: no host has a row."""
    if not shape or shape[-1] % 2 or 0 in shape:
        return PartitionSpec()
    return PartitionSpec(*[None] * (len(shape) - 1), "host")


WAYS = {f.__name__: f for f in (unsplit, fully_sharded, tensor_parallel, crossed)}
SETTINGS = {
    "global": (Scope("global"), "90,75,50", jnp.float32),
    "uniform": (Scope("uniform"), "90,75,50", jnp.bfloat16),
    "nm": (Scope("nm", exclude="odd|empty"), "1:8,1:4,2:4", jnp.float32),
    "rigl": (Scope("global"), "90,75,50", jnp.float32),
}


PLAN = {  # by number of processes
    1: {"global": list(WAYS), "uniform": ["unsplit"], "nm": ["unsplit", "crossed"]}
    | {"rigl": ["unsplit", "crossed"]},
    2: {"global": ["fully_sharded"], "uniform": ["crossed"], "nm": ["tensor_parallel"]}
    | {"rigl": ["fully_sharded"]},
}


def place(arrays, way, mesh):
    def put(name, array):
        spec = WAYS[way](name, array.shape, mesh)
        if spec is None:
            return jnp.asarray(array)
        return jax.make_array_from_callback(
            array.shape, NamedSharding(mesh, spec), lambda index: array[index]
        )

    return {name: put(name, array) for name, array in arrays.items()}


def train(way, setting, mesh, start=None):
    """Run Algorithm 2 with routines whose bits don't depend on the devices."""
    scope, levels, dtype = SETTINGS[setting]
    params = start or place(values(0), way, mesh)

    def sparsify(network, counters, level):
        kept = Pruner(scope, level, Schedule(0, 0, 1)).mask(network.params, None, counters, 0)
        if setting == "rigl":
            rule, grads = RigL(scope, level, Schedule(0, 9, 2)), place(values(7), way, mesh)
            sparse, before = jax.jit(apply_mask)(network.params, kept), kept
            kept = rule.mask(sparse, grads, counters, 4)
            assert any(bool(jnp.any(kept[name] & ~before[name])) for name in kept)
        for name, leaf in network.params.items():
            assert kept[name].sharding.is_equivalent_to(leaf.sharding, leaf.ndim), name
            assert counters[name].sharding.is_equivalent_to(leaf.sharding, leaf.ndim), name
        state = jax.tree.map(lambda s: s + 1, network.state)
        return Network(jax.jit(apply_mask)(network.params, kept), state)

    def densify(network, counters, level):
        noise = place(values(len(level.name)), way, mesh)
        return network._replace(params=jax.jit(apply_updates)(network.params, noise, counters))

    state = place({"mean": np.arange(16, dtype=np.float32).reshape(8, 2)}, way, mesh)
    return multi_level(Network(params, state), parse_levels(levels), sparsify, densify, dtype=dtype)


def found(path):
    """Describe a file: the digests of its levels, and all of its dense bytes."""
    elsa_format.verify(path)
    with elsa_format.open(path) as file:
        dense = file.load("dense")
        return {
            "digests": [level.digest for level in file.levels],
            "nonzero": [level.nonzero for level in file.levels],
            "dense": elsa_format.level_digest(dense, []),
        }


def refusal(action):
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


def main(folder, process, processes, port):
    folder = Path(folder)
    if processes > 1:
        jax.distributed.initialize(f"127.0.0.1:{port}", processes, process)
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("host", "local"))
    results = {}
    for setting, ways in PLAN[processes].items():
        for way in ways:
            result = train(way, setting, mesh)
            path = folder / f"{setting}-{way}.safetensors.index.json"
            write_file(path, result, settings={"process": process})
            results[f"{setting} {way}"] = found(path)
            if way == "fully_sharded":
                plain = folder / f"{setting}-{way}.safetensors"
                write_file(plain, result)
                assert found(plain) == found(path)
    refused = {}
    if processes > 1:
        network = Network(place(values(0), "fully_sharded", mesh))
        lonely = folder / f"host-{process}"
        lonely.mkdir()
        target = "net.safetensors.index.json"
        refused["folder"] = refusal(lambda: check_target(lonely / target, network))
        odd = dict(network.params)
        odd["first/kernel" if process else "other/kernel"] = network.params["first/kernel"]
        refused["tree"] = refusal(
            lambda: multi_level(Network(odd), parse_levels("50"), lambda *_: None)
        )
        here = {
            **network.params,
            "first/bias": jax.device_put(np.ones(48, np.float32), jax.local_devices()[0]),
        }
        refused["devices"] = refusal(
            lambda: multi_level(Network(here), parse_levels("50"), lambda *_: None)
        )
        exists = folder / "global-fully_sharded.safetensors.index.json"
        refused["exists"] = refusal(lambda: check_target(exists, network))
        # A full disk, or whatever else stops one process, stops all, and leaves nothing.
        result = train("fully_sharded", "global", mesh)
        give = Hosts.blocks

        def spoil(self, array, owner, dtype=None):
            for block in give(self, array, owner, dtype):
                yield np.full_like(block, np.nan) if process == 1 else block

        Hosts.blocks = spoil
        (folder / "failed").mkdir(exist_ok=True)
        refused["failed"] = refusal(lambda: write_file(folder / "failed" / target, result))
    (folder / f"found-{process}.json").write_text(json.dumps([results, refused]))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
