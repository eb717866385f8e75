"""Tensors of a level as they arrive, from a source that cannot seek (spec §2.2)."""

from collections.abc import Iterator
from typing import Any

from numpy.typing import NDArray

from elsa_format._level_reader import LevelReader
from elsa_format._network import open_network
from elsa_format._profile import LevelLike
from elsa_format._storage import Source


def stream(
    source: Source,
    *,
    level: LevelLike = "dense",
    verify: bool = True,
    max_bytes: int | None = None,
) -> Iterator[tuple[str, NDArray[Any]]]:
    """The tensors of a level as they arrive, one array at a time, from a source that need not seek.

    A network of more than `max_bytes` is refused from the header alone.

    >>> for name, array in stream("net.safetensors", level=2):
    ...     print(name, array.shape)
    layer (100, 100)
    bias (100,)
    """
    with open_network(source, along=True, max_bytes=max_bytes) as network:
        number = network.level_number(level)
        with LevelReader(network, number, verify=verify) as reader:
            for step in network.steps(number):
                if step.name is None:
                    reader.skip(step.info)
                else:
                    yield step.name, reader.array(step)
            reader.finish()
