"""What a level is worth: a number, which way is better, and how sure it is."""

from dataclasses import dataclass

BETTER = {
    **dict.fromkeys(("accuracy", "agreement", "bleu", "cosine", "f1", "top5"), "higher"),
    **dict.fromkeys(
        (
            "bits_per_byte",
            "error",
            "loss",
            "mae",
            "mse",
            "perplexity",
            "relative_error",
            "rmse",
            "wer",
        ),
        "lower",
    ),
}
"""The direction of metrics that everybody knows."""


@dataclass(frozen=True)
class Metric:
    """One metric of one level.

    >>> Metric(0.93, "higher", samples=1000, error=0.008).value
    0.93
    """

    value: float
    better: str
    """"higher" or "lower"."""
    samples: int | None = None
    """How many samples it was measured on."""
    error: float | None = None
    """Its standard error."""
