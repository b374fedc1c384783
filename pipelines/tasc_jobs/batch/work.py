"""What a batch job is made of: its specification, rows and records, and how it may end.

Rows, records and strategies travel between processes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from msgspec.structs import replace

from tasc_jobs.errors import ClusterError, JobError
from tasc_runtime.engine_settings import EngineSettings

if TYPE_CHECKING:  # checking a job's input needs no torch
    from tasc_protocol import Request, Whole
    from tasc_runtime.engine.builder import EngineBuilder


@dataclass(frozen=True)
class JobSpec:
    """One job.

    Attributes:
        folder: Holds the job's state; made if its parent exists.
        pins: For JSON: whatever changes the result, except the versions of the task and its index,
            which stay those of the first start.
        actors: Engines, at most; fewer where the cluster has no room.
        actor_cpus: Logical CPUs of each.
        actor_gpus: GPUs of each; without any, engines run on the CPU.
        total: Rows, if known; for progress only.
        window_rows: Rows that are read ahead of the first unfinished one, at most.
        max_errors: More rows without an answer fail the job, and so does a job without any answer.
            None: neither does.
        stall_s: Seconds without a finished row that end the job.
        restart: Discard what an earlier start has done.
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
    window_rows: int = 8192
    max_errors: int | None = None
    stall_s: float = 600.0
    restart: bool = False


@dataclass(frozen=True)
class Row:
    """One row of a job's input.

    Attributes:
        ordinal: From 0, without gaps, and the same at every start of the job.
        payload: The strategy makes calls of it.
        line: Line of its file, from 1.
        file: Name of its file, if there are several.
        refused: Why the line gives no row; then no engine sees it.
    """

    ordinal: int
    id: str
    payload: str
    line: int
    file: str | None = None
    refused: str | None = None


class Strategy(Protocol):
    """What rows ask for and what is kept of answers; it travels to the engines' processes."""

    def requests(self, row: Row, builder: "EngineBuilder") -> Sequence["Request"]:
        """One request or more; their ids do not matter.

        Raises:
            ValueError: The row cannot be answered; its record says why.
        """

    def content(
        self, row: Row, answers: Sequence["Whole"], builder: "EngineBuilder"
    ) -> dict[str, Any]:
        """What the row's record holds, for JSON; of equal answers always the same."""


def named(row: Row, requests: Sequence["Request"]) -> list["Request"]:
    """A row's requests, with ids made of the row and the place among them."""
    return [
        replace(request, id=f"{row.ordinal}.{i}", stream=False)
        for i, request in enumerate(requests)
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
    tokens: int = 0
    steps: int = 0

    @classmethod
    def of(
        cls, row: Row, content: dict[str, Any] | None, error: str | None, *counts: int
    ) -> "Record":
        return cls(row.ordinal, row.id, row.line, row.file, content, error, *counts)


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

    @property
    def forwards(self) -> float:
        """Forward passes an answer, a mean."""
        answered = self.rows - self.errors
        return self.steps / answered if answered else 0.0


@dataclass(frozen=True)
class JobProgress:
    """How far a job is, earlier starts included.

    Attributes:
        engines: That are up now.
        running: Rows that they have in hand.
    """

    report: JobReport
    total: int | None
    engines: int
    running: int = 0


@dataclass
class Totals:
    """Sums over finished rows, in whatever order they come."""

    rows: int = 0
    errors: int = 0
    tokens: int = 0
    steps: int = 0
    _first: Record | None = field(default=None, init=False)

    def add(self, record: Record) -> None:
        self.rows += 1
        self.tokens += record.tokens
        self.steps += record.steps
        if record.error is not None:
            self.errors += 1
            if self._first is None or record.ordinal < self._first.ordinal:
                self._first = record

    @property
    def first_error(self) -> str | None:
        """The first row without an answer, and why."""
        first = self._first
        return None if first is None else f"row {first.ordinal + 1}: {first.error}"

    def report(self, resumed: int, *, stopped: bool = False) -> JobReport:
        counts = self.rows, self.errors, self.tokens, self.steps
        return JobReport(*counts, self.first_error, stopped, resumed)


class JobBusy(JobError):
    """Another process works on the same job."""


class JobChanged(JobError):
    """The job began with another input or other settings."""


class JobUnreadable(JobError):
    """The job's settings at the start cannot be read: damaged, or of another release."""


class JobStalled(JobError):
    """No row was finished for longer than it may take, or no engine came up."""


class NoEngine(JobStalled, ClusterError):
    """No engine came up in all that time."""


class EngineFailed(ClusterError):
    """Engines fail before they have seen a row: their machine is to blame."""


class TooManyErrors(JobError):
    """More rows were refused or failed than the job may have, or all of them."""
