"""Tokens counted by row, and what biases and penalties make of logits: compiled.

Penalties: Keskar et al. 2019 (arXiv 1909.05858) for repetition; presence and frequency as in
OpenAI's API. Sums are taken in the order they are written in, so that equal logits stay equal.
"""

from typing import Any

import numpy as np

from tasc_engine.cpu.compiling import borrowing
from tasc_engine.cpu.rules import IN_PROMPT

MOST = float(np.finfo(np.float64).max)


@borrowing
def hold_prompt(rules: Any, row: int, prompt: Any) -> None:
    """Take in ``int32[*]`` tokens of a row's prompt."""
    for token in prompt:
        _know(rules, row, token)
        rules.held[row, token] |= IN_PROMPT


@borrowing
def hold_answer(rules: Any, row: int, tokens: Any) -> None:
    """Take in ``int32[*]`` tokens of a row's answer."""
    for token in tokens:
        hold(rules, row, token)


@borrowing
def hold(rules: Any, row: int, token: int) -> None:
    """Take in a token of a row's answer."""
    _know(rules, row, token)
    rules.held[row, token] += 1


@borrowing
def release(rules: Any, row: int) -> None:
    """Forget a row's tokens."""
    for j in range(rules.distinct[row]):
        rules.held[row, rules.seen[row, j]] = 0
    rules.distinct[row] = 0


@borrowing
def _know(rules: Any, row: int, token: int) -> None:
    if rules.held[row, token] == 0:
        rules.seen[row, rules.distinct[row]] = token
        rules.distinct[row] += 1


@borrowing
def list_paths(
    drafted: Any, parents: Any, offsets: Any, wanted: Any, places: Any, tokens: Any
) -> None:
    """The draft tokens that lead to each node, its own included, of the trees that are wanted.

    Args:
        drafted, parents, offsets: Of `Drafts`.
        wanted: ``bool[n]``.
        places, tokens: ``int64[*]``, as many as the sum of depths; written.
    """
    n = 0
    for i in range(len(wanted)):
        if wanted[i]:
            begin = offsets[i]
            for x in range(begin, offsets[i + 1]):
                node = x - begin
                while node >= 0:
                    places[n], tokens[n] = x + i + 1, drafted[begin + node]
                    node, n = parents[begin + node], n + 1


@borrowing
def biased(rules: Any, row: int, j: int, logit: float) -> float:
    """A logit with the row's j-th bias."""
    return min(logit + rules.bias_values[row, j], MOST)


@borrowing
def penalised(rules: Any, row: int, token: int, logit: float) -> float:
    """A logit with what is due for a token that is held."""
    factor, count = rules.repetition_penalty[row], rules.held[row, token] & ~IN_PROMPT
    logit = min(logit / factor if logit > 0 else logit * factor, MOST)
    if count:
        logit -= rules.presence_penalty[row]
        logit -= rules.frequency_penalty[row] * count
    return logit
