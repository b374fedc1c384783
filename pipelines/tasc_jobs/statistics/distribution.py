"""How peaked a distribution of n-grams is: the paper's measures of a task's variability.

Tsur et al. 2026, "Task-Centric Acceleration of Small-Language Models" (arXiv 2602.24174), section
3.1, Table 1, and appendices D and E. Pure functions of frequencies; they know no n-gram.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

CURVE_POINTS = 64


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


def distribution(frequencies: Iterable[int], n: int, vocabulary: int | None = None) -> Distribution:
    """The figures of how often each n-gram occurs, in any order.

    Args:
        frequencies: One of each different n-gram, 1 or more.
        vocabulary: |V|; the number of different n-grams if None.
    """
    frequent_first = sorted(frequencies, reverse=True)
    shannon = _shannon_bits(frequent_first)
    size = len(frequent_first) if vocabulary is None else vocabulary
    return Distribution(
        n=n,
        ngrams=sum(frequent_first),
        unique_ngrams=len(frequent_first),
        vocabulary=size,
        shannon_bits=shannon,
        renyi2_bits=renyi2_bits(frequent_first),
        normalised_entropy=min(shannon / math.log2(size), 1.0) if size > 1 else 0.0,
        typical_set_size=2**shannon if frequent_first else 0.0,
        ngrams_for_80_percent=_needed_for_80_percent(frequent_first),
        curve=_curve(frequent_first),
    )


def _shannon_bits(frequencies: list[int]) -> float:
    total = sum(frequencies)
    # fsum: the same figure whatever order the counts came in.
    return math.fsum(n / total * math.log2(total / n) for n in frequencies)


def renyi2_bits(frequencies: Sequence[int]) -> float:
    """H2 of how often each n-gram occurs; 0 where there is none."""
    # In integers up to the last step, for the same reason.
    squares = sum(n * n for n in frequencies)
    return math.log2(sum(frequencies) ** 2 / squares) if squares else 0.0


def _needed_for_80_percent(frequent_first: list[int]) -> int:
    total = sum(frequent_first)
    # In integers, since 0.8 * total is not exact.
    return sum(5 * before < 4 * total for before in accumulate(frequent_first, initial=0))


def _curve(frequent_first: list[int]) -> tuple[CurvePoint, ...]:
    last = len(frequent_first)
    ranks = {round(last ** (step / (CURVE_POINTS - 1))) for step in range(CURVE_POINTS)}
    covered = list(accumulate(frequent_first))
    return tuple(
        CurvePoint(rank, frequent_first[rank - 1], covered[rank - 1] / covered[-1])
        for rank in sorted(ranks)
        if 0 < rank <= last
    )
