"""A simple reference for the choice of a token; it sorts everything and shares no engine code."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tasc_engine import Sampling


def reference_weights(
    logits: NDArray[np.floating],
    sampling: Sampling,
    prompt: Sequence[int],
    answer: Sequence[int],
    allowed: set[int] | None = None,
) -> NDArray[np.float64] | None:
    """Returns ``float64[V]``, the weight of each token; None if no token is possible.

    If only one token is possible, its weight is 1.
    """
    if not (logits < np.inf).all():
        return None
    x = logits.astype(np.float64)
    for token, bias in sampling.logit_bias:
        x[token] += bias
    for token in {*prompt, *answer}:
        factor = sampling.repetition_penalty
        x[token] = x[token] / factor if x[token] > 0 else x[token] * factor
        if count := list(answer).count(token):
            x[token] = x[token] - sampling.presence_penalty - sampling.frequency_penalty * count
    if allowed is not None:
        x[[token for token in range(len(x)) if token not in allowed]] = -np.inf
    if x.max() == -np.inf:
        return None
    order = sorted(range(len(x)), key=lambda token: (-x[token], token))
    if sampling.temperature == 0:
        return np.eye(len(x))[order[0]]
    weights = np.exp((x - x.max()) / sampling.temperature)
    order = [token for token in order if weights[token] >= sampling.min_p]
    order = order[: sampling.top_k or None]
    goal, running, kept = sampling.top_p * weights[order].sum(), 0.0, np.zeros(len(x))
    for token in order:
        if running < goal or sampling.top_p == 1:
            kept[token] = weights[token]
        running += weights[token]
    return kept


def reference_choice(
    logits: NDArray[np.floating],
    sampling: Sampling,
    prompt: Sequence[int],
    answer: Sequence[int],
    number: float,
    allowed: set[int] | None = None,
) -> int:
    """Returns the token after a prompt and an answer for a random number; -1 for none."""
    weights = reference_weights(logits, sampling, prompt, answer, allowed)
    if weights is None:
        return -1
    running = np.cumsum(weights)
    above = np.flatnonzero((running > number * running[-1]) & (weights > 0))
    return int(above[0] if len(above) else np.flatnonzero(weights)[-1])
