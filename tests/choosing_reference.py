"""How a token is chosen at one place, plainly: sorts everything, shares nothing with the engine."""

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
    """``float64[V]`` what each token is drawn by, 1 for the only one; None if there is no token."""
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
    """The token behind a prompt and an answer by a random number; -1 for none."""
    weights = reference_weights(logits, sampling, prompt, answer, allowed)
    if weights is None:
        return -1
    running = np.cumsum(weights)
    behind = np.flatnonzero((running > number * running[-1]) & (weights > 0))
    return int(behind[0] if len(behind) else np.flatnonzero(weights)[-1])
