"""Values that travel between the processes of a batch job: its specification, rows and records."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self

from tasc_runtime.engine.builder import EngineBuilder
from tasc_runtime.engine_settings import EngineSettings
from tasc_runtime.protocol import Answer, Call


@dataclass(frozen=True)
class JobSpec:
    """One job.

    Attributes:
        folder: Where its state is; made if its parent is there.
        pins: For JSON: whatever changes the result, but for the versions of task and index, which
            are those of the first start.
        actors: Most engines; fewer where the cluster has no room.
        actor_cpus: Logical CPUs of each.
        actor_gpus: GPUs of each; without any, engines run on the CPU.
        total: Rows, if known; for progress only.
        max_unflushed: Most results in Redis, and rows in memory, that are in no file.
        part_rows: Rows of a part file at most.
        part_seconds: A part is written after so long, however few its rows.
        max_errors: More rows without an answer end the job; unset: any number may be.
        stall_s: No row finished for so long, in seconds, ends the job.
        store_wait_s: Redis may be away so long, in seconds.
        restart: Throw away what an earlier start has done.
    """

    url: str
    task: str
    folder: Path
    pins: Mapping[str, Any]
    engine: EngineSettings = field(default_factory=EngineSettings)
    actors: int = 1
    actor_cpus: float = 0.5
    actor_gpus: float = 0.0
    total: int | None = None
    max_unflushed: int = 8192
    part_rows: int = 1000
    part_seconds: float = 30.0
    max_errors: int | None = None
    stall_s: float = 600.0
    store_wait_s: float = 60.0
    restart: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.part_rows <= self.max_unflushed:
            raise ValueError(
                f"part_rows is {self.part_rows}; it goes from 1 to max_unflushed, which is "
                f"{self.max_unflushed}"
            )


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

    def calls(self, row: Row, worker: EngineBuilder) -> Sequence[Call]:
        """One call or more; their ids do not matter.

        Raises:
            ValueError: The row cannot be answered; its record says why.
        """

    def content(self, row: Row, answers: Sequence[Answer], worker: EngineBuilder) -> dict[str, Any]:
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
