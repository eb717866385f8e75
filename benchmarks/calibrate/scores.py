"""What a network scores on test data, item by item, and how sure a difference is."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Measure:
    """What is scored, and how that is shown."""

    title: str
    unit: float
    digits: int

    def show(self, value: float) -> str:
        """The value as the tables have it."""
        return f"{value * self.unit:.{self.digits}f}"


@dataclass(frozen=True)
class Scores:
    """A value for each item of the test data, and what it counts."""

    values: NDArray[np.float64]
    sizes: NDArray[np.float64]

    @property
    def mean(self) -> float:
        """The values for each unit of size.

        >>> Scores(np.array([1.0, 4]), np.array([2.0, 8])).mean
        0.5
        """
        return float(self.values.sum() / self.sizes.sum())

    def error(self, other: "Scores | None" = None) -> float:
        """The standard error of the mean, or of how far it is from another's on the same items.

        >>> one = Scores(np.array([1.0, 0, 1, 0]), np.ones(4))
        >>> one.error(), one.error(one)
        (0.25, 0.0)
        """
        values = self.values if other is None else self.values - other.values
        rest = values - self.sizes * (values.sum() / self.sizes.sum())
        return float(np.sqrt(np.square(rest).sum()) / self.sizes.sum())


def of(values: object, sizes: object = None) -> Scores:
    """Scores of items that count the same, or as much as their sizes say."""
    found = np.asarray(values, np.float64)
    return Scores(found, np.ones_like(found) if sizes is None else np.asarray(sizes, np.float64))
