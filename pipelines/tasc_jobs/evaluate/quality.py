"""How good answers are, by the usual measures of a task's kind, and by how sure the model was.

All shares lie in [0, 1]; answers and expected outputs come in the same order. A label's confidence
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
_SHOWN = 100  # letters of a text that is named


@dataclass(frozen=True)
class IntentQuality:
    """Rows with the right intent, slots (name, value) by F1, rows all right."""

    intent_accuracy: float
    slot_f1: float
    joint_accuracy: float


@dataclass(frozen=True)
class LabelQuality:
    """Over the labels of all rows (micro): said ones that are right, right ones that are said."""

    precision: float
    recall: float
    f1: float


def quality(answers: Sequence[str], expected: Sequence[str], metrics: Metrics) -> dict[str, float]:
    """The measures of a kind of task by name; exact match is among them all.

    Raises:
        UsageError: An expected output cannot be judged by them.
    """
    return {"exact_match": exact_match(answers, expected), **_MEASURES[metrics](answers, expected)}


def require_judgeable(
    expected: Sequence[str], metrics: Metrics, rows: Sequence[str] | None = None
) -> None:
    """Raise UsageError where an intent is asked for and a row's expected output says none: any
    garbage would be right. The row is named by its number where no other names are given.
    """
    if metrics != "massive":
        return
    names: Iterable[str | int] = rows or range(1, len(expected) + 1)
    for row, text in zip(names, expected, strict=True):
        if not _says_all(text):
            raise UsageError(
                f"the expected output of row {row} is {text[:_SHOWN]!r}, not 'intent: NAME, slot "
                "fills: {NAME: VALUE, ...}' as the metrics massive judge; name another --metrics"
            )


def intent_quality(answers: Sequence[str], expected: Sequence[str]) -> IntentQuality:
    """Of MASSIVE answers; slots count over all rows (micro F1), an unreadable answer has none.

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
    """Share of words whose tag is right, by position; a tag that is missing is wrong, one behind
    the last word counts for nothing. Without any word, all is right if no tag is said.
    """
    pairs = [(a.split(), e.split()) for a, e in zip(answers, expected, strict=True)]
    total = sum(len(tags) for _, tags in pairs)
    right = sum(a == t for said, tags in pairs for a, t in zip(said, tags, strict=False))
    return right / total if total else float(not any(said for said, _ in pairs))


def label_quality(answers: Sequence[str], expected: Sequence[str]) -> LabelQuality:
    """Of answers that are lists of labels, in any order; one said twice was said once."""
    return micro(label_counts(answers), label_counts(expected))


def labels(text: str) -> frozenset[str]:
    return frozenset(part.strip() for part in text.split(SEPARATOR) if part.strip())


def label_counts(texts: Sequence[str]) -> list[Counter[str]]:
    return [Counter(labels(text)) for text in texts]


def exact_match(answers: Sequence[str], expected: Sequence[str]) -> float:
    """Share of answers that are the expected text, blanks around it aside."""
    pairs = list(zip(answers, expected, strict=True))
    return sum(a.strip() == e.strip() for a, e in pairs) / len(pairs)


def token_f1(answers: Sequence[str], expected: Sequence[str]) -> float:
    """F1 of an answer's words, in any order (Rajpurkar et al. 2016, arXiv 1606.05250); the mean."""
    pairs = zip(answers, expected, strict=True)
    return _mean([micro([Counter(_words(a))], [Counter(_words(e))]).f1 for a, e in pairs])


def rouge_l(answers: Sequence[str], expected: Sequence[str]) -> float:
    """F1 of the longest common subsequence of words (Lin 2004, ROUGE-L); the mean."""
    return _mean([_rouge_l(_words(a), _words(e)) for a, e in zip(answers, expected, strict=True)])


def _rouge_l(answer: Sequence[str], expected: Sequence[str]) -> float:
    total = len(answer) + len(expected)
    return 2 * common_subsequence(answer, expected) / total if total else 1.0


def common_subsequence(one: Sequence[str], other: Sequence[str]) -> int:
    """Length of the longest; a word of ``other`` costs one addition of ``len(one)`` bits.

    Hyyrö 2004, "Bit-parallel LCS-length computation revisited".
    """
    places: dict[str, int] = {}
    for at, word in enumerate(one):
        places[word] = places.get(word, 0) | 1 << at
    every = (1 << len(one)) - 1
    left = every  # a bit that fell to 0 is a word of the subsequence
    for word in other:
        hit = left & places.get(word, 0)
        left = ((left + hit) | (left - hit)) & every
    return len(one) - left.bit_count()


def micro(found: Sequence[Counter[T]], right: Sequence[Counter[T]]) -> LabelQuality:
    """Over all rows; where nothing was to be said and nothing was, all is right."""
    hits = sum((f & r).total() for f, r in zip(found, right, strict=True))
    said, wanted = (sum(c.total() for c in side) for side in (found, right))
    return LabelQuality(
        precision=hits / said if said else float(not wanted),
        recall=hits / wanted if wanted else float(not said),
        f1=2 * hits / (said + wanted) if said + wanted else 1.0,
    )


def _parse(answer: str) -> tuple[str | None, Counter[tuple[str, str]]]:
    match = _INTENT.match(answer.strip())
    if not match:
        return None, Counter()
    return match[1], Counter(_SLOT.findall(match[2]))


def _says_all(text: str) -> bool:
    """Whether a text is an intent and slots, and nothing is left over."""
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
