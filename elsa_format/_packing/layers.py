"""What the tensors of a model are for, and how they lie: told from names, shapes and its config.

Pruning weights that are looked up, or that decide for many others, costs more than it saves. Names
are those that PyTorch, Hugging Face, timm and flax give.
"""

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from elsa_format._container import TensorInfo
from elsa_format.levels import Pattern

Shapes = Mapping[str, Sequence[int]]

_KINDS = [
    ("position", r"wpe|pos(ition(al)?)?_?(embed(dings?)?|emb|ids|bias(_table)?|encodings?)"),
    ("position", r"(rel(ative)?_)?(position|attention|pos)_bias(_table)?(_mlp)?|rel_pos\w*"),
    ("router", r"router|gate|shared_expert_gate"),
    ("output head", r"(lm_|mlm_|qa_|seq_)?heads?|head_dist|embed_out|score|\w*logits?"),
    ("output head", r"(qa_)?outputs|\w*classifier|\w*predictions?(_heads?)?"),
    ("embedding", r"\w*embed\w*|wte|shared|\w*(cls|mask|dist|register)_tokens?"),
    ("state space", r"a_log"),
    ("norm", r"\w*(layer|batch|group|rms)?_?norm\w*|ln_?\w{0,5}|bn\d*"),
]
_PATTERNS = [(kind, re.compile(pattern)) for kind, pattern in _KINDS]
_TOP_HEADS = re.compile(r"(model\.|module\.)?(fc|output|head|classifier)(\.\d+)?(\.weight|/kernel)")
EXPERTS_RATIO = 8
"""A gate is a router if it has this many times as many inputs as outputs, the experts."""
THIN = 10
"""A level leaves next to nothing of a tensor if it keeps less than this part of its density."""
MERGED = (1, 2, 3, 4)
"""How many times as wide as a size of the config the layers of a model are."""


def layer_kind(name: str, shape: Sequence[int], vocabulary: int | None = None) -> str | None:
    """Why a tensor should not be pruned unless it is asked for; None for the weight of a layer.

    >>> layer_kind("model.layers.0.self_attn.q_proj.weight", (64, 64), 1000) is None
    True
    >>> layer_kind("model.embed_tokens.weight", (1000, 64)), layer_kind("out.w", (1000, 64), 1000)
    ('embedding', 'output head')
    >>> layer_kind("model.layers.0.mlp.gate.weight", (8, 64))
    'router'
    """
    if math.prod(shape) == max(shape, default=1):
        return "vector"  # a bias or scale, in however many dimensions
    parts = re.split(r"[./]", name.lower())
    for kind, pattern in _PATTERNS:
        if any(pattern.fullmatch(part) for part in parts) and (
            kind != "router" or _is_router(parts, shape)
        ):
            return kind
    if _TOP_HEADS.fullmatch(name.lower()) or (vocabulary and vocabulary in shape):
        return "output head"
    return None


def _is_router(parts: Sequence[str], shape: Sequence[int]) -> bool:
    """A router has few outputs; what is called a gate may also be a layer like any other."""
    return "router" in parts or (len(shape) == 2 and EXPERTS_RATIO * min(shape) <= max(shape))


def unpruned(tensors: Mapping[str, TensorInfo], folder: Path) -> dict[str, str]:
    """Tensors that are not to be pruned unless that is asked for, and what they are."""
    words = vocabulary(folder)
    kinds = {name: layer_kind(name, info.shape, words) for name, info in tensors.items()}
    return {name: kind for name, kind in kinds.items() if kind is not None}


def vocabulary(folder: Path) -> int | None:
    """`vocab_size` of the model's config, unless layers may have the same size by chance.

    >>> Path("gpt").mkdir(exist_ok=True)
    >>> written = Path("gpt/config.json").write_text('{"vocab_size": 1000, "n_embd": 64}')
    >>> vocabulary(Path("gpt"))
    1000
    """
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    found = dict(_sizes(config))
    words = found.pop("vocab_size", None)
    if words is None or words < 2:
        return None
    # Queries, keys and values are 3 times as wide as the model, other layers 2 or 4 times.
    wide = {size * times for size in found.values() for times in MERGED}
    return None if words in wide else words


def _sizes(config: Any) -> list[tuple[str, int]]:
    """Whole numbers of a config, and of the config of its text model."""
    if not isinstance(config, dict):
        return []
    own = [(key, value) for key, value in config.items() if type(value) is int]
    return [*_sizes(config.get("text_config")), *own]


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


def common_group(patterns: Iterable[Pattern]) -> int:
    """How many neighbours N:M patterns look at together."""
    return math.lcm(*(pattern.m for pattern in patterns))


def uneven(info: TensorInfo, axis: int, group: int, what: str = "") -> str | None:
    """Why groups of neighbours along an axis do not fit a tensor, if they do not."""
    if not -len(info.shape) <= axis < len(info.shape):
        return f"no axis {axis} in shape {list(info.shape)}"
    if info.shape[axis] % group:
        what = what or f"weights along axis {axis}"
        return f"{info.shape[axis]} {what}, not a multiple of {group}"
    return None


def transformer_notes(tensors: Iterable[TensorInfo], *, scope: bool) -> tuple[str, ...]:
    """How the directory of a transformer would be packed, if these nested tensors are of one.

    A file's defaults stay what they were: the same command gives the same bytes. And only a
    directory has the config that tells an output head whatever it is called.

    Args:
        tensors: The nested tensors of what is not a model directory.
        scope: Whether the directory's would be another scope.
    """
    kinds = {info.name: layer_kind(info.name, info.shape) for info in tensors}
    spared = [name for name, kind in kinds.items() if kind is not None]
    if "embedding" not in kinds.values():
        return ()
    few = ", ".join(map(repr, spared[:3])) + (", …" if len(spared) > 3 else "")
    return (
        f"the model directory of this transformer would get{' --scope uniform, and' * scope} no "
        f"levels in {len(spared)} of these tensors ({few}); --exclude GLOB leaves tensors out",
    )


def empty_layers(
    kept: Mapping[str, Sequence[int]],
    sizes: Mapping[str, int],
    levels: Sequence[str],
    *,
    advice: str = "",
) -> tuple[str, ...]:
    """Which tensors a level leaves next to nothing of: it may be no network any more.

    >>> empty_layers({"wide": [10], "deep": [0]}, {"wide": 50, "deep": 50}, ["90%"])
    ("level 90% keeps no weight of 1 of 2 tensors ('deep')",)

    Args:
        kept: How many weights each level keeps of every nested tensor.
        sizes: How many weights the tensors have.
        levels: The names of the levels.
        advice: What follows each note.
    """
    notes = []
    total = sum(sizes[name] for name in kept)
    for t, level in enumerate(levels):
        mean = sum(counts[t] for counts in kept.values())
        filled = [name for name in kept if sizes[name]]
        empty = [name for name in filled if not kept[name][t]]
        # As whole numbers: kept / size < mean / total / THIN.
        thin = [n for n in filled if 0 < kept[n][t] * total * THIN < mean * sizes[n]]
        for names, what in ((empty, "keeps no weight"), (thin, "keeps less than a tenth as much")):
            if names:
                notes.append(
                    f"level {level} {what} of {len(names)} of {len(filled)} tensors "
                    f"({names[0]!r}{', …' if len(names) > 1 else ''}){advice}"
                )
    return tuple(notes)
