"""JSON values that fit a schema, nearly fit it, or fit nothing. It sends none of them."""

import json
import random
from collections.abc import Callable, Mapping
from typing import Any

MAX_TEXT = 400_000  # characters: larger than a prompt may be, smaller than a body


class Raw(str):
    """Text that goes into a body as it is, where JSON has no such value."""


def encoded(value: Any, rng: random.Random) -> bytes:
    """As JSON, or nearly: surrogates alone, not-a-numbers and `Raw` text are written too."""
    raws: list[str] = []

    def marked(found: Any) -> Any:
        if isinstance(found, Raw):
            raws.append(found)
            return f"@@{len(raws) - 1}@@"
        if isinstance(found, dict):
            return {key: marked(inner) for key, inner in found.items()}
        return [marked(inner) for inner in found] if isinstance(found, list) else found

    text = json.dumps(marked(value), ensure_ascii=rng.random() < 0.7)
    for i, raw in enumerate(raws):
        text = text.replace(f'"@@{i}@@"', raw)
    return text.encode("utf-8", "surrogatepass")


def number(rng: random.Random) -> Any:
    return rng.choice(
        [0, -0.0, -1, 1, 2, 3.5, 0.1, 2**31, 2**53 + 1, 2**63, -(2**63), 2**64, 10**30, 10**400,
         1e308, -1e308, 5e-324, float("nan"), float("inf"), float("-inf"), True,
         Raw("1e999"), Raw("01"), Raw("+1"), Raw("1_000"), Raw("0x10"), Raw("-"), Raw("9" * 5000)]
    )  # fmt: skip


def text(rng: random.Random) -> str:
    size = int(10 ** rng.uniform(0, 3))
    return rng.choice(
        ["", " ", "\0", "\ud83d", "\ude42\ud83d", "\N{REPLACEMENT CHARACTER}", "\u202e\u2066",
         "\r\n",
         "{input}", "{0.__class__}", "%s%n", "${jndi:ldap://x}", "<|end|>", "../../etc/passwd",
         "'; DROP TABLE tasks; --", "e\u0301" * size, "\U0001f469\u200d\U0001f680" * size,
         "a" * size,
         "\x7f\x1b[2J", "\u0000\uffff", "<script>", "null", "NaN"]
        + (["x" * MAX_TEXT, "\U0001f642" * (MAX_TEXT // 8)] if rng.random() < 0.02 else [])
    )  # fmt: skip


def nested(rng: random.Random) -> Raw:
    depth = int(10 ** rng.uniform(1, 4.7))
    opening, closing = rng.choice([("[", "]"), ('{"a":', "}"), ('[{"b":', "}]")])
    inner = rng.choice(["1", "", '"x"'])
    return Raw(opening * depth + inner + closing * rng.choice([depth, depth, depth - 1]))


def many(rng: random.Random) -> Any:
    size = int(10 ** rng.uniform(1, 4.5))
    item = rng.choice([0, "x", None, -1, [], {}, 1.5])
    return rng.choice([[item] * size, {str(i): item for i in range(size)}])


def duplicates(rng: random.Random) -> Raw:
    return Raw('{"a": 1, "a": {"a": 2, "a": [' + "1," * rng.randint(0, 9) + "1]}}")


_ANYTHING: tuple[Callable[[random.Random], Any], ...] = (
    number, number, text, text, nested, many, duplicates,
    lambda rng: rng.choice([None, True, False, [], {}, [[]], {"": ""}, [None]]),
)  # fmt: skip


def anything(rng: random.Random) -> Any:
    """A value that nobody asked for."""
    return rng.choice(_ANYTHING)(rng)


class Fitting:
    """Values that a schema describes; now and then one that it does not."""

    def __init__(self, schema: Mapping[str, Any], rng: random.Random, wrong: float = 0.15) -> None:
        self._defs = schema.get("$defs", {})
        self._rng, self._wrong = rng, wrong

    def value(self, schema: Mapping[str, Any], depth: int = 0) -> Any:
        rng = self._rng
        if depth > 6 or rng.random() < self._wrong:
            return anything(rng)
        if "$ref" in schema:
            return self.value(self._defs[schema["$ref"].rsplit("/", 1)[-1]], depth + 1)
        for union in ("anyOf", "oneOf", "allOf"):
            if union in schema:
                return self.value(rng.choice(schema[union]), depth + 1)
        if "const" in schema or "enum" in schema:
            return rng.choice(schema.get("enum") or [schema.get("const")])
        make = getattr(self, f"_{schema.get('type', 'object')}", None)
        return make(schema, depth) if make else anything(rng)

    def _object(self, schema: Mapping[str, Any], depth: int) -> Any:
        known, needed = schema.get("properties", {}), schema.get("required", [])
        taken = [name for name in known if name in needed or self._rng.random() < 0.3]
        if not known:
            return {text(self._rng)[:20]: anything(self._rng) for _ in range(3)}
        return {name: self.value(known[name], depth + 1) for name in taken}

    def _array(self, schema: Mapping[str, Any], depth: int) -> Any:
        most = min(schema.get("maxItems", 4), 4)
        size = self._rng.randint(min(schema.get("minItems", 0), most), most)
        return [self.value(schema.get("items", {}), depth + 1) for _ in range(size)]

    def _string(self, schema: Mapping[str, Any], depth: int) -> str:
        words = ("hi", "wake me up", "a", "naïve café", "x" * schema.get("maxLength", 9))
        return self._rng.choice(words)

    def _integer(self, schema: Mapping[str, Any], depth: int) -> int:
        least = int(schema.get("minimum", schema.get("exclusiveMinimum", -3)))
        most = int(schema.get("maximum", schema.get("exclusiveMaximum", least + 20)))
        return self._rng.choice([least, most, least - 1, most + 1, self._rng.randint(least, most)])

    def _number(self, schema: Mapping[str, Any], depth: int) -> float:
        least = float(schema.get("minimum", schema.get("exclusiveMinimum", -2)))
        most = float(schema.get("maximum", schema.get("exclusiveMaximum", 2)))
        return self._rng.choice([least, most, self._rng.uniform(least, most), most * (1 + 1e-9)])

    def _boolean(self, schema: Mapping[str, Any], depth: int) -> bool:
        return self._rng.random() < 0.5

    def _null(self, schema: Mapping[str, Any], depth: int) -> None:
        return None
