"""Where transformers puts the tensors of a checkpoint: renamed, or converted, as experts are."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from transformers import PreTrainedModel
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key


class Place(NamedTuple):
    """Stored tensors, and the tensors of the model that transformers makes of them."""

    stored: tuple[str, ...]
    held: tuple[str, ...]
    converted: bool
    """Merged, split or transposed; otherwise one is the other."""


def find_places(
    model: PreTrainedModel, names: Iterable[str], conversions: Sequence[Any]
) -> list[Place]:
    """The places of stored tensors, with the functions that transformers uses; not all have one."""
    renamings = [c for c in conversions if isinstance(c, WeightRenaming)]
    converters = [c for c in conversions if isinstance(c, WeightConverter)]
    converter_of = {pattern: c for c in converters for pattern in c.source_patterns}
    own = model.state_dict()
    stored: dict[tuple[tuple[str, ...], bool], list[str]] = {}
    for name in names:
        key, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, own)
        if key not in own and name in own:
            key, pattern = name, None
        held = (key,)
        if pattern is not None:
            first, *more = converter_of[pattern].target_patterns
            held = (key, *(key.replace(first, other) for other in more))
        if held[0] in own:
            stored.setdefault((held, pattern is not None), []).append(name)
    return [Place(tuple(names), held, converted) for (held, converted), names in stored.items()]
