"""The random numbers of a request's sampling."""

import numpy as np
from numpy.typing import NDArray

from tasc_protocol import Sampling

_BLOCK = 4  # numbers that Philox generates per counter value


def uniforms(sampling: Sampling, begin: int, n: int) -> NDArray[np.float64]:
    """Returns ``float64[n]`` random numbers in [0, 1) for output positions from ``begin`` on.

    They depend only on seed, prompt, choice and position: a counter-based generator (Philox; Salmon
    et al. 2011) has no state that drafts or other requests could change.
    """
    key = np.array([sampling.seed, sampling.prompt << 32 | sampling.choice], np.uint64)
    stream = np.random.Philox(key=key)
    block, skip = divmod(begin, _BLOCK)
    stream.advance(block)
    raw = stream.random_raw(skip + n)[skip:]
    return (raw >> np.uint64(11)).astype(np.float64) * 2.0**-53
