"""The one number by which tables and plots tell how good a network is."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Measure:
    """A metric, and how it is shown.

    >>> ACCURACY.show(0.98765), LOSS.show(1.81449)
    ('98.77', '1.814')
    >>> LOSS.better(1.8, 2.3), ACCURACY.better(0.9, 0.9)
    (True, False)
    """

    metric: str
    axis: str
    scale: float
    digits: int
    higher: bool
    """Whether more of it is better."""
    unit: str = ""
    also: tuple[str, ...] = ()
    """Other names for the same, of `of_language`, that tables have too."""

    def show(self, value: float) -> str:
        """Write a value, or a difference of two."""
        return f"{self.scale * value:.{self.digits}f}"

    def better(self, one: float, other: float) -> bool:
        """Tell whether one value is better than another, not as good."""
        return one > other if self.higher else one < other


ACCURACY = Measure("accuracy", "accuracy, %", 100, 2, higher=True)
LOSS = Measure(
    "loss",
    "loss, nats per byte",
    1,
    3,
    higher=False,
    unit=", nats",
    also=("bits_per_byte", "perplexity"),
)


def of_language(loss: float) -> dict[str, float]:
    """Return what is told of a language model whose loss is in nats for each byte.

    >>> of_language(math.log(2))
    {'bits_per_byte': 1.0, 'loss': 0.6931471805599453, 'perplexity': 2.0}
    """
    # A file holds finite numbers only; a perplexity that large says no more than its loss.
    perplexity = math.exp(min(loss, 709.0))
    return {"bits_per_byte": loss / math.log(2), "loss": loss, "perplexity": perplexity}
