"""Along which axis of a weight the inputs of its layer are: where kernels want N:M patterns."""

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

Shapes = Mapping[str, Sequence[int]]


def input_axes(shapes: Shapes) -> dict[str, int]:
    """The axis of the inputs of every tensor of two or more dimensions.

    PyTorch's weights have outputs first and inputs second, flax's kernels inputs before outputs.
    GPT-2's Conv1D has its inputs first, under PyTorch's names: a bias, which is as long as there
    are outputs, tells it, and layers of the same name are alike, so that square ones are told, too.

    >>> conv1d = {"h.0.mlp.c_proj.weight": (256, 64), "h.0.mlp.c_proj.bias": (64,)}
    >>> input_axes({**conv1d, "h.0.attn.c_proj.weight": (64, 64), "fc.weight": (10, 64)})
    {'h.0.mlp.c_proj.weight': 0, 'h.0.attn.c_proj.weight': 0, 'fc.weight': 1}
    """
    votes: dict[str, Counter[int]] = defaultdict(Counter)
    for name, shape in shapes.items():
        if (axis := _told_by_bias(name, shape, shapes)) is not None:
            votes[_layer(name)][axis] += 1
    axes = {}
    for name, shape in shapes.items():
        if len(shape) < 2:
            continue
        if re.search(r"(^|[./])kernel$", name):
            axes[name] = len(shape) - 2
        else:
            told = _told_by_bias(name, shape, shapes)
            alike = votes[_layer(name)].most_common(1)
            axes[name] = told if told is not None else alike[0][0] if alike else 1
    return axes


def _told_by_bias(name: str, shape: Sequence[int], shapes: Shapes) -> int | None:
    """The axis that is not as long as the bias, if only one of the first two is as long."""
    bias = shapes.get(re.sub(r"weight$", "bias", name)) if name.endswith("weight") else None
    if bias is None or len(bias) != 1 or len(shape) < 2 or shape[0] == shape[1]:
        return None
    if bias[0] not in shape[:2]:
        return None
    return 1 if shape[0] == bias[0] else 0


def _layer(name: str) -> str:
    """What the layer is called, wherever it is."""
    parts = re.split(r"[./]", name)
    return parts[-2] if len(parts) > 1 else name
