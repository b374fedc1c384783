"""How even a distribution of tokens is: Renyi's entropy of order 2. It knows no text."""

import numpy as np
from numpy.typing import ArrayLike


def renyi2_bits(counts: ArrayLike) -> float:
    """Of how often each token occurs, in bits: the logarithm of one by the chance that two tokens
    drawn at random are the same. 0 where there are none.
    """
    found = np.asarray(counts, np.float64)
    total = found.sum()
    return float(2 * np.log2(total) - np.log2(np.square(found).sum())) if total else 0.0
