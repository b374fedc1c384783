"""Sampling parameters, token counts and allowed tokens of all rows, as arrays for compiled code.

Penalties: Keskar et al. 2019 (arXiv 1909.05858) for repetition; presence and frequency as in
OpenAI's API. Terms are always added in the same order, so that equal logits stay equal.
"""

from collections import namedtuple
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tasc_engine.config import MAX_NODES
from tasc_engine.kernels import IN_PROMPT, MAX_LOGIT
from tasc_engine.kernels.cpu.compiling import borrowing
from tasc_engine.layout import Int32, Int64
from tasc_protocol.sampling import MOST_BIASES, PARAMETERS


@dataclass(frozen=True)
class Allowed:
    """Masks of allowed tokens, and the mask of each place.

    Attributes:
        masks: ``uint32[K, ceil(V / 32)]``; bit b of word w is token ``32 * w + b``.
        mask_of: ``int32[M]`` index of each place's mask; -1 if every token is allowed.
        only: ``int32[M]`` the only allowed token of a place that therefore has no logits; -1 at
            places that have logits. None if all places have logits.
    """

    masks: NDArray[np.uint32]
    mask_of: NDArray[np.int32]
    only: NDArray[np.int32] | None = None

    def at(self, places: NDArray[np.int32]) -> "Allowed":
        """Returns the masks of some of the places."""
        only = None if self.only is None else self.only[places]
        return Allowed(self.masks, self.mask_of[places], only)

    @property
    def known(self) -> NDArray[np.bool_] | None:
        """``bool[M]`` whether a place has no logits; None if all places have logits."""
        return None if self.only is None else self.only >= 0


Float64 = NDArray[np.float64]

# The parameters of all rows, ``float64[rows]`` or ``int64[rows]`` each.
Columns: Any = namedtuple("Columns", PARAMETERS)  # type: ignore[misc]
AHEAD = MAX_NODES + 1  # maximum places of a row in one step


class Rules(NamedTuple):
    """Sampling parameters and state, by row.

    Attributes:
        parameters: `Columns` with the parameters of `Sampling`.
        plain: ``bool[rows]`` whether the token with the target's greatest logit is taken.
        penalises: ``bool[rows]`` whether a penalty applies.
        answered: ``int64[rows]`` tokens of the answer so far.
        numbers: ``float64[rows, 2 * AHEAD]`` random numbers of the positions from ``first`` on.
        first: ``int64[rows]`` the first position with a random number in ``numbers``.
        bias_ids: ``int32[rows, MOST_BIASES]`` distinct tokens; only a row's first ``biases`` count.
        bias_values: ``float64[rows, MOST_BIASES]``.
        biases: ``int32[rows]``.
        held: ``int32[rows, V]`` how often a token is in the answer, and ``IN_PROMPT``.
        held_ids: ``int32[rows, *]`` tokens in prompt or answer; a row's first ``distinct`` count.
        distinct: ``int32[rows]``.
    """

    plain: NDArray[np.bool_]
    parameters: Any
    penalises: NDArray[np.bool_]
    answered: Int64
    numbers: Float64
    first: Int64
    bias_ids: Int32
    bias_values: Float64
    biases: Int32
    held: Int32
    held_ids: Int32
    distinct: Int32


def rules_of(rows: int, capacity: int, vocab_size: int) -> Rules:
    """Creates rules for rows that all decode plainly.

    Large arrays contain zeros, and take no memory until they are written.
    """
    columns = {
        each.name: np.full(rows, each.default, np.int64 if each.is_integer else np.float64)
        for each in PARAMETERS.values()
    }
    return Rules(
        plain=np.ones(rows, bool),
        parameters=Columns(**columns),
        penalises=np.zeros(rows, bool),
        answered=np.zeros(rows, np.int64),
        numbers=np.zeros((rows, 2 * AHEAD)),
        first=np.zeros(rows, np.int64),
        bias_ids=np.zeros((rows, MOST_BIASES), np.int32),
        bias_values=np.zeros((rows, MOST_BIASES)),
        biases=np.zeros(rows, np.int32),
        held=np.zeros((rows, vocab_size), np.int32),
        held_ids=np.zeros((rows, min(capacity + AHEAD, vocab_size)), np.int32),
        distinct=np.zeros(rows, np.int32),
    )


def make_plain(rules: Rules, row: int) -> None:
    """Gives a row the plain rule, and forgets how many tokens its answer has."""
    for name, parameter in PARAMETERS.items():
        getattr(rules.parameters, name)[row] = parameter.default
    rules.plain[row], rules.penalises[row] = True, False
    rules.answered[row] = rules.first[row] = rules.biases[row] = 0


@borrowing
def hold_prompt(rules: Any, row: int, prompt: Any) -> None:
    """Adds ``int32[*]`` tokens of a row's prompt."""
    for token in prompt:
        _know(rules, row, token)
        rules.held[row, token] |= IN_PROMPT


@borrowing
def hold_answer(rules: Any, row: int, tokens: Any) -> None:
    """Adds ``int32[*]`` tokens of a row's answer."""
    for token in tokens:
        hold(rules, row, token)


@borrowing
def hold(rules: Any, row: int, token: int) -> None:
    """Adds a token of a row's answer."""
    _know(rules, row, token)
    rules.held[row, token] += 1


@borrowing
def release(rules: Any, row: int) -> None:
    """Removes a row's tokens."""
    for j in range(rules.distinct[row]):
        rules.held[row, rules.held_ids[row, j]] = 0
    rules.distinct[row] = 0


@borrowing
def _know(rules: Any, row: int, token: int) -> None:
    if rules.held[row, token] == 0:
        rules.held_ids[row, rules.distinct[row]] = token
        rules.distinct[row] += 1


@borrowing
def list_paths(trees: Any, rules: Any, rows: Any, ends: Any, tokens: Any, held: Any) -> int:
    """Lists the distinct draft tokens on the path to each place, including its own, for penalties.

    Args:
        trees: The `Trees` of ``rows``; the paths of rows without penalties are left out.
        ends: ``int64[M + 1]``, written; where the tokens of each place end, after a 0.
        tokens, held: ``int32[*]``, written; the tokens, and their ``rules.held`` if the path was in
            the answer. They need room for the sum of all depths.

    Returns:
        The number of tokens.
    """
    n, place = 0, 0
    ends[0] = 0
    for i in range(len(rows)):
        row, begin = rows[i], trees.offsets[i]
        for x in range(begin - 1, trees.offsets[i + 1]):
            node, first = x - begin, n
            while node >= 0 and rules.penalises[row]:
                token, at = trees.tokens[begin + node], first
                while at < n and tokens[at] != token:
                    at += 1
                if at == n:
                    tokens[n], held[n] = token, rules.held[row, token]
                    n += 1
                held[at] += 1
                node = trees.parents[begin + node]
            place += 1
            ends[place] = n
    return n


@borrowing
def biased(rules: Any, row: int, j: int, logit: float) -> float:
    """Adds the row's j-th bias to a logit."""
    return min(logit + rules.bias_values[row, j], MAX_LOGIT)


@borrowing
def penalised(rules: Any, row: int, token: int, logit: float) -> float:
    """Applies the penalties for a held token to a logit."""
    parameters, count = rules.parameters, rules.held[row, token] & ~IN_PROMPT
    factor = parameters.repetition_penalty[row]
    logit = min(logit / factor if logit > 0 else logit * factor, MAX_LOGIT)
    if count:
        logit -= parameters.presence_penalty[row]
        logit -= parameters.frequency_penalty[row] * count
    return logit
