"""A raw record of a file of rows: what stands on one line. It knows no format and no fields."""

from dataclasses import dataclass
from typing import Any

SHOWN_CHARACTERS = 200


@dataclass(frozen=True)
class RawRecord:
    """What stands on one line, or why it could not be read (then ``reason`` is not empty).

    ``line`` counts from 1; ``text`` is the line's first 200 characters.
    """

    line: int
    value: Any
    text: str
    reason: str = ""


def too_long(max_bytes: int) -> str:
    """The reason for a line over the bound."""
    return f"longer than {max_bytes} bytes"
