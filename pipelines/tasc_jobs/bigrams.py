"""Word bigrams of a text and how they are distributed: the paper's measure of a task's variability.

Tsur et al. 2026, "Task-Centric Acceleration of Small-Language Models" (arXiv 2602.24174), section
3.1 and Table 1. Words are what stands between white space. All rows of a split are taken as one
running text, so a bigram may reach from one row into the next; counted so, two of the paper's data
sets give its figures to every digit printed. Pure functions; they know no file, no Redis, no Ray.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise


@dataclass(frozen=True)
class BigramCounts:
    """How often each pair of neighbouring words occurs, and how many words there are."""

    pairs: Mapping[tuple[str, str], int]
    words: int


@dataclass(frozen=True)
class Statistics:
    """One side (inputs or outputs) of a corpus, as in the paper's Table 1.

    ``bigrams_for_80_percent``: the least number of unique bigrams, most frequent first, that make
    up 80 % of all bigrams.
    """

    rows: int
    words: int
    bigrams: int
    unique_bigrams: int
    bigram_entropy_bits: float
    bigrams_for_80_percent: int


class BigramTotal:
    """A running sum of counts; the sum does not depend on their order."""

    def __init__(self) -> None:
        self._pairs: Counter[tuple[str, str]] = Counter()
        self._words = 0

    def add(self, counts: BigramCounts) -> None:
        self._pairs.update(counts.pairs)
        self.add_words(counts.words)

    def add_pair(self, pair: tuple[str, str], count: int) -> None:
        self._pairs[pair] += count

    def add_words(self, count: int) -> None:
        self._words += count

    def counts(self) -> BigramCounts:
        """The sum so far; later additions do not reach it."""
        return BigramCounts(dict(self._pairs), self._words)


def last_word(text: str) -> str | None:
    """The last word, None if there is none."""
    words = text.rsplit(maxsplit=1)
    return words[-1] if words else None


def count_bigrams(texts: Iterable[str], previous_word: str | None) -> BigramCounts:
    """Count the words of the concatenated texts and the bigrams that end in one of them.

    Args:
        texts: Consecutive rows of one side of a corpus.
        previous_word: The last word before them, None at the corpus's beginning. With it, the
            counts of consecutive parts add up to those of the whole, however it is cut.
    """
    pairs: Counter[tuple[str, str]] = Counter()
    words = 0
    for text in texts:
        found = text.split()
        if not found:
            continue
        if previous_word is not None:
            pairs[previous_word, found[0]] += 1
        pairs.update(pairwise(found))
        words += len(found)
        previous_word = found[-1]
    return BigramCounts(pairs, words)


def merge(counts: Iterable[BigramCounts]) -> BigramCounts:
    """The sum of the counts of several parts."""
    total = BigramTotal()
    for each in counts:
        total.add(each)
    return total.counts()


def statistics(counts: BigramCounts, rows: int) -> Statistics:
    """Table 1's figures (Tsur et al. 2026, arXiv 2602.24174, section 3.1) from a side's counts."""
    frequent_first = sorted(counts.pairs.values(), reverse=True)
    return Statistics(
        rows=rows,
        words=counts.words,
        bigrams=sum(frequent_first),
        unique_bigrams=len(frequent_first),
        bigram_entropy_bits=_entropy_bits(frequent_first),
        bigrams_for_80_percent=_needed_for_80_percent(frequent_first),
    )


def _entropy_bits(frequencies: list[int]) -> float:
    total = sum(frequencies)
    # fsum: the same figure whatever order the counts came in.
    return math.fsum(n / total * math.log2(total / n) for n in frequencies)


def _needed_for_80_percent(frequent_first: list[int]) -> int:
    total = sum(frequent_first)
    # In integers, since 0.8 * total is not exact.
    return sum(5 * before < 4 * total for before in accumulate(frequent_first, initial=0))
