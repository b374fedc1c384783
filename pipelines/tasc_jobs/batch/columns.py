"""The columns of an output: those of the answers, and the user's own beside them."""

import base64
import datetime
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import pyarrow as pa

from tasc_text import is_unicode

ANSWER = pa.schema(
    [
        ("id", pa.string()),
        ("text", pa.string()),
        ("tokens", pa.list_(pa.int32())),
        ("finish_reason", pa.string()),
        ("model", pa.string()),
        ("adapter", pa.string()),
        ("index_version", pa.int64()),
    ]
)
_TOKEN = [("token", pa.string()), ("logprob", pa.float64()), ("bytes", pa.list_(pa.uint8()))]
_TOP = pa.list_(pa.struct(_TOKEN))
LOGPROBS = pa.field("logprobs", pa.list_(pa.struct([*_TOKEN, ("top_logprobs", _TOP)])))
_TAKEN = (*ANSWER.names, LOGPROBS.name)
_PREFIX = "input_"
_TYPES: Mapping[frozenset[type], pa.DataType] = {
    frozenset(): pa.string(),
    frozenset({str}): pa.string(),
    frozenset({bool}): pa.bool_(),
    frozenset({int}): pa.int64(),
    frozenset({float}): pa.float64(),
    frozenset({int, float}): pa.float64(),
}
OwnRow: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True)
class OwnColumns:
    """The user's own columns.

    Attributes:
        rows: Opens those of all rows, in order; a line that gives no row has none.
        schema: Their types, if the input has types.
    """

    rows: Callable[[], Iterator[OwnRow]]
    schema: pa.Schema | None = None

    def table(self) -> tuple[pa.Schema, Callable[[OwnRow], OwnRow]]:
        """Types for Parquet, and a function that gives a row's values these types.

        Types that the input does not have are found by reading its rows. A column then has a type
        of its own if all its values are texts, numbers or booleans; others become JSON texts.
        """
        if self.schema is not None:
            return self.schema, dict
        kinds = defaultdict[str, set[type]](set)
        for row in self.rows():
            for name, value in row.items():
                kinds[name].update(_kind(value))
        types = {name: _TYPES.get(frozenset(found)) for name, found in kinds.items()}

        def typed(row: OwnRow) -> OwnRow:
            return {name: _cell(value, types[name]) for name, value in row.items()}

        return pa.schema([(n, t or pa.string()) for n, t in types.items()]), typed


def beside(names: Iterable[str], id_field: str) -> dict[str, str]:
    """The names that the user's own columns have beside an answer.

    A name that the answers have gets ``input_`` in front, and so does one that would be the same
    then: ``text`` becomes ``input_text``, and ``input_text`` becomes ``input_input_text``. If the
    ids of rows are in ``id``, the answers have them already. Lone surrogates become escapes.
    """
    found = {}
    for name in names:
        own = name
        while own.startswith(_PREFIX) and own not in _TAKEN:
            own = own.removeprefix(_PREFIX)
        if name != "id" or name != id_field:
            shown = name.encode(errors="backslashreplace").decode()
            found[name] = _PREFIX + shown if own in _TAKEN else shown
    return found


def json_row(row: OwnRow) -> OwnRow:
    """A row for JSON lines: times as ISO texts, bytes in base64, NaN and infinities as null."""
    return {name: _plain(value) for name, value in row.items()}


def _plain(value: Any) -> Any:
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {str(key): _plain(one) for key, one in value.items()}
        case list() | tuple():
            return [_plain(one) for one in value]
        case datetime.date() | datetime.time():
            return value.isoformat()
        case bytes():
            return base64.b64encode(value).decode()
    return str(value)


def _kind(value: Any) -> tuple[type, ...]:
    """What of `_TYPES` a value is; object if it is none of them."""
    if value is None:
        return ()
    if type(value) is int and value.bit_length() > 63:
        return (object,)
    if type(value) is str and not is_unicode(value):
        return (object,)
    return (type(value),)


def _cell(value: Any, type_: pa.DataType | None) -> Any:
    if value is None:
        return None
    if type_ is None:
        return json.dumps(_plain(value), ensure_ascii=not is_unicode(str(value)))
    return float(value) if pa.types.is_floating(type_) else value
