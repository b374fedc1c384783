"""Calls by random JSON schemas: every answer valid, the same with drafts and without."""

import json
import random
from typing import Any

import jsonschema
from bench_requests import Asked
from draft_bars import Figure
from requests_engine import Drafted, load, prompts

from tasc_engine import GenerationRequest, GuideSpec, Sampling

MAX_TOKENS = 900  # a model that never saw JSON writes blanks wherever it may
_SERVICES = ("FindRestaurants", "ReserveRestaurant", "GetWeather", "SearchFlights", "PlayMedia")
_SLOTS = ("city", "date", "time", "number_of_seats", "category", "price_range", "has_live_music")
_VALUES = ("cheap", "moderate", "expensive", "San Jose", "New York", "naïve café", "2019-03-08")


def measure(asked: Asked) -> tuple[list[Figure], dict[str, Any]]:
    rng = random.Random(0)
    schemas = [random_schema(rng) for _ in range(asked.schemas)]
    examples = [(f"call: {i}\n", example(schema, rng)) for i, schema in enumerate(schemas)]
    ours = Drafted(load(), examples)
    ids = prompts([prompt for prompt, _ in examples])
    requests = [
        GenerationRequest(
            str(i),
            prompt,
            MAX_TOKENS,
            guide=GuideSpec("json_schema", text=json.dumps(schema)),
            sampling=Sampling(temperature=rng.choice([0.0, 0.7, 1.0]), seed=i),
        )
        for i, (prompt, schema) in enumerate(zip(ids, schemas, strict=True))
    ]
    drafted, plain = ours.run(requests), ours.run(requests, draft=False)
    valid = sum(is_valid(text, s) for text, s in zip(drafted.texts, schemas, strict=True))
    equal = sum(a.tokens == b.tokens for a, b in zip(drafted.results, plain.results, strict=True))
    accepted = int(drafted.totals.accepted.sum())
    return [
        Figure("schemas: valid answers", valid, f"of {len(schemas)}", len(schemas)),
        Figure("schemas: equal without drafts", equal, f"of {len(schemas)}", len(schemas)),
        Figure("schemas: draft tokens accepted", accepted, "", 1),
    ], {
        "schemas": len(schemas),
        "valid": valid,
        "equal": equal,
        "tokens_per_second": drafted.tokens_per_second,
        "tokens_per_second_plain": plain.tokens_per_second,
        "block_efficiency": drafted.totals.block_efficiency,
    }


def random_schema(rng: random.Random) -> dict[str, Any]:
    """Of a call: its name, and arguments of several kinds, some of them optional."""
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
    """One valid call, to be drafted from."""
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
