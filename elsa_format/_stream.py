"""Tensors of a level as they arrive, from a source that cannot seek (spec §2.2)."""

from collections.abc import Iterator
from typing import Any

from numpy.typing import NDArray

from elsa_format._blocks import BlockReader, Source, as_array, open_source, read_profile
from elsa_format._layouts import mask_of
from elsa_format._plan import plan
from elsa_format._profile import LevelLike


def stream(
    source: Source, *, level: LevelLike = "dense", verify: bool = True
) -> Iterator[tuple[str, NDArray[Any]]]:
    """The tensors of a level as they arrive, one array at a time, from a source that need not seek.

    >>> for name, array in stream("net.safetensors", level=2):
    ...     print(name, array.shape)
    layer (100, 100)
    bias (100,)
    """
    with open_source(source) as opened:
        header, profile = read_profile(opened)
        number = profile.level_number(level, opened.name)
        reader = BlockReader(opened, header, profile if verify else None)
        for step in plan(header, profile, number):
            if step.name is None:
                reader.skip(step.info)
                continue
            flat = reader.room(step.info)
            level_mask = mask_of(profile, step.info, number, opened.name)
            for block in reader.blocks(step.info, flat):
                level_mask.apply(block)
            level_mask.finish()
            yield step.name, as_array(flat, step.info, opened.name)
        reader.finish()
