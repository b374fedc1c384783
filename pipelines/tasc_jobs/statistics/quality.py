"""The quality of answers by the usual measures of a kind of task, and by the model's confidence.

All shares are in [0, 1]. Answers and expected outputs are in the same order. A label's confidence
is the product of the probabilities of its tokens.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Literal, TypeVar

from tasc_jobs.errors import UsageError

SEPARATOR = "; "  # between labels
Metrics = Literal["massive", "tags", "labels", "exact", "text"]
T = TypeVar("T")

_INTENT = re.compile(r"^intent: (\w+), slot fills: \{(.*)\}$", re.DOTALL)
_SLOT = re.compile(r"(\w+): (.*?)(?=, \w+: |$)", re.DOTALL)
_WORD = re.compile(r"\w+")
_SHOWN = 100  # characters of a text in an error


@dataclass(frozen=True)
class IntentQuality:
    """Share of rows with the right intent, F1 of slots (name, value), share of fully right rows."""

    intent_accuracy: float
    slot_f1: float
    joint_accuracy: float


@dataclass(frozen=True)
class LabelQuality:
    """Precision, recall and F1 over the labels of all rows (micro average)."""

    precision: float
    recall: float
    f1: float


def quality(answers: Sequence[str], expected: Sequence[str], metrics: Metrics) -> dict[str, float]:
    """Returns the measures of a kind of task by name; exact match is always included.

    Raises:
        UsageError: An expected output cannot be judged by these measures.
    """
    return {"exact_match": exact_match(answers, expected), **_MEASURES[metrics](answers, expected)}


def require_judgeable(
    expected: Sequence[str], metrics: Metrics, rows: Sequence[str] | None = None
) -> None:
    """Raise UsageError if the metrics need an intent and a row's expected output has none.

    Otherwise any unreadable answer would count as right. The error names the row by its entry in
    ``rows``, or by its number if there are no such names.
    """
    if metrics != "massive":
        return
    names: Iterable[str | int] = rows or range(1, len(expected) + 1)
    for row, text in zip(names, expected, strict=True):
        if not _is_readable(text):
            raise UsageError(
                f"the expected output of row {row} is {text[:_SHOWN]!r}; --metrics massive needs "
                "'intent: NAME, slot fills: {NAME: VALUE, ...}'; choose other metrics"
            )


def intent_quality(answers: Sequence[str], expected: Sequence[str]) -> IntentQuality:
    """Returns the quality of MASSIVE answers.

    Slots are counted over all rows (micro F1); an unreadable answer has no slots.

    Raises:
        UsageError: An expected output is unreadable.
    """
    require_judgeable(expected, "massive")
    found = [_parse(a) for a in answers]
    right = [_parse(e) for e in expected]
    pairs = list(zip(found, right, strict=True))
    return IntentQuality(
        intent_accuracy=sum(f[0] == r[0] for f, r in pairs) / len(pairs),
        slot_f1=micro([f[1] for f in found], [r[1] for r in right]).f1,
        joint_accuracy=sum(f == r for f, r in pairs) / len(pairs),
    )


def tagging_accuracy(answers: Sequence[str], expected: Sequence[str]) -> float:
    """Returns the share of words with the right tag, by position.

    A missing tag is wrong, and a tag after the last word is ignored. If there are no words, the
    share is 1 without tags and 0 with tags.
    """
    pairs = [(a.split(), e.split()) for a, e in zip(answers, expected, strict=True)]
    total = sum(len(tags) for _, tags in pairs)
    right = sum(a == t for answer, tags in pairs for a, t in zip(answer, tags, strict=False))
    return right / total if total else float(not any(answer for answer, _ in pairs))


def label_quality(answers: Sequence[str], expected: Sequence[str]) -> LabelQuality:
    """Returns the quality of answers that are lists of labels; order and repetition are ignored."""
    return micro(label_counts(answers), label_counts(expected))


def labels(text: str) -> frozenset[str]:
    return frozenset(part.strip() for part in text.split(SEPARATOR) if part.strip())


def label_counts(texts: Sequence[str]) -> list[Counter[str]]:
    return [Counter(labels(text)) for text in texts]


def exact_match(answers: Sequence[str], expected: Sequence[str]) -> float:
    """Returns the share of answers that equal the expected text without surrounding blanks."""
    pairs = list(zip(answers, expected, strict=True))
    return sum(a.strip() == e.strip() for a, e in pairs) / len(pairs)


def token_f1(answers: Sequence[str], expected: Sequence[str]) -> float:
    """Returns the mean F1 of the words of answers (Rajpurkar et al. 2016, arXiv 1606.05250).

    The order of words is ignored.
    """
    pairs = zip(answers, expected, strict=True)
    return _mean([micro([Counter(_words(a))], [Counter(_words(e))]).f1 for a, e in pairs])


def rouge_l(answers: Sequence[str], expected: Sequence[str]) -> float:
    """Returns the mean F1 of the longest common subsequence of words (Lin 2004, ROUGE-L)."""
    return _mean([_rouge_l(_words(a), _words(e)) for a, e in zip(answers, expected, strict=True)])


def _rouge_l(answer: Sequence[str], expected: Sequence[str]) -> float:
    total = len(answer) + len(expected)
    return 2 * common_subsequence(answer, expected) / total if total else 1.0


def common_subsequence(one: Sequence[str], other: Sequence[str]) -> int:
    """Returns the length of the longest common subsequence.

    Each word of ``other`` costs one addition of ``len(one)`` bits.

    Hyyrö 2004, "Bit-parallel LCS-length computation revisited".
    """
    places: dict[str, int] = {}
    for at, word in enumerate(one):
        places[word] = places.get(word, 0) | 1 << at
    every = (1 << len(one)) - 1
    left = every  # each bit cleared below is a word of the subsequence
    for word in other:
        hit = left & places.get(word, 0)
        left = ((left + hit) | (left - hit)) & every
    return len(one) - left.bit_count()


def micro(found: Sequence[Counter[T]], right: Sequence[Counter[T]]) -> LabelQuality:
    """Returns the micro average over all rows; the average is 1 if neither side has labels."""
    hits = sum((f & r).total() for f, r in zip(found, right, strict=True))
    answered, expected = (sum(c.total() for c in side) for side in (found, right))
    return LabelQuality(
        precision=hits / answered if answered else float(not expected),
        recall=hits / expected if expected else float(not answered),
        f1=2 * hits / (answered + expected) if answered + expected else 1.0,
    )


def _parse(answer: str) -> tuple[str | None, Counter[tuple[str, str]]]:
    match = _INTENT.match(answer.strip())
    if not match:
        return None, Counter()
    return match[1], Counter(_SLOT.findall(match[2]))


def _is_readable(text: str) -> bool:
    """Whether a text is an intent and slots, and nothing else."""
    match = _INTENT.match(text.strip())
    if not match:
        return False
    return ", ".join(f"{name}: {value}" for name, value in _SLOT.findall(match[2])) == match[2]


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


_Measure = Callable[[Sequence[str], Sequence[str]], dict[str, float]]
_MEASURES: Mapping[Metrics, _Measure] = {
    "massive": lambda a, e: asdict(intent_quality(a, e)),
    "tags": lambda a, e: {"tag_accuracy": tagging_accuracy(a, e)},
    "labels": lambda a, e: asdict(label_quality(a, e)),
    "exact": lambda a, e: {"token_f1": token_f1(a, e)},
    "text": lambda a, e: {"token_f1": token_f1(a, e), "rouge_l": rouge_l(a, e)},
}


LEVELS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)

Piece = tuple[bytes, float]
"""The bytes that a token adds to a text, and the logarithm of its probability."""


@dataclass(frozen=True)
class AtLevel:
    """Quality of the labels with a confidence of at least ``level``."""

    level: float
    quality: LabelQuality


def confident_labels(pieces: Sequence[Piece]) -> dict[str, float]:
    """Returns the confidence of each label of an answer; the maximum if a label is repeated."""
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
        confidence = math.exp(sum(own))
        for label in labels(part.decode(errors="replace")):
            found[label] = max(confidence, found.get(label, 0.0))
        begin = end + len(separator)
    return found


def precision_recall(
    answers: Sequence[dict[str, float]], expected: Sequence[str]
) -> tuple[AtLevel, ...]:
    """Returns the quality at every level, for answers given as labels with confidences."""
    counts = label_counts(expected)
    return tuple(
        AtLevel(
            level,
            micro([Counter(n for n, sure in a.items() if sure >= level) for a in answers], counts),
        )
        for level in LEVELS
    )
