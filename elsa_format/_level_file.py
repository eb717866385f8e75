"""Load a level that was extracted before (spec §9)."""

from typing import Any

from numpy.typing import NDArray

from elsa_format._level_reader import LevelReader
from elsa_format._network import open_level
from elsa_format._storage import Source


def load_level(
    source: Source, *, verify: bool = True, max_bytes: int | None = None
) -> dict[str, NDArray[Any]]:
    """A level that `extract` wrote, in whatever layout, as dense arrays; its digest is verified.

    A level of more than `max_bytes` is refused from the header alone: few bytes in a sparse layout
    may stand for many.

    >>> from elsa_format import extract, open
    >>> level = extract("net.safetensors", "level3.safetensors", level=3, layout="bitmask")
    >>> layer = load_level("level3.safetensors")["layer"]
    >>> layer.tobytes() == open("net.safetensors").tensor("layer", level).tobytes()
    True
    """
    with (
        open_level(source, along=True, max_bytes=max_bytes) as network,
        LevelReader(network, verify=verify) as reader,
    ):
        steps = network.steps(network.available[0])
        tensors = {str(step.name): reader.array(step) for step in steps}
        reader.finish()
    return tensors
