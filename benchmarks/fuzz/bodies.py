"""Bodies for the endpoints that take JSON: values that fit a schema, nearly fit it, or do not."""

import gzip
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MAX_TEXT = 400_000  # characters: more than a prompt may have, fewer than a body


# Values


class Raw(str):
    """Text that is written into a body unchanged, for values that JSON does not have."""


def encoded(value: Any, rng: random.Random) -> bytes:
    """The value as JSON, except that lone surrogates, NaN and `Raw` text are written too."""
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
    """A value of any kind."""
    return rng.choice(_ANYTHING)(rng)


class Fitting:
    """Values that fit a schema; some, at random, do not."""

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


# Bodies


_REGEXES = (
    "(a+)+$", "(a|aa){1,1000}", ".{0,100000}", "a{99999999}", "(?=x)y", r"\1", "[", "(", "*", "a**",
    r"(?P<n>a)(?P=n)", r"\p{L}{500}", "(((((((((a*)*)*)*)*)*)*)*)*)*", "(x|y)" * 2000,
    "[^\0-\uffff]*",
    "(?:a?){200}a{200}", r"\u{110000}", "a|" * 5000, "[z-a]", "(?i)stra\xdfe", "yes|no",
)  # fmt: skip
_GRAMMARS = (
    "start: start", 'start: start start | "a"', "start: /(a+)+/", "start:", "%import common.NUMBER",
    'start: "a"*',
    "\n".join(f'r{i}: r{i + 1} r{i + 1}' for i in range(40)) + '\nr40: "a"\nstart: r0',
    'start: "a"' + ' | "b"' * 3000, "start: /[/", "start: UNKNOWN", "\0", 'start: ""',
    "%ignore /.*/",
    "start: (((((" * 500, 'start: "a"~1000000',
)  # fmt: skip


def _schemas(rng: random.Random) -> Any:
    depth = rng.choice([5, 60, 400, 5000])
    opening = '{"type": "object", "required": ["a"], "properties": {"a": '
    deep = Raw(opening * depth + '{"type": "string"}' + "}}" * depth)
    loop = {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
    return rng.choice(
        [deep, loop, {"$ref": "#"}, {"$ref": "http://127.0.0.1:1/x"},
         {"$ref": "file:///etc/passwd"},
         {"type": "nothing"}, {"type": ["string", 3]}, {"enum": []}, {"enum": ["x" * 999] * 50},
         {"enum": [f"{i}" * 9 for i in range(3000)]}, {"type": "string", "minLength": 10**9},
         {"type": "array", "items": {}, "minItems": 10**6}, {"type": "array", "maxItems": -1},
         {"type": "number", "multipleOf": 1e-300}, {"type": "integer", "minimum": 1, "maximum": 0},
         {"type": "string", "pattern": rng.choice(_REGEXES)}, {"not": {}}, {"allOf": [False, True]},
         {"anyOf": [{"const": i} for i in range(1500)]}, {"patternProperties": {"(a+)+": {}}},
         {"type": "object", "properties": {str(i): {"type": "string"} for i in range(2000)}},
         {"type": "object", "properties": {"\ud800": {}}},
         {"x-guidance": {"whitespace_pattern": "("}},
         {"format": "date-time"}, {"if": {}, "then": {"$ref": "#"}}, {"type": "boolean"}, True]
    )  # fmt: skip


def _choices(rng: random.Random) -> Any:
    size = int(10 ** rng.uniform(0, 4.3))
    return rng.choice(
        [["yes", "no"], [""], ["a", "a"], ["a" * i for i in range(1, min(size, 400))],
         [f"label {i}" for i in range(size)], ["x" * 50_000], ["\ud800"], ["\0"], [], many(rng)]
    )  # fmt: skip


def _formats(rng: random.Random) -> Any:
    named = {"name": "it", "schema": _schemas(rng)}
    return rng.choice(
        [{"type": "json_object"}, {"type": "json_schema", "json_schema": named}, {"type": "text"},
         {"type": "json_schema"}, {"type": anything(rng)}, {"json_schema": named}, anything(rng)]
    )  # fmt: skip


def _structured(rng: random.Random) -> Any:
    kinds: dict[str, Any] = {
        "choice": _choices(rng), "json": _schemas(rng), "regex": rng.choice(_REGEXES),
        "grammar": rng.choice(_GRAMMARS), "json_object": True, "structural_tag": text(rng),
    }  # fmt: skip
    return {name: kinds[name] for name in rng.sample(sorted(kinds), rng.choice([0, 1, 1, 1, 2]))}


def _flat(found: Any) -> Any:
    """A format as responses have it."""
    inner = found.pop("json_schema", None) if isinstance(found, dict) else None
    return {**found, **inner} if isinstance(inner, dict) else found


def _biases(rng: random.Random) -> Any:
    size = int(10 ** rng.uniform(0, 3.5))
    value = rng.choice([-100, 100, 0, 1.5, 101, float("nan"), "1", None])
    return rng.choice(
        [{str(i): value for i in range(size)}, {str(10**i): value for i in range(30)},
         {rng.choice(["-1", "01", "a", "", "1.0", "\ud800"]): 1}, many(rng)]
    )  # fmt: skip


def _prompts(rng: random.Random) -> Any:
    size = int(10 ** rng.uniform(0, 3.2))
    ids = [rng.randrange(290) for _ in range(size)]
    return rng.choice(
        [ids, [2**31 - 1], [-1], [10**30], [0.5], [], text(rng), "a b " * size,
         ["a", "b"], [text(rng) for _ in range(3)], ["a"] * rng.choice([16, 256, 257, 30_000]),
         [ids, [1, 2]], [[5]] * rng.choice([16, 257]), [[], ids], [[1], [2**31 - 1]],
         ["a", 1], [1, "a"], ["a", [1]], [[1], ["a"]], [[1], None], [[[1]]], [None]]
    )  # fmt: skip


_ROLES = ("system", "developer", "user", "assistant", "tool", "function", "critic")


def _messages(rng: random.Random) -> Any:
    one = {"role": "user", "content": text(rng)}
    kind = rng.choice(["text", "text", "input_text", "output_text", "input_image", "refusal"])
    parts = [{"type": kind, "text": text(rng)}] * rng.choice([0, 1, 3, 2000])
    talk = [{"role": rng.choice(_ROLES[:4]), "content": text(rng)[:40]} for _ in range(6)]
    said = {"role": "assistant", "type": "message", "id": "msg_1", "content": parts}
    other = {"type": rng.choice(["function_call_output", "reasoning", text(rng)[:20]])}
    return rng.choice(
        [talk, talk, [*talk, {**one, "role": rng.choice(_ROLES)}], [said, one], [other, one],
         [{**one, "tool_calls": rng.choice([[], [{}], None])}], _few_messages(rng, one, parts)]
    )  # fmt: skip


def _few_messages(rng: random.Random, one: dict[str, Any], parts: list[Any]) -> Any:
    return rng.choice(
        [[one], [one, one], [{**one, "content": parts}], [{**one, "role": text(rng)}], [one] * 3000,
         [{**one, "name": anything(rng)}], [{**one, "content": anything(rng)}], [anything(rng)],
          one]
    )  # fmt: skip


_HOSTILE: Mapping[str, Callable[[random.Random], Any]] = {
    "guided_regex": lambda rng: rng.choice(_REGEXES),
    "guided_grammar": lambda rng: rng.choice(_GRAMMARS),
    "guided_json": _schemas,
    "guided_choice": _choices,
    "response_format": _formats,
    "structured_outputs": _structured,
    "text": lambda rng: {"format": _flat(_formats(rng))},
    "logit_bias": _biases,
    "prompt": _prompts,
    "messages": _messages,
    "input": lambda rng: rng.choice([_messages(rng), text(rng)]),
    "instructions": text,
    "include": lambda rng: rng.choice([["message.output_text.logprobs"], ["x"] * 17, many(rng)]),
    "chat_template_kwargs": lambda rng: {
        rng.choice(["messages", "enable_thinking", "fail", "loop", ""]): anything(rng)
    },
    "stop_token_ids": lambda rng: rng.choice([[0], [*range(64)], [-1], [2**31 - 1], many(rng)]),
    "min_tokens": lambda rng: rng.choice([0, 1, 24, 25, number(rng)]),
    "truncate_prompt_tokens": lambda rng: rng.choice([-1, 0, 1, 300, number(rng)]),
    "stop": lambda rng: rng.choice(
        [
            [text(rng) for _ in range(rng.choice([1, 16, 17]))],
            ["x" * 1024] * 16,
            "e",
            " ",
            many(rng),
        ]
    ),
    "n": lambda rng: rng.choice([0, -1, 1, 2, 16, 17, 10**9, 1.0, number(rng)]),
    "max_tokens": lambda rng: rng.choice([0, 1, 7, 24, 25, 10**9, number(rng)]),
    "timeout": lambda rng: rng.choice([1e-9, 0, -1, 0.001, 0.05, 5, 1e9, number(rng)]),
}


@dataclass(frozen=True)
class Endpoint:
    """A path that takes JSON, and the schema of its body from the service."""

    path: str
    schema: Mapping[str, Any]


_ASKED = ("prompt", "messages", "input")


class Bodies:
    """Bodies for one endpoint; the random numbers alone determine them."""

    def __init__(self, endpoint: Endpoint, tasks: Sequence[str], rng: random.Random) -> None:
        self._fields: Mapping[str, Any] = endpoint.schema.get("properties", {})
        self._fitting = Fitting(endpoint.schema, rng)
        self._tasks, self._rng = tasks, rng

    def make(self) -> bytes:
        """A body; two of three are valid JSON."""
        content = self._content()
        if self._rng.random() < 0.05:
            content = self._rng.choice([[content], anything(self._rng), nested(self._rng)])
        body = encoded(content, self._rng)
        return broken(body, self._rng) if self._rng.random() < 0.15 else body

    def _content(self) -> Any:
        rng = self._rng
        content: dict[str, Any] = {
            "model": rng.choice(self._tasks),
            "max_tokens": rng.randint(1, 8),
            "max_output_tokens": rng.randint(1, 8),
        }
        content |= {name: self._usual(name) for name in _ASKED if name in self._fields}
        content = {name: value for name, value in content.items() if name in self._fields}
        count = min(len(self._fields), rng.choice([0, 1, 1, 1, 2, 2, 3, 4]))
        for name in rng.sample(sorted(self._fields), count):
            content[name] = self._value(name)
        if rng.random() < 0.05:
            content[text(rng)[:40] or "unknown"] = anything(rng)
        if content and rng.random() < 0.03:
            del content[rng.choice(sorted(content))]
        return content

    def _usual(self, name: str) -> Any:
        words = self._rng.choice(("hi", "wake me up at nine", "naïve café"))
        talk = [{"role": role, "content": words} for role in ("system", "user")]
        return words if name == "prompt" else self._rng.choice([talk, talk[1:]])

    def _value(self, name: str) -> Any:
        hostile, draw = _HOSTILE.get(name), self._rng.random()
        if hostile and draw < 0.6:
            return hostile(self._rng)
        return anything(self._rng) if draw > 0.85 else self._fitting.value(self._fields[name])


def broken(body: bytes, rng: random.Random) -> bytes:
    """The body with an error in its bytes."""
    at = rng.randrange(len(body) + 1)
    return rng.choice(
        [body[:at], body[:at] + bytes([rng.randrange(256)]) + body[at + 1 :], body + body,
         b"\xef\xbb\xbf" + body, body.decode("utf-8", "replace").encode("utf-16"), body + b"\0",
         b"",
         b"[" + body, body[:at] + b"\xff\xfe" + body[at:], b" " * 100_000 + body,
         gzip.compress(body, mtime=0),
         body.replace(b'"', b"'"), body.replace(b":", b": /* x */"), b"\0" * 100,
         rng.randbytes(300),
         body[:-1] + b"," + body[1:], body.replace(b'": ', b'": ' + Raw("-").encode(), 1)]
    )  # fmt: skip
