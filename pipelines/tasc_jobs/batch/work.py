"""The specification, rows, records, reports and errors of a batch job.

Rows, records and strategies are sent between processes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias

from msgspec.structs import replace

from tasc_jobs.errors import ClusterError, JobError
from tasc_runtime.engine_settings import EngineSettings

if TYPE_CHECKING:  # checking a job's input needs no torch
    from tasc_protocol import Request, Whole
    from tasc_runtime.engine.builder import EngineBuilder
    from tasc_store import TaskRecord


@dataclass(frozen=True)
class JobSpec:
    """The specification of a job.

    Attributes:
        folder: Folder of the job's state; created if its parent exists.
        pins: JSON values of everything that affects the result, except the versions of the task and
            its index, which stay those of the first start.
        actors: Maximum number of engines; fewer run if the cluster has no room.
        actor_cpus: Logical CPUs of each engine.
        actor_gpus: GPUs of each engine; with 0, engines run on the CPU.
        total: Number of rows, if known; used only for progress.
        window_rows: Maximum number of rows that are read ahead of the first unfinished one.
        dedupe_bytes: Maximum memory of answers that are kept for rows that repeat an earlier row,
            in the job's process; for parts, in each engine and in one more process. With 0, engines
            answer all rows. The answers are equal either way.
        max_errors: Maximum number of rows without an answer. The job fails if there are more, or if
            no row has an answer. None means no limit.
        stall_s: The job ends after this many seconds without a finished row.
        restart: Whether to discard the results of earlier starts.
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
    dedupe_bytes: int = 0
    max_errors: int | None = None
    stall_s: float = 600.0
    restart: bool = False


@dataclass(frozen=True)
class Row:
    """One row of a job's input.

    Attributes:
        ordinal: Index from 0, without gaps, and the same at every start of the job.
        payload: Text from which the strategy makes requests.
        line: Line number in its file, from 1.
        file: Name of its file, if there are several.
        refused: Reason why the line is invalid; such a row is not sent to an engine.
        place: Number of the row's random numbers, below 2**32; None means the ordinal.
    """

    ordinal: int
    id: str
    payload: str
    line: int
    file: str | None = None
    refused: str | None = None
    place: int | None = None


Read: TypeAlias = "tuple[Request, Request]"
"""The request as the strategy made it, and the same request as the engine accepts it."""


class Strategy(Protocol):
    """Makes requests from rows, and records from answers, in the engines' processes."""

    def requests(self, row: Row, builder: "EngineBuilder") -> Sequence[Read]:
        """Returns one or more requests with ids from `row_request`.

        Raises:
            ValueError: The row cannot be answered; the row's record has the message.
        """

    def content(self, row: Row, answers: Sequence["Whole"], record: "TaskRecord") -> dict[str, Any]:
        """Returns the content of the row's record as JSON values, equal for equal answers."""

    def is_repeatable(self, record: "TaskRecord") -> bool:
        """Whether rows with equal payloads have equal contents."""


def row_request(request: "Request", row: Row, index: int = 0) -> "Request":
    """Returns a request of a row with an id made of the row's ordinal and the request's index."""
    return replace(request, id=f"{row.ordinal}.{index}", stream=False)


@dataclass(frozen=True)
class Record:
    """A finished row: its content, or the reason why it has no content.

    Attributes:
        tokens: Number of tokens of all its answers, end-of-sequence included; 0 for a repeat.
        steps: Number of decoding steps of its answers; 0 for a repeat.
        repeat: Whether the content was copied from another row of the job.
    """

    ordinal: int
    id: str
    line: int
    file: str | None
    content: dict[str, Any] | None
    error: str | None
    tokens: int = 0
    steps: int = 0
    repeat: bool = field(default=False, kw_only=True)

    @classmethod
    def of(
        cls, row: Row, content: dict[str, Any] | None, error: str | None, *counts: int
    ) -> "Record":
        return cls(row.ordinal, row.id, row.line, row.file, content, error, *counts)

    is_whole: ClassVar = True


@dataclass(frozen=True)
class JobReport:
    """The results of a job.

    Attributes:
        tokens: Number of tokens of all decoded answers, end-of-sequence included.
        steps: Number of decoding steps of all rows together.
        first_error: The first row without an answer, counted from 1, and the reason.
        stopped: Whether the job was stopped before it was finished; it can be resumed.
        resumed: Number of rows that were already finished at this start.
        repeats: Number of rows whose answer was copied from an equal row and not decoded.
    """

    rows: int
    errors: int
    tokens: int
    steps: int
    first_error: str | None = None
    stopped: bool = False
    resumed: int = 0
    repeats: int = 0

    @property
    def block_efficiency(self) -> float:
        return self.tokens / self.steps if self.steps else 0.0

    @property
    def forwards(self) -> float:
        """Mean number of forward passes per decoded answer."""
        decoded = self.rows - self.errors - self.repeats
        return self.steps / decoded if decoded else 0.0


@dataclass(frozen=True)
class PartRecord:
    """A part of a job's output: how many of its rows are finished.

    Attributes:
        ordinal: Index of the part.
        is_whole: Whether the part is written.
    """

    ordinal: int
    report: JobReport
    is_whole: bool


@dataclass(frozen=True)
class JobProgress:
    """The progress of a job, including earlier starts.

    Attributes:
        engines: Number of engines that are running now.
        running: Number of rows that were sent to engines and are not finished.
    """

    report: JobReport
    total: int | None
    engines: int
    running: int = 0


@dataclass
class Totals:
    """Sums over finished rows; their order does not matter."""

    rows: int = 0
    errors: int = 0
    tokens: int = 0
    steps: int = 0
    repeats: int = 0
    _first: tuple[int, str] | None = field(default=None, init=False)

    def add(self, record: Record) -> None:
        error = record.error is not None
        counts = 1, int(error), record.tokens, record.steps, int(record.repeat)
        self._add(*counts)
        if error:
            self._found(record.ordinal, f"row {record.ordinal + 1}: {record.error}")

    def add_part(self, part: PartRecord) -> None:
        found = part.report
        self._add(found.rows, found.errors, found.tokens, found.steps, found.repeats)
        if found.first_error:
            self._found(part.ordinal, found.first_error)

    def _add(self, rows: int, errors: int, tokens: int, steps: int, repeats: int) -> None:
        self.rows += rows
        self.errors += errors
        self.tokens += tokens
        self.steps += steps
        self.repeats += repeats

    def _found(self, ordinal: int, error: str) -> None:
        if self._first is None or ordinal < self._first[0]:
            self._first = ordinal, error

    @property
    def first_error(self) -> str | None:
        """The first row without an answer, and the reason."""
        return self._first[1] if self._first else None

    def report(self, resumed: int, *, stopped: bool = False) -> JobReport:
        counts = self.rows, self.errors, self.tokens, self.steps
        return JobReport(*counts, self.first_error, stopped, resumed, self.repeats)


class JobBusy(JobError):
    """Another process is running the same job."""


class JobChanged(JobError):
    """The job was started earlier with another input or other settings."""


class JobUnreadable(JobError):
    """The file of the job's settings at the start is damaged, or another release wrote it."""


class JobStalled(JobError):
    """No row was finished within the time limit, or no engine started."""


class NoEngine(JobStalled, ClusterError):
    """No engine started within the time limit."""


class EngineFailed(ClusterError):
    """Engines fail before they receive a row, so the machine is the cause."""


class TooManyErrors(JobError):
    """More rows than allowed, or all of them, were refused or failed."""
