"""The chi-square test of the tests of random numbers."""

import math

import numpy as np
from numpy.typing import NDArray


def excess(counts: NDArray[np.int64]) -> float:
    """How far counts are from equal cells, in standard deviations of the chi-square distribution."""
    expected = counts.sum() / counts.size
    freedom = counts.size - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom))
