"""Embedding cases: what each rounding rule makes of a word and a counter."""

from typing import Any

from spec import plain_elsa as plain
from spec.cases.collection import ids


def embed_cases() -> dict[str, Any]:
    """Words and counters with what each rounding rule makes of them."""
    groups = []
    for dtype in ("F32", "BF16", "F16", "F64"):
        sign, inf, mantissa = plain.sign_bit(dtype), plain.infinity(dtype), plain.MANTISSA[dtype]
        digits = plain.WIDTH[dtype] // 4
        normal = 1 << mantissa
        one = inf // 2 // normal * normal
        for tau in range(1, min(8, mantissa) + 1):
            step, half = 1 << tau, 1 << (tau - 1)
            pairs = [
                (0, 0),
                (sign, 0),
                (1, 0),
                (step - 1, 0),
                (sign | normal, step - 1),
                (one, half),
                (sign | one - 1, 0),
                (one + half - 1, step - 1),
                (sign | one + half, 0),
                (normal - 1, 1),
                (inf - 1, 0),
                (sign | inf - 1, 1),
                (inf - half - 1, step - 1),
            ]
            rows = []
            for word, c in dict.fromkeys(pairs):
                words = [plain.embed(word, c, dtype, tau, how) for how in ("nearest", "overwrite")]
                rows.append([f"{word:0{digits}x}", c, *(f"{w:0{digits}x}" for w in words)])
            groups.append({"dtype": dtype, "tau": tau, "cases": rows})
    refused = []
    for dtype in ("F32", "BF16", "F16", "F64"):
        sign, inf = plain.sign_bit(dtype), plain.infinity(dtype)
        digits = plain.WIDTH[dtype] // 4
        rejects = [(inf, 2, 1), (sign | inf, 2, 0), (inf | 1, 2, 0), (0, 2, 1), (sign, 2, 3)]
        rejects.append((inf // 2, 2, 4))
        if plain.MANTISSA[dtype] < 8:
            rejects.append((inf // 2, 8, 1))
        for word, tau, c in rejects:
            error = ""
            try:
                plain.embed(word, c, dtype, tau, "nearest")
            except plain.Bad as bad:
                error = bad.error
            refused.append([dtype, tau, f"{word:0{digits}x}", c, error])
    return {
        "description": "Embedding (elsa-1.0.md §4.3): words in hex, most significant digit first.",
        "requirements": ids("37 38 39 40"),
        "columns": ["input", "counter", "nearest", "overwrite"],
        "groups": groups,
        "refused_columns": ["dtype", "tau", "input", "counter", "error"],
        "refused": refused,
    }
