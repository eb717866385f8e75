"""What test_killed runs in processes of its own: one of them is gone while they write together."""

import os
import signal
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from internals import AtomicFile
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from elsa_format import ElsaError
from elsa_format.plugins import SharedWriter
from elsa_train import Level, Network, multi_level, write_file

TARGET = "net.safetensors.index.json"
SHAPES = {"first/kernel": (64, 24), "second/kernel": (16, 8), "third/kernel": (8, 40)}
MOMENTS = {"data": (SharedWriter, "append"), "names": (AtomicFile, "publish")}
"""After which call a process is killed: with some data written, with a shard under its name."""


def train(place=jnp.asarray):
    rng = np.random.default_rng(0)
    drawn = {name: rng.normal(size=shape) for name, shape in SHAPES.items()}
    params = {name: place(array.astype(np.float32)) for name, array in drawn.items()}

    def sparsify(network, counters, level):
        return Network({name: p.at[::2].set(0) for name, p in network.params.items()})

    return multi_level(Network(params), [Level("50%", 0.5)], sparsify)


def die_after(moment):
    place, method = MOMENTS[moment]
    whole = getattr(place, method)

    def die(self, *words):
        whole(self, *words)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(place, method, die)


def main(folder, process, port, *, moment="", victim=-1):
    # Where one is killed, the others should not wait for JAX's 100 seconds to notice.
    patience = 10 if moment else 100
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, process, heartbeat_timeout_seconds=patience)
    mesh = Mesh(np.array(jax.devices()), ("all",))
    split = NamedSharding(mesh, PartitionSpec("all"))
    result = train(lambda a: jax.make_array_from_callback(a.shape, split, a.__getitem__))
    if process == victim:
        die_after(moment)
    if moment:
        write_file(folder / moment / TARGET, result)
        return
    write_file(folder / "data" / TARGET, result)
    try:
        write_file(folder / "names" / TARGET, result)
    except ElsaError as error:  # process 1 says that process 0 failed
        print(error)
    write_file(folder / "names" / TARGET, result, force=True)


if __name__ == "__main__":
    where, number, port, *killed = sys.argv[1:]
    options = {"moment": killed[0], "victim": int(killed[1])} if killed else {}
    main(Path(where), int(number), int(port), **options)
