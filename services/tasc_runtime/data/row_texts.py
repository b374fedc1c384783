"""Converts the id, input and output of one row of a file or table to texts."""

import json
import logging
from collections.abc import Mapping
from typing import Any, Final

log = logging.getLogger(__name__)

MESSAGES: Final = "messages"
_SYSTEM: Final = ("system", "developer")
_EXACT: Final = 1 << 53  # whole floats below this are exact
_SHOWN: Final = 80


class RowTexts:
    """Reads the rows of one file or table, and logs a warning once for each kind of change.

    A value that is a number, a boolean, a list or an object becomes JSON. As an input, a list of
    chat messages becomes its one user message; as an output, its one answer. If a row has no field
    for input or output, the field ``messages`` is read instead.

    Every method raises ValueError, with the reason, for a row that cannot be read.

    Args:
        origin: Name of the file or table, for the warnings.
    """

    def __init__(self, origin: str) -> None:
        self._origin = origin
        self._warned: set[str] = set()

    def id(self, row: Mapping[str, Any], name: str) -> str | None:
        """The id of a row; None if it has none. Whole floats, as in pandas, become integers."""
        value = row.get(name)
        if isinstance(value, float) and value.is_integer() and abs(value) < _EXACT:
            value = int(value)
        if value is None or isinstance(value, str):
            return value
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"field {name!r} is neither a string nor a whole number")
        return str(value)

    def input(self, row: Mapping[str, Any], name: str) -> str:
        """The input of a row."""
        value = _value(row, name)
        return self._of_chat(value, "user") if is_chat(value) else self._text(value, name)

    def output(self, row: Mapping[str, Any], name: str) -> str:
        """The output of a row, which is not blank."""
        value = _value(row, name)
        text = self._of_chat(value, "assistant") if is_chat(value) else self._text(value, name)
        if not text.strip():
            raise ValueError("empty output")
        return text

    def _text(self, value: Any, name: str) -> str:
        if isinstance(value, str):
            return value
        if value is None:
            raise ValueError(f"field {name!r} is null, not a text")
        try:
            text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"field {name!r} is neither text nor JSON: {error}") from error
        self._warn(f"field {name!r} is not a text in every row; it is read as JSON", text)
        return text

    def _of_chat(self, messages: list[Mapping[str, Any]], role: str) -> str:
        """The text of the one message with a role."""
        roles = [message["role"] for message in messages]
        turns = roles[1:] if roles[0] in _SYSTEM else roles
        if turns not in (["user"], ["user", "assistant"], ["assistant"]) or role not in turns:
            needed = "one user message" if role == "user" else "one user message and its answer"
            shown = f"{', '.join(map(str, roles)):.{_SHOWN}}"
            raise ValueError(f"the messages have the roles {shown}; a row is {needed}")
        if turns != roles:
            self._warn(
                "system messages of rows are left out; give one to all rows with --system-prompt",
                str(messages[0].get("content")),
            )
        from tasc_runtime.sampling_options import joined_text  # here, since few files need it

        at = roles.index(role)
        try:
            return str(joined_text(messages[at].get("content")))
        except ValueError as error:
            raise ValueError(f"the content of message {at} {error}") from error

    def _warn(self, change: str, example: str) -> None:
        if change not in self._warned:
            self._warned.add(change)
            log.warning("%s: %s (first: %.*s)", self._origin, change, _SHOWN, example)


def _value(row: Mapping[str, Any], name: str) -> Any:
    if name in row and name != MESSAGES:
        return row[name]
    if MESSAGES not in row:
        raise ValueError(f"no field {name!r}")
    if not is_chat(row[MESSAGES]):
        raise ValueError(f"field {MESSAGES!r} is not a list of messages with roles")
    return row[MESSAGES]


def is_chat(value: Any) -> bool:
    """Whether a value is a list of messages, which have roles."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(each, Mapping) and "role" in each for each in value)
    )
