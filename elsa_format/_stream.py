"""Tensors of a level as they arrive, from a source that cannot seek (spec §2.2)."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elsa_format import _kernels
from elsa_format._blocks import BlockReader, Source, as_array, open_source, read_profile
from elsa_format._plan import plan
from elsa_format._profile import LevelLike


def stream(
    source: Source, *, level: LevelLike = "dense", verify: bool = True
) -> Iterator[tuple[str, NDArray[Any]]]:
    """The tensors of a level as they arrive, one array at a time, from a source that need not seek.

    >>> for name, array in stream("net.safetensors", level=2):  # doctest: +SKIP
    ...     print(name, array.shape)
    """
    with open_source(source) as opened:
        header, profile = read_profile(opened)
        number = profile.level_number(level, opened.name)
        reader = BlockReader(opened, header, profile if verify else None)
        for step in plan(header, profile, number):
            flat = reader.room(step.info) if step.name is not None else np.empty(0, np.uint8)
            position = 0
            for block in reader.blocks(step.info):
                if step.name is None:
                    continue
                part = flat[position : position + block.size]
                if step.nested and number is not None:
                    words = step.info.dtype.words
                    _kernels.mask(block.view(words), part.view(words), profile.bits, number)
                else:
                    part[:] = block
                position += block.size
            if step.name is not None:
                yield step.name, as_array(flat, step.info, opened.name)
        reader.finish()
