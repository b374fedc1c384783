"""The paper's measures of a task's variability: how peaked its distribution of n-grams is.

Tsur et al. 2026, "Task-Centric Acceleration of Small-Language Models" (arXiv 2602.24174), section
3.1, Table 1, and appendices D and E. Pure functions of the histogram of n-gram counts.
"""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeAlias

CURVE_POINTS = 64
_Groups: TypeAlias = Sequence[tuple[int, int]]
"""Pairs of a count and the number of different n-grams with that count."""


@dataclass(frozen=True)
class CurvePoint:
    """The n-gram of ``rank`` (1: the most frequent) occurs ``count`` times; ranks up to this one
    make up the share ``coverage`` of all n-grams."""

    rank: int
    count: int
    coverage: float


@dataclass(frozen=True)
class Distribution:
    """Figures of an empirical distribution p of n-grams; 0 if there are no n-grams.

    Attributes:
        n: Number of words or tokens of an n-gram.
        ngrams: Number of n-grams, with repetitions.
        unique_ngrams: Number of different n-grams.
        vocabulary: |V|: for tokens, the size of the tokenizer's vocabulary; for words, the number
            of different n-grams.
        shannon_bits: H, the sum of ``-p log2 p``.
        renyi2_bits: H2, ``-log2`` of the sum of ``p * p`` (appendix E).
        normalised_entropy: ``H / log2 |V|``, 0 to 1 (appendix D).
        typical_set_size: ``2 ** H``, the size of the set of typical n-grams by equation (2) of
            section 3.1, which uses ``e`` and H in nats.
        ngrams_for_80_percent: The smallest number of different n-grams that make up 80 % of all
            (Table 1).
        curve: Points at ranks that grow by a constant factor, with the first and the last rank.
    """

    n: int
    ngrams: int
    unique_ngrams: int
    vocabulary: int
    shannon_bits: float
    renyi2_bits: float
    normalised_entropy: float
    typical_set_size: float
    ngrams_for_80_percent: int
    curve: tuple[CurvePoint, ...]


def distribution(
    frequencies: Mapping[int, int], n: int, vocabulary: int | None = None
) -> Distribution:
    """Returns the figures of a distribution of n-grams.

    Args:
        frequencies: Number of different n-grams by their count, which is 1 or more.
        vocabulary: |V|; the number of different n-grams if None.
    """
    frequent_first = sorted(frequencies.items(), reverse=True)
    ngrams, unique = _ngrams(frequencies), sum(frequencies.values())
    shannon = _shannon_bits(frequencies)
    size = unique if vocabulary is None else vocabulary
    return Distribution(
        n=n,
        ngrams=ngrams,
        unique_ngrams=unique,
        vocabulary=size,
        shannon_bits=shannon,
        renyi2_bits=_renyi2_bits(frequencies),
        normalised_entropy=min(shannon / math.log2(size), 1.0) if size > 1 else 0.0,
        typical_set_size=2**shannon if unique else 0.0,
        ngrams_for_80_percent=_needed_for_80_percent(frequent_first),
        curve=_curve(frequent_first),
    )


def renyi2_bits(frequencies: Iterable[int]) -> float:
    """Returns H2 of the counts of all different n-grams; 0 if there are none."""
    return _renyi2_bits(Counter(frequencies))


def _ngrams(frequencies: Mapping[int, int]) -> int:
    return sum(often * unique for often, unique in frequencies.items())


def _shannon_bits(frequencies: Mapping[int, int]) -> float:
    total = _ngrams(frequencies)
    # fsum makes the result independent of the order of the counts.
    return math.fsum(
        unique * (often / total * math.log2(total / often)) for often, unique in frequencies.items()
    )


def _renyi2_bits(frequencies: Mapping[int, int]) -> float:
    # Integers up to the last step make the result independent of the order of the counts.
    squares = sum(often * often * unique for often, unique in frequencies.items())
    return math.log2(_ngrams(frequencies) ** 2 / squares) if squares else 0.0


def _needed_for_80_percent(frequent_first: _Groups) -> int:
    # Integers, since 0.8 * total is not exact: `missing` counts fifths of an n-gram.
    missing = 4 * sum(often * unique for often, unique in frequent_first)
    needed = 0
    for often, unique in frequent_first:
        taken = min(unique, -(-missing // (5 * often)))
        needed += taken
        missing = max(missing - 5 * often * taken, 0)
    return needed


def _curve(frequent_first: _Groups) -> tuple[CurvePoint, ...]:
    last_ranks = list(accumulate(unique for _, unique in frequent_first))
    covered = list(accumulate(often * unique for often, unique in frequent_first))
    last = last_ranks[-1] if last_ranks else 0
    ranks = {round(last ** (step / (CURVE_POINTS - 1))) for step in range(CURVE_POINTS)}

    def point(rank: int) -> CurvePoint:
        group = bisect_left(last_ranks, rank)
        often = frequent_first[group][0]
        down_to_it = covered[group] - often * (last_ranks[group] - rank)
        return CurvePoint(rank, often, down_to_it / covered[-1])

    return tuple(point(rank) for rank in sorted(ranks) if 0 < rank <= last)
