"""A corpus's figures from their definitions: all n-grams in one list, and no shortcut."""

import math
from collections import Counter
from fractions import Fraction

from tasc_jobs.statistics.ngrams import PERCENTILES


def word_ngrams(texts, n):
    words = " ".join(texts).split()
    return [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]


def figures(ngrams, vocabulary=None):
    """By names as in ``Distribution``, without n and curve."""
    frequencies = sorted(Counter(ngrams).values(), reverse=True)
    total, size = len(ngrams), len(set(ngrams)) if vocabulary is None else vocabulary
    chances = [Fraction(f, total) for f in frequencies]
    shannon = -sum(p * math.log2(p) for p in chances)
    return {
        "ngrams": total,
        "unique_ngrams": len(frequencies),
        "vocabulary": size,
        "shannon_bits": shannon,
        "renyi2_bits": -math.log2(sum(p * p for p in chances)) if chances else 0,
        "normalised_entropy": shannon / math.log2(size) if size > 1 else 0,
        "typical_set_size": 2**shannon if chances else 0,
        "ngrams_for_80_percent": covering(chances, Fraction(4, 5)),
    }


def covering(chances, share):
    return next((k for k in range(len(chances) + 1) if sum(chances[:k]) >= share), 0)


def percentiles(lengths):
    """Nearest rank: the smallest length that so many per cent of the rows do not exceed."""
    rising = sorted(lengths)
    return {str(p): rising[max(-(-p * len(rising) // 100), 1) - 1] for p in PERCENTILES}
