"""How peaked a distribution of n-grams is: the paper's measures of a task's variability.

Tsur et al. 2026, "Task-Centric Acceleration of Small-Language Models" (arXiv 2602.24174), section
3.1, Table 1, and appendices D and E. Pure functions of how many n-grams occur how often.
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
"""How often, and how many n-grams occur so often."""


@dataclass(frozen=True)
class CurvePoint:
    """The n-gram at ``rank`` (the most frequent has 1) occurs ``count`` times; all down to it are
    the share ``coverage`` of all n-grams."""

    rank: int
    count: int
    coverage: float


@dataclass(frozen=True)
class Distribution:
    """Figures of an empirical distribution p of n-grams; all are 0 where there is none.

    Attributes:
        n: Words or tokens of an n-gram.
        ngrams: How many n-grams there are.
        unique_ngrams: How many different ones.
        vocabulary: |V|: of single tokens, how many the tokenizer has; of words, the different
            n-grams.
        shannon_bits: H, the sum of ``-p log2 p``.
        renyi2_bits: H2, ``-log2`` of the sum of ``p * p`` (appendix E).
        normalised_entropy: ``H / log2 |V|``, 0 to 1 (appendix D).
        typical_set_size: ``2 ** H``: the size section 3.1's equation (2) gives the set of typical
            n-grams, its exponential being of H in nats.
        ngrams_for_80_percent: The least number of different n-grams, most frequent first, that
            make up 80 % of all (Table 1).
        curve: Points at ranks that grow by a constant factor, first and last rank among them.
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
    """The figures of how often n-grams occur.

    Args:
        frequencies: How many different n-grams occur so often each, by how often, 1 or more.
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
    """H2 of the frequency of each different n-gram; 0 where there is none."""
    return _renyi2_bits(Counter(frequencies))


def _ngrams(frequencies: Mapping[int, int]) -> int:
    return sum(often * unique for often, unique in frequencies.items())


def _shannon_bits(frequencies: Mapping[int, int]) -> float:
    total = _ngrams(frequencies)
    # fsum: the same figure whatever order the counts came in.
    return math.fsum(
        unique * (often / total * math.log2(total / often)) for often, unique in frequencies.items()
    )


def _renyi2_bits(frequencies: Mapping[int, int]) -> float:
    # In integers up to the last step, for the same reason.
    squares = sum(often * often * unique for often, unique in frequencies.items())
    return math.log2(_ngrams(frequencies) ** 2 / squares) if squares else 0.0


def _needed_for_80_percent(frequent_first: _Groups) -> int:
    # In integers, since 0.8 * total is not exact: fifths of an n-gram that are missing.
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
