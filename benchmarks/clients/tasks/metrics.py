"""Metrics and choices of the tasks in this folder."""

from typing import Any

_CHOICES = 4


def intent_and_row(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Whether the intent, and the whole answer, are those of the row."""
    said, truth = results[0].strip(), doc["output"]
    return {"intent": float(_intent(said) == _intent(truth)), "row": float(said == truth)}


def with_choices(docs: Any) -> Any:
    """Add to each row its intent among others of the data, at a place that its text says."""
    known = sorted({_intent(output) for output in docs["output"]})

    def add(doc: dict[str, Any]) -> dict[str, Any]:
        own, label = known.index(_intent(doc["output"])), len(doc["input"]) % _CHOICES
        choices = [known[(own + step - label) % len(known)] for step in range(_CHOICES)]
        return {"choices": choices, "label": label}

    return docs.map(add)


def _intent(output: str) -> str:
    return output.partition(",")[0]
