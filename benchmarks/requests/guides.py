"""Guided answers: from label sets, and by random JSON schemas of calls.

An answer is always valid and the same with drafts and without. A guided answer takes fewer forwards
than a free one, and guides take a small share of the time.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema

from benchmarks.common import Figure, read_rows
from benchmarks.requests.engines import Drafted, Options, guides_timed, load, prompts
from tasc_engine import GuideSpec, Request
from tasc_jobs.demo.tasks import ADAPTERS, TEMPLATES, read_split
from tasc_text import PromptTemplate

MASK_SHARE = 0.05
_CUT = ", slot fills"  # it follows the intent in an answer
MAX_TOKENS = 900  # a model that does not know JSON writes blanks wherever they are allowed
_SERVICES = ("FindRestaurants", "ReserveRestaurant", "GetWeather", "SearchFlights", "PlayMedia")
_SLOTS = ("city", "date", "time", "number_of_seats", "category", "price_range", "has_live_music")
_VALUES = ("cheap", "moderate", "expensive", "San Jose", "New York", "naïve café", "2019-03-08")


# Label sets


@dataclass(frozen=True)
class Labelled:
    """A task whose answers are labels.

    Attributes:
        adapter: The adapter of the shipped model; None for ``clinc150``, which the base knows.
        train, test: Prompts and labels.
        stop: Texts that end an unguided answer after the label.
    """

    name: str
    adapter: str | None
    labels: tuple[str, ...]
    train: list[tuple[str, str]]
    test: list[tuple[str, str]]
    stop: tuple[str, ...] = ()


def choices(options: Options) -> tuple[list[Figure], dict[str, Any]]:
    """Answer from label sets."""
    figures, found = [], {}
    for labelled in label_sets(options.data):
        own, found[labelled.name] = _labelled(labelled, options)
        figures += own
    return figures, found


def _labelled(task: Labelled, options: Options) -> tuple[list[Figure], dict[str, Any]]:
    adapter = ADAPTERS / task.adapter if task.adapter else None
    ours = Drafted(load(adapter=adapter), task.train)
    test = task.test[: options.rows]
    ids = prompts([prompt for prompt, _ in test])
    guide = GuideSpec("choice", task.labels)
    guided = [Request(str(i), p, 64, guide=guide) for i, p in enumerate(ids)]
    free = [Request(str(i), p, 64, stop=task.stop) for i, p in enumerate(ids)]
    ours.run(guided[:8])  # warms up
    shares = []
    for _ in range(options.repeats):
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
        Figure.of_runs(
            f"{name}: time of guides, share of a run", shares, "", MASK_SHARE, upwards=False
        ),
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
        [
            (template.render(r["input"]), r["output"])
            for r in read_rows(folder / f"{split}.jsonl.gz")
        ]
        for split in ("train", "test")
    )
    return Labelled("clinc150", None, _labels(train + test), train, test)


def _eurlex(folder: Path) -> Labelled:
    """The first label of an act. The model does not know this task: its answers are not good."""
    train, test = (
        [
            (r["input"] + "\nlabel: ", r["output"].split("; "))
            for r in read_rows(folder / f"{split}.jsonl.gz")
        ]
        for split in ("train", "test")
    )
    labels = tuple(sorted({label for _, own in train + test for label in own}))
    firsts = [[(prompt, own[0]) for prompt, own in rows] for rows in (train, test)]
    return Labelled("eurlex_labels", None, labels, firsts[0], firsts[1], ("\n",))


def _labels(rows: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    return tuple(sorted({label for _, label in rows}))


# JSON schemas


def schemas(options: Options) -> tuple[list[Figure], dict[str, Any]]:
    """Answer by random JSON schemas of calls, with drafts and without."""
    rng = random.Random(0)
    drawn = [random_schema(rng) for _ in range(options.schemas)]
    examples = [(f"call: {i}\n", example(schema, rng)) for i, schema in enumerate(drawn)]
    ours = Drafted(load(), examples)
    ids = prompts([prompt for prompt, _ in examples])
    requests = [
        Request(
            str(i),
            prompt,
            MAX_TOKENS,
            guide=GuideSpec("json_schema", text=json.dumps(schema)),
            parameters={"temperature": rng.choice([0.0, 0.7, 1.0])},
            seed=i,
        )
        for i, (prompt, schema) in enumerate(zip(ids, drawn, strict=True))
    ]
    drafted, plain = ours.run(requests), ours.run(requests, draft=False)
    valid = sum(is_valid(text, s) for text, s in zip(drafted.texts, drawn, strict=True))
    equal = sum(a.tokens == b.tokens for a, b in zip(drafted.results, plain.results, strict=True))
    accepted = int(drafted.totals.accepted.sum())
    return [
        Figure("schemas: valid answers", valid, f"of {len(drawn)}", len(drawn)),
        Figure("schemas: equal without drafts", equal, f"of {len(drawn)}", len(drawn)),
        Figure("schemas: draft tokens accepted", accepted, "", 1),
    ], {
        "schemas": len(drawn),
        "valid": valid,
        "equal": equal,
        "tokens_per_second": drafted.tokens_per_second,
        "tokens_per_second_plain": plain.tokens_per_second,
        "block_efficiency": drafted.totals.block_efficiency,
    }


def random_schema(rng: random.Random) -> dict[str, Any]:
    """The schema of a call: its name, and arguments of several types, some of them optional."""
    slots = rng.sample(_SLOTS, rng.randint(1, 4))
    arguments = {
        "type": "object",
        "properties": {slot: _value_schema(rng) for slot in slots},
        "required": slots[: rng.randint(1, len(slots))],
        "additionalProperties": False,
    }
    name = {"enum": rng.sample(_SERVICES, rng.randint(1, 3))}
    return {
        "type": "object",
        "properties": {"name": name, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _value_schema(rng: random.Random) -> dict[str, Any]:
    return rng.choice(
        [
            {"enum": rng.sample(_VALUES, 3)},
            {"type": "integer", "minimum": 1, "maximum": rng.choice([9, 99, 1000])},
            {"type": "boolean"},
            {"type": "string", "maxLength": rng.choice([5, 20])},
            {"type": "string", "pattern": "^[0-9]{4}-[0-9]{2}$"},
            {"type": "array", "items": {"enum": ["a", "b", "c"]}, "minItems": 1, "maxItems": 3},
        ]
    )


def example(schema: dict[str, Any], rng: random.Random) -> str:
    """A valid call that drafts are made from."""
    fields = schema["properties"]["arguments"]["properties"]
    arguments = {slot: _value(kind, rng) for slot, kind in fields.items()}
    call = {"name": rng.choice(schema["properties"]["name"]["enum"]), "arguments": arguments}
    return json.dumps(call, ensure_ascii=False)


def _value(kind: dict[str, Any], rng: random.Random) -> Any:
    if "enum" in kind:
        return rng.choice(kind["enum"])
    made = {"integer": 3, "boolean": True, "array": ["a"]}
    return made.get(kind["type"], "2019-03" if "pattern" in kind else "noon")


def is_valid(text: str, schema: dict[str, Any]) -> bool:
    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True
