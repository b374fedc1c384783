"""How good answers are, by the measures usual for the demo's tasks. Strings only."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

_INTENT = re.compile(r"^intent: (\w+), slot fills: \{(.*)\}$", re.DOTALL)
_SLOT = re.compile(r"(\w+): (.*?)(?=, \w+: |$)", re.DOTALL)


@dataclass(frozen=True)
class IntentQuality:
    """Shares in [0, 1]: rows with the right intent, slots (name, value) by F1, rows all right."""

    intent_accuracy: float
    slot_f1: float
    joint_accuracy: float


def intent_quality(answers: Sequence[str], expected: Sequence[str]) -> IntentQuality:
    """Of MASSIVE answers; slots count over all rows (micro F1), an unreadable answer has none."""
    found = [_parse(a) for a in answers]
    right = [_parse(e) for e in expected]
    pairs = list(zip(found, right, strict=True))
    hits = sum((f[1] & r[1]).total() for f, r in pairs)
    total = sum(f[1].total() + r[1].total() for f, r in pairs)
    return IntentQuality(
        intent_accuracy=sum(f[0] == r[0] for f, r in pairs) / len(pairs),
        slot_f1=2 * hits / total if total else 1.0,
        joint_accuracy=sum(f == r for f, r in pairs) / len(pairs),
    )


def tagging_accuracy(answers: Sequence[str], expected: Sequence[str]) -> float:
    """Share of words whose tag is right, by position; tags too many or too few are wrong."""
    right = total = 0
    for answer, truth in zip(answers, expected, strict=True):
        tags = truth.split()
        total += len(tags)
        right += sum(a == t for a, t in zip(answer.split(), tags, strict=False))
    return right / total


def _parse(answer: str) -> tuple[str | None, Counter[tuple[str, str]]]:
    match = _INTENT.match(answer.strip())
    if not match:
        return None, Counter()
    return match[1], Counter(_SLOT.findall(match[2]))
