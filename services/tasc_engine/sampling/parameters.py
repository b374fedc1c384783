"""The random numbers of a request's sampling, and the log-probabilities of its tokens."""

from dataclasses import dataclass

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


@dataclass(frozen=True)
class TokenLogprob:
    """The log-probability of an answer's token in the target's logits, before any rule or guide.

    Attributes:
        logprob: Natural logarithm of its probability.
        top: The most likely tokens of its position, most likely first: ids and log-probabilities.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
