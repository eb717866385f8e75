"""Batch-norm statistics of many batches, from those of each."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


def total_statistics(batches: Sequence[Mapping[str, NDArray[Any]]]) -> dict[str, NDArray[Any]]:
    """Combine mean and variance of equally large batches: the law of total variance.

    >>> one = {"norm/mean": np.array([1.0]), "norm/var": np.array([4.0])}
    >>> two = {"norm/mean": np.array([3.0]), "norm/var": np.array([2.0])}
    >>> {name: value.tolist() for name, value in total_statistics([one, two]).items()}
    {'norm/mean': [2.0], 'norm/var': [4.0]}
    """
    result = {}
    for name in batches[0]:
        if name.endswith("mean"):
            base = name.removesuffix("mean")
            means = np.stack([b[name] for b in batches]).astype(np.float64)
            variances = np.stack([b[f"{base}var"] for b in batches]).astype(np.float64)
            result[name] = means.mean(0).astype(np.float32)
            result[f"{base}var"] = (variances.mean(0) + means.var(0)).astype(np.float32)
    return result
