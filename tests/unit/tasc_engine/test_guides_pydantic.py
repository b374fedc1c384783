"""Schemas that Pydantic writes: each type is followed, or refused with the way out."""

import datetime
import decimal
import enum
import ipaddress
import json
import pathlib
import re
import uuid
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import pydantic
import pytest
from guide_walks import look
from pydantic import BaseModel, Field, conint, constr
from typing_extensions import TypedDict

from support import refused
from tasc_engine.errors import GuideError
from tasc_engine.guided import Guides
from tasc_protocol import GuideSpec
from tasc_text import TaskTokenizer

EOS = 0
ID = "c56a4180-65aa-42ec-a945-5fd21dec0538"


class Label(enum.Enum):
    A = "a"
    B = "b"


class Inner(BaseModel):
    q: int


class Cat(BaseModel):
    kind: Literal["cat"]
    tags: set[Label]


class Dog(BaseModel):
    kind: Literal["dog"]
    tags: list[Label]


class Tree(BaseModel):
    value: int
    kids: "list[Tree]" = []


class Closed(BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    a: int


class Typed(TypedDict):
    a: int


Pet = Annotated[Cat | Dog, Field(discriminator="kind")]
# A type, JSON of a value that it takes, and JSON that it does not take.
FOLLOWED: list[tuple[Any, str, str | None]] = [
    (int, "1", '"1"'),
    (float, "-1.5e3", "true"),
    (bool, "true", "1"),
    (None, "null", "1"),
    (Any, '[{"a": 1}]', None),
    (decimal.Decimal, '"1.5"', "null"),
    (Annotated[decimal.Decimal, Field(gt=0, max_digits=5, decimal_places=2)], "1.5", "-1"),
    (pydantic.SecretStr, '"p"', "1"),
    (bytes, '"p"', "1"),
    (pathlib.Path, '"/tmp/a"', "1"),
    (pydantic.Base64Str, '"YWI="', '"YWI"'),
    (set[Literal["a", "b"]], '["b", "a"]', '["a", "a"]'),
    (set[Label], '["b", "a"]', '["b", "b"]'),
    (frozenset[Literal["a", "b"]], "[]", '["c"]'),
    (set[conint(ge=1, le=5)], "[5, 1]", "[1, 1]"),
    (set[bool], "[true, false]", "[true, true]"),
    (set[Label] | None, "null", '["a", "a"]'),
    (dict[str, set[Label]], '{"x": ["a"]}', '{"x": ["a", "a"]}'),
    (conint(ge=1, le=5, multiple_of=2), "4", "3"),
    (constr(min_length=1, max_length=3, pattern="^[a-z]+$"), '"abc"', '"abcd"'),
    (datetime.datetime, '"2024-05-01T10:00:00Z"', '"soon"'),
    (datetime.date, '"2024-05-01"', '"05/01/2024"'),
    (datetime.time, '"10:00:00Z"', '"ten"'),
    (datetime.timedelta, '"P1D"', '"1 day"'),
    (uuid.UUID, f'"{ID}"', '"c56a"'),
    (pydantic.UUID4, f'"{ID}"', f'"{ID.replace("-42", "-12")}"'),
    (int | None, "null", '"a"'),
    (int | str, '"a"', "null"),
    (Cat | Dog, '{"kind": "dog", "tags": ["a", "a"]}', '{"kind": "cow", "tags": []}'),
    (Pet, '{"kind": "cat", "tags": ["b"]}', '{"kind": "cat", "tags": ["b", "b"]}'),
    (Inner, '{"q": 1}', '{"q": "1"}'),
    (Tree, '{"value": 1, "kids": [{"value": 2}]}', '{"value": 1, "kids": [1]}'),
    (Closed, '{"a": 1}', '{"a": 1, "b": 2}'),
    (dict[str, int], '{"x": 1}', '{"x": "1"}'),
    (dict[Label, int], '{"a": 1, "b": 2}', '{"c": 1}'),
    (dict[constr(pattern="^[a-z]$"), int], '{"x": 1}', '{"x": "1"}'),
    (tuple[int, str], '[1, "a"]', '[1, "a", 2]'),
    (tuple[int, ...], "[1, 2, 3]", '["a"]'),
    (Sequence[int], "[]", "[null]"),
    (Annotated[list[int], Field(min_length=1, max_length=2)], "[1]", "[]"),
    (Literal["a", 1, None], "1", "2"),
    (pydantic.AnyUrl, '"https://a.b/c"', '"a b"'),
    (pydantic.HttpUrl, '"https://a.b/c"', '"a b"'),
    (Typed, '{"a": 1}', '{"a": null}'),
    (Annotated[str, Field(json_schema_extra={"format": "email"})], '"a@b.com"', '"a"'),
    (ipaddress.IPv4Address, '"127.0.0.1"', '"300.0.0.1"'),
    (ipaddress.IPv6Address, '"::1"', '"x"'),
    (ipaddress.IPv4Network, '"10.0.0.0/8"', '"10.0.0.0/33"'),
    (pydantic.IPvAnyAddress, '"::1"', '"x"'),
    (pydantic.Json, '"{}"', "{}"),
    (Annotated[int, Field(default=3, examples=[1], deprecated=True)], "3", '"3"'),
]


def schema_of(kind: Any) -> dict[str, Any]:
    return pydantic.create_model("M", f=(kind, ...)).model_json_schema()


@pytest.fixture(scope="module")
def guides(tokenizer: TaskTokenizer) -> Guides:
    return Guides(tokenizer, tokenizer.vocab_size)


def allows(guides: Guides, tokenizer: TaskTokenizer, schema: dict, text: str) -> bool:
    tokens = [*tokenizer.encode_outputs([f'{{"f": {text}}}'])[0], EOS]
    guide = guides.of(GuideSpec("json_schema", text=json.dumps(schema)), 999)
    return all(look(guide, tokens, range(-1, len(tokens) - 1))[1])


@pytest.mark.parametrize(("kind", "good", "bad"), FOLLOWED, ids=lambda v: str(v)[:40])
def test_guide_of_a_pydantic_type_is_followed(
    guides: Guides, tokenizer, kind, good: str, bad: str | None
) -> None:
    schema = schema_of(kind)
    assert allows(guides, tokenizer, schema, good)
    assert bad is None or not allows(guides, tokenizer, schema, bad)


@pytest.mark.parametrize(
    ("kind", "named", "value"),
    [
        (set[str], "uniqueItems", '["a", "a"]'),
        (set[int], "uniqueItems", "[1, 1]"),
        (re.Pattern, "regex", '"("'),
        (dict[datetime.date, int], "propertyNames", '{"x": 1}'),
        (ipaddress.IPv6Network, "ipv6network", '"x"'),
        (list[Label] | set[Label], "uniqueItems", '["a", "a"]'),
    ],
    ids=str,
)
def test_unenforceable_types_are_refused_or_ignored(guides, tokenizer, kind, named, value):
    schema = schema_of(kind)
    with refused(GuideError, named, '"lenient": true'):
        guides.of(GuideSpec("json_schema", text=json.dumps(schema)), 99)
    assert allows(guides, tokenizer, schema | {"x-guidance": {"lenient": True}}, value)


@pytest.mark.parametrize(
    "pattern",
    [r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$", r"^(?!^[-+.]*$)[+-]?0*\d{0,3}\.?\d{0,2}0*$"],
)
def test_guide_of_a_decimal_pattern_is_followed(guides, tokenizer, pattern: str) -> None:
    """Some versions of Pydantic write a look-ahead, which llguidance lacks."""
    kinds = [{"type": "number"}, {"type": "string", "pattern": pattern}]
    schema = {"type": "object", "properties": {"f": {"anyOf": kinds}}}
    found = [
        t for t in ('"1.5"', '"-12"', '"-."', '""', "7") if allows(guides, tokenizer, schema, t)
    ]
    assert found == ['"1.5"', '"-12"', "7"]
