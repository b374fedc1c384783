"""What a batch job's parts say to each other: rows, records, and how a row becomes an answer.

Values that travel between processes. It reads no file and knows no Ray.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

from tasc_serve.calls import Answer, Call
from tasc_serve.worker import Worker


@dataclass(frozen=True)
class Row:
    """One row of a job's input.

    Attributes:
        ordinal: From 0, without gaps, and the same at every start of the job.
        payload: What the job's strategy makes calls of.
        line: Of its file, from 1.
        file: Of several files the one it is from.
        refused: Why it is no row; then no engine sees it.
    """

    ordinal: int
    id: str
    payload: str
    line: int
    file: str | None = None
    refused: str | None = None


class Strategy(Protocol):
    """What rows ask for and what is kept of answers; it travels to the engines' processes."""

    def calls(self, row: Row, worker: Worker) -> Sequence[Call]:
        """One call or more; their ids do not matter.

        Raises:
            ValueError: The row cannot be answered; its record says why.
        """

    def content(self, row: Row, answers: Sequence[Answer], worker: Worker) -> dict[str, Any]:
        """What the row's record holds, for JSON; of equal answers always the same."""


def named(row: Row, calls: Sequence[Call]) -> list[Call]:
    """A row's calls, by ids that tell the row and the place among them."""
    return [
        dataclasses.replace(call, id=f"{row.ordinal}.{i}", stream=False)
        for i, call in enumerate(calls)
    ]


@dataclass(frozen=True)
class Record:
    """A finished row: content, or why there is none.

    Attributes:
        tokens: Of all its answers, end-of-sequence included.
        steps: Decoding steps of its answers.
    """

    ordinal: int
    id: str
    line: int
    file: str | None
    content: dict[str, Any] | None
    error: str | None
    tokens: int
    steps: int


@dataclass(frozen=True)
class Totals:
    """Sums over finished rows; ``first_error`` is the first row without an answer, and why."""

    rows: int = 0
    errors: int = 0
    tokens: int = 0
    steps: int = 0
    first_error: str | None = None

    def __add__(self, other: Self) -> Self:
        return type(self)(
            self.rows + other.rows,
            self.errors + other.errors,
            self.tokens + other.tokens,
            self.steps + other.steps,
            self.first_error or other.first_error,
        )

    @classmethod
    def of(cls, records: Sequence[Record]) -> Self:
        failed = [r for r in records if r.error is not None]
        first = f"row {failed[0].ordinal + 1}: {failed[0].error}" if failed else None
        tokens, steps = sum(r.tokens for r in records), sum(r.steps for r in records)
        return cls(len(records), len(failed), tokens, steps, first)


@dataclass(frozen=True)
class JobProgress:
    """How far a job is, earlier starts included.

    Attributes:
        resumed: Rows that were finished when this start began.
        engines: That are up now.
        running: Rows that they have in hand.
    """

    done: int
    resumed: int
    total: int | None
    errors: int
    tokens: int
    steps: int
    engines: int
    running: int = 0


@dataclass(frozen=True)
class JobReport:
    """What a job did.

    Attributes:
        tokens: Of all answers, end-of-sequence included.
        steps: Decoding steps of all rows together.
        first_error: The first row without an answer, counted from 1, and why.
        stopped: It was told to end before it was done; it can be resumed.
        resumed: Rows that were finished when this start began.
    """

    rows: int
    errors: int
    tokens: int
    steps: int
    first_error: str | None = None
    stopped: bool = False
    resumed: int = 0

    @property
    def block_efficiency(self) -> float:
        return self.tokens / self.steps if self.steps else 0.0
