"""Precision and recall of labels by how sure the model was of each. It asks no model.

A label's confidence is the product of the probabilities of its tokens.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from tasc_jobs.evaluate.quality import SEPARATOR, LabelQuality, label_counts, labels, micro

LEVELS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)

Piece = tuple[bytes, float]
"""What a token adds to a text, and the logarithm of its probability."""


@dataclass(frozen=True)
class AtLevel:
    """Quality of the labels whose confidence is ``level`` or more."""

    level: float
    quality: LabelQuality


def confident_labels(pieces: Sequence[Piece]) -> dict[str, float]:
    """Confidence of each label of an answer; of one that is said twice, the greater."""
    ends = list(accumulate(len(text) for text, _ in pieces))
    found: dict[str, float] = {}
    begin = 0
    separator = SEPARATOR.encode()
    for part in b"".join(text for text, _ in pieces).split(separator):
        end = begin + len(part)
        own = (
            log
            for (text, log), stop in zip(pieces, ends, strict=True)
            if stop > begin and stop - len(text) < end
        )
        sure = math.exp(sum(own))
        for label in labels(part.decode(errors="replace")):
            found[label] = max(sure, found.get(label, 0.0))
        begin = end + len(separator)
    return found


def precision_recall(
    answers: Sequence[dict[str, float]], expected: Sequence[str]
) -> tuple[AtLevel, ...]:
    """Of answers given as labels with confidences, at every level."""
    wanted = label_counts(expected)
    return tuple(
        AtLevel(
            level,
            micro([Counter(n for n, sure in a.items() if sure >= level) for a in answers], wanted),
        )
        for level in LEVELS
    )
