"""What the tensors of a model are for, told from their names and shapes alone.

Pruning weights that are looked up, or that decide for many others, costs more than it saves. Names
are those that PyTorch, Hugging Face, timm and flax give; `vocabulary` is `vocab_size` of a model's
config, which tells embeddings and heads whatever they are called.
"""

import math
import re
from collections.abc import Sequence

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
FEW = 8
"""A gate is a router if it has this many times as many inputs as outputs, the experts."""


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
    return "router" in parts or (len(shape) == 2 and FEW * min(shape) <= max(shape))
