"""Answers from label sets: never anything else, in fewer forwards, for next to nothing."""

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench_requests import Asked
from draft_bars import Figure, timed
from requests_engine import Drafted, guides_timed, load, prompts

from tasc_engine import GenerationRequest, GuideSpec
from tasc_jobs.demo.tasks import HERE, TEMPLATES, read_split
from tasc_text import PromptTemplate

MASK_SHARE = 0.05
_CUT = ", slot fills"  # what follows the intent of an answer


@dataclass(frozen=True)
class Labelled:
    """A task whose answers are labels.

    Attributes:
        adapter: Of the shipped model, or none: the base knows ``clinc150``.
        train, test: Prompts and labels.
        stop: Ends an unguided answer behind the label.
    """

    name: str
    adapter: str | None
    labels: tuple[str, ...]
    train: list[tuple[str, str]]
    test: list[tuple[str, str]]
    stop: tuple[str, ...] = ()


def measure(asked: Asked) -> tuple[list[Figure], dict[str, Any]]:
    figures, found = [], {}
    for labelled in label_sets(asked.data):
        own, found[labelled.name] = _measure(labelled, asked)
        figures += own
    return figures, found


def _measure(task: Labelled, asked: Asked) -> tuple[list[Figure], dict[str, Any]]:
    adapter = HERE / "adapters" / task.adapter if task.adapter else None
    ours = Drafted(load(adapter=adapter), task.train)
    test = task.test[: asked.rows]
    ids = prompts([prompt for prompt, _ in test])
    guide = GuideSpec("choice", task.labels)
    guided = [GenerationRequest(str(i), p, 64, guide=guide) for i, p in enumerate(ids)]
    free = [GenerationRequest(str(i), p, 64, stop=task.stop) for i, p in enumerate(ids)]
    ours.run(guided[:8])  # compiled before it counts
    shares = []
    for _ in range(asked.repeats):
        with guides_timed() as spent:
            drafted = ours.run(guided)
        shares.append(sum(spent) / drafted.seconds)
    plain, unguided = ours.run(guided, draft=False), ours.run(free)
    outside = sum(text not in set(task.labels) for text in drafted.texts)
    efficiency = drafted.totals.block_efficiency, unguided.totals.block_efficiency
    name, changed = f"choices: {task.name}", _differ(drafted.texts, plain.texts)
    truth = [label for _, label in test]
    right = [
        sum(a == b for a, b in zip(run.texts, truth, strict=True)) for run in (drafted, unguided)
    ]
    return [
        Figure(f"{name}: answers outside the set", outside, "", 0, upwards=False),
        Figure(f"{name}: answers changed by drafts", changed, "", 0, upwards=False),
        Figure(f"{name}: block efficiency", efficiency[0], "", efficiency[1]),
        timed(f"{name}: time of guides, share of a run", shares, "", MASK_SHARE, upwards=False),
    ], {
        "labels": len(task.labels),
        "rows": len(test),
        "block_efficiency": efficiency[0],
        "block_efficiency_unguided": efficiency[1],
        "right_guided": right[0],
        "right_unguided": right[1],
        "outside_unguided": sum(t not in set(task.labels) for t in unguided.texts),
        "forced": drafted.totals.forced_tokens,
        "steps": drafted.totals.row_steps,
    }


def _differ(some: Sequence[str], others: Sequence[str]) -> int:
    return sum(a != b for a, b in zip(some, others, strict=True))


def label_sets(data: Path | None) -> list[Labelled]:
    found = [_massive()]
    if data and (data / "clinc150").is_dir():
        found.append(_clinc(data / "clinc150"))
    if data and (data / "eurlex_labels").is_dir():
        found.append(_eurlex(data / "eurlex_labels"))
    return found


def _massive() -> Labelled:
    template = PromptTemplate(TEMPLATES["massive_en"])

    def rows(split: str) -> list[tuple[str, str]]:
        read = read_split("massive_en", split)
        return [(template.render(r["input"]), r["output"].partition(_CUT)[0]) for r in read]

    train, test = rows("train"), rows("test")
    return Labelled("massive_en", "massive_en", _labels(train + test), train, test, (_CUT,))


def _clinc(folder: Path) -> Labelled:
    template = PromptTemplate(TEMPLATES["clinc150"])
    train, test = (
        [(template.render(r["input"]), r["output"]) for r in _read(folder, split)]
        for split in ("train", "test")
    )
    return Labelled("clinc150", None, _labels(train + test), train, test)


def _eurlex(folder: Path) -> Labelled:
    """An act's first label; the model has never seen such a task, its answers are no good."""
    train, test = (
        [(r["input"] + "\nlabel: ", r["output"].split("; ")) for r in _read(folder, split)]
        for split in ("train", "test")
    )
    labels = tuple(sorted({label for _, own in train + test for label in own}))
    firsts = [[(prompt, own[0]) for prompt, own in rows] for rows in (train, test)]
    return Labelled("eurlex_labels", None, labels, firsts[0], firsts[1], ("\n",))


def _labels(rows: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    return tuple(sorted({label for _, label in rows}))


def _read(folder: Path, split: str) -> list[dict[str, str]]:
    with gzip.open(folder / f"{split}.jsonl.gz", "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]
