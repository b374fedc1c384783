"""The columns of an output: the columns of the answers, and the user's own columns."""

import base64
import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
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
_LABEL = [("label", pa.string()), ("probability", pa.float64())]
PROBABILITIES = [
    pa.field("probability", pa.float64()),
    pa.field("probabilities", pa.list_(pa.struct(_LABEL))),
    pa.field("unseen_mass", pa.float64()),
]
_TAKEN = (*ANSWER.names, LOGPROBS.name, *(field.name for field in PROBABILITIES))
_PREFIX = "input_"


class _NoFloat:
    """An integer that a float cannot represent exactly, such as most integers above 2**53."""


_TYPES: Mapping[frozenset[type], pa.DataType] = {
    frozenset(): pa.string(),
    frozenset({str}): pa.string(),
    frozenset({bool}): pa.bool_(),
    frozenset({int}): pa.int64(),
    frozenset({float}): pa.float64(),
    frozenset({int, float}): pa.float64(),
    frozenset({int, _NoFloat}): pa.int64(),
}
OwnRow: TypeAlias = Mapping[str, Any]
"""Values by column: JSON values, or Arrow arrays of length 1 for Parquet files."""


@dataclass(frozen=True)
class OwnColumns:
    """The user's own columns.

    Attributes:
        rows: Opens the columns of all rows, in order; an invalid line has no columns.
        unchanged: Computes the input's fingerprint, and returns whether it equals the fingerprint
            at the start of the job.
        schema: Types of the columns, if the input has types.
    """

    rows: Callable[[], Iterator[OwnRow]]
    unchanged: Callable[[], bool]
    schema: pa.Schema | None = None

    def table(self) -> tuple[pa.Schema, Callable[[OwnRow], OwnRow]]:
        """Returns the types for Parquet, and a function that converts a row's values to them.

        If the input has no types, its rows are read to find them. A column then keeps its type if
        all its values are texts, numbers or booleans. Other columns become JSON texts, and so do
        columns with floats and with integers that a float cannot represent exactly.
        """
        if self.schema is not None:
            return self.schema, dict
        kinds = defaultdict[str, set[type]](set)
        for row in self.rows():
            for name, value in row.items():
                kinds[name].update(_kind(_python(value)))
        types = {name: _TYPES.get(frozenset(found)) for name, found in kinds.items()}

        def typed(row: OwnRow) -> OwnRow:
            return {name: _cell(_python(value), types[name]) for name, value in row.items()}

        return pa.schema([(n, t or pa.string()) for n, t in types.items()]), typed


def beside(names: Iterable[str], id_field: str) -> dict[str, str]:
    """Returns the names of the user's own columns in the output.

    A name that is also a column of the answers gets the prefix ``input_``, and so does a name that
    would equal such a prefixed name: ``text`` becomes ``input_text``, and ``input_text`` becomes
    ``input_input_text``. If ``id`` has the ids of rows, it is left out, because the answers already
    have the ids. Lone surrogates become escapes.
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
    """Returns a row for JSON lines.

    Times become ISO texts, bytes become base64, and NaN and infinities become null.
    """
    return {name: _plain(_python(value)) for name, value in row.items()}


def _python(value: Any) -> Any:
    """Converts a value from Arrow; times become ISO texts with any year and any precision."""
    if isinstance(value, pa.Array):
        value = value[0]
    if not isinstance(value, pa.Scalar):
        return value
    match value:
        case _ if not value.is_valid:
            return None
        case pa.UuidScalar():
            return str(value.as_py())
        case pa.ExtensionScalar() | pa.DictionaryScalar():
            return _python(value.value)
        case pa.ListScalar():  # also the type of maps, whose pairs are structs
            items = map(_python, value.values)
            return [[*item.values()] if pa.types.is_map(value.type) else item for item in items]
        case pa.StructScalar():
            return {key: _python(one) for key, one in value.items()}
        case pa.StringScalar():
            return value.as_buffer().to_pybytes().decode(errors="backslashreplace")
    return _time(value) if pa.types.is_temporal(value.type) else value.as_py()


def _time(value: pa.Scalar) -> Any:
    """Returns a time as text, formatted by Arrow if Python cannot represent its value."""
    if getattr(value.type, "unit", "") != "ns":
        with suppress(ValueError, OverflowError, LookupError):
            found = value.as_py()
            return str(found) if pa.types.is_duration(value.type) else found.isoformat()
    if pa.types.is_duration(value.type):
        return f"{value.value} {value.type.unit}"
    if pa.types.is_interval(value.type):
        return value.as_py()
    text = str(value.cast(pa.string())).replace(" ", "T").replace("Z", "+00:00")
    return re.sub(r"([+-]\d\d)(\d\d)$", r"\1:\2", text)


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
        case bytes():
            return base64.b64encode(value).decode()
    return str(value)


def _kind(value: Any) -> tuple[type, ...]:
    """Returns the types of a value that `_TYPES` may list; empty for None."""
    if value is None:
        return ()
    if type(value) is int and value.bit_length() > 63:
        return (object,)
    if type(value) is str and not is_unicode(value):
        return (object,)
    if type(value) is int and float(value) != value:
        return (int, _NoFloat)
    return (type(value),)


def _cell(value: Any, type_: pa.DataType | None) -> Any:
    if value is None:
        return None
    if type_ is None:
        return json.dumps(_plain(value), ensure_ascii=not is_unicode(str(value)))
    return float(value) if pa.types.is_floating(type_) else value
