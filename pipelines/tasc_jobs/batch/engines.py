"""Engines of a batch job in Ray actors. Each engine answers rows; a pool replaces dead engines.

A job does not wait until all its engines have started. Rows go to the running engines. A cluster
without room for all engines runs fewer engines.
"""

import dataclasses
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import ray
from ray.exceptions import RayError, RayTaskError

from tasc_engine.errors import UnsupportedModel
from tasc_jobs.batch.repeats import Repeats
from tasc_jobs.batch.work import EngineFailed, Read, Record, Row, Strategy
from tasc_jobs.errors import ClusterError, JobError
from tasc_jobs.preview import Preview, preview
from tasc_protocol import Output, Request, Whole
from tasc_runtime.engine.versions import Pinned
from tasc_runtime.engine_settings import EngineSettings
from tasc_runtime.errors import FileError, ServiceError
from tasc_runtime.protocol import AnswerTexts
from tasc_store import connect

if TYPE_CHECKING:  # a job's own process needs no torch
    from tasc_runtime.engine.builder import EngineBuilder

_MAX_WORK_S = 1.0  # maximum time of a call, after which finished rows are returned
_IN_FLIGHT = 2  # calls per engine: one that it processes and one that waits
HANDFULS = 4  # maximum rows of a call, as a multiple of b
_MAX_DEATHS = 3  # consecutive deaths per engine without a finished row in between
_TASKS = (ServiceError, UnsupportedModel)  # errors of the task, not of a machine
_MAX_WAITING = 1 << 20  # limit of requests waiting in an engine; few rows are sent at a time
_MAX_CHARACTERS = 64 << 20


class Queue(Protocol):
    """The rows or parts that are not finished yet."""

    @property
    def empty(self) -> bool:
        """Whether all are finished."""

    @property
    def has_room(self) -> bool:
        """Whether `read` can read more."""

    def read(self, max_rows: int) -> list[Row] | None: ...
    def take(self, max_rows: int) -> Sequence[Any]: ...
    def requeue(self, ordinals: Iterable[int]) -> None: ...
    def finish(self, records: Iterable[Any]) -> list[Any]: ...


class ReorderBuffer:
    """The rows that a job has read from its input and that are not finished yet.

    At most ``max_ahead`` rows are read ahead, counted from the first unfinished row. Reading also
    pauses while the unfinished rows have 64 Mi characters or more.

    Args:
        rows: All rows, in order.
        first: Rows before this one are finished; they are read and skipped.
        finished: Finished rows after ``first``.
        repeats: Answers rows that repeat an earlier row; by default, engines answer all rows.
    """

    def __init__(
        self,
        rows: Iterator[Row],
        first: int = 0,
        finished: Iterable[int] = (),
        max_ahead: int = 8192,
        repeats: Repeats | None = None,
    ) -> None:
        self._source, self._max_ahead = rows, max_ahead
        self._repeats = repeats or Repeats()
        self._first, self._next = first, 0
        self._finished = set(finished)
        self._open: dict[int, Row] = {}
        self._todo: deque[int] = deque()
        self._requeued: deque[int] = deque()
        self._characters = 0
        self._ended = False

    @property
    def empty(self) -> bool:
        """Whether the input has ended and all its rows are finished."""
        return self._ended and not self._open

    @property
    def has_room(self) -> bool:
        ahead = self._next - self._first
        return not self._ended and ahead < self._max_ahead and self._characters < _MAX_CHARACTERS

    def read(self, max_rows: int) -> list[Row] | None:
        """Read up to ``max_rows`` rows while there is room.

        Returns:
            The rows that are not finished yet; None if no row was read.
        """
        entered, count = [], 0
        while count < max_rows and self.has_room:
            row = next(self._source, None)
            if row is None:
                self._ended = True
                break
            count += 1
            self._next = row.ordinal + 1
            if row.ordinal >= self._first and row.ordinal not in self._finished:
                self._open[row.ordinal] = row
                self._characters += len(row.payload)
                if row.refused or not self._repeats.add(row):
                    self._todo.append(row.ordinal)
                entered.append(row)
        return entered if count else None

    def take(self, max_rows: int) -> list[Row]:
        """Returns rows for an engine, beginning with rows that are sent again."""
        taken: list[Row] = []
        for queue in (self._requeued, self._todo):
            while queue and len(taken) < max_rows:
                if row := self._open.get(queue.popleft()):
                    taken.append(row)
        return taken

    def requeue(self, ordinals: Iterable[int]) -> None:
        """Queue rows again: their engine died, or the row that they repeat failed."""
        self._requeued.extend(sorted(ordinals))

    def finish(self, records: Iterable[Record]) -> list[Record]:
        """Remove finished rows and their repeats.

        Returns:
            The records of rows that were not finished before, those of repeats included.
        """
        new = []
        for record in records:
            if row := self._remove(record):
                new.append(record)
                if not row.refused:
                    self.requeue(each.ordinal for each in self._repeats.finish(row, record))
        new += [record for record in self._repeats.copies() if self._remove(record)]
        while self._first in self._finished:
            self._finished.remove(self._first)
            self._first += 1
        return new

    def _remove(self, record: Record) -> Row | None:
        """Returns the row of a record, which is now finished; None if it was finished before."""
        if row := self._open.pop(record.ordinal, None):
            self._characters -= len(row.payload)
            self._finished.add(row.ordinal)
        return row


@dataclass
class _Open:
    """A row with answers that are still missing."""

    row: Row
    requests: Sequence[Read]
    answers: dict[int, Whole] = field(default_factory=dict)


class Answering:
    """Answers rows by one engine, which stays busy from one call to the next."""

    def __init__(self, builder: "EngineBuilder", strategy: Strategy) -> None:
        self._builder, self._strategy = builder, strategy
        self._open: dict[int, _Open] = {}

    def work(self, rows: Sequence[Row]) -> list[Record]:
        """Submit rows, and decode until there is room for more or a second has passed.

        On a GPU, a forward may still run when this method returns; the next call waits for it.
        The engine is stepped on this thread. If the engine had its own thread, that thread would
        wait for Python's interpreter lock while this thread reads rows.

        Returns:
            Records of the rows, from this or earlier calls, that finished since the last call.
        """
        records = [record for row in rows if (record := self._begin(row))]
        engine, end = self._builder.engine, time.monotonic() + _MAX_WORK_S
        while (engine.running or engine.waiting) and time.monotonic() < end:
            engine.launch()
            records += self._take_all(engine.outputs())
            has_room = bool(rows) and engine.waiting < engine.config.rows
            if engine.overlaps and (has_room or time.monotonic() >= end):
                return records  # rows are passed on and submitted while the forward runs
            engine.collect()
            if has_room:
                break
        records += self._take_all(engine.outputs())
        return records

    def _take_all(self, outputs: Sequence[Output]) -> list[Record]:
        """Keeps answers; returns the records of rows whose last answer is among them."""
        taken = (self._take(output) for output in outputs if output.result)
        return [record for record in taken if record]

    def _begin(self, row: Row) -> Record | None:
        """Submits the requests of a row; returns the record of a row that cannot be answered."""
        if row.ordinal in self._open:
            return None
        try:
            requests = self._strategy.requests(row, self._builder)
        except ValueError as error:
            return Record.of(row, None, str(error))
        self._open[row.ordinal] = _Open(row, requests)
        for _, request in requests:
            self._builder.engine.submit(request)
        return None

    def _take(self, made: Output) -> Record | None:
        """Keeps an answer; returns the record of its row if no other answer is missing."""
        ordinal, number = map(int, made.id.split("."))
        found, artifact = self._open[ordinal], self._builder.artifact
        texts = AnswerTexts(self._builder.tokenizer, *found.requests[number])
        output = texts.output(made, artifact.version if artifact else None)
        assert output.result is not None
        found.answers[number] = output.result, output.token_texts
        if len(found.answers) < len(found.requests):
            return None
        del self._open[ordinal]
        answers = [found.answers[i] for i in range(len(found.requests))]
        results = [result for result, _ in answers]
        error = next((result.error for result in results if result.error), None)
        record = self._builder.record
        content = None if error else self._strategy.content(found.row, answers, record)
        tokens = sum(len(result.tokens) for result in results)
        steps = sum(result.acceptance.steps for result in results)
        return Record.of(found.row, content, error, tokens, steps)


def measure(builder: "EngineBuilder", strategy: Strategy, rows: Sequence[Row]) -> Preview:
    """Answer a few rows with and without drafts, and measure the time."""
    requests: list[Request] = []
    refused: list[str] = []
    for row in rows:
        try:
            requests += [request for _, request in strategy.requests(row, builder)]
        except ValueError as error:
            refused.append(f"row {row.ordinal + 1}: {' '.join(str(error).split())}")
    found = preview(builder.engine, requests, len(refused))
    return dataclasses.replace(found, first_error=next(iter(refused), None))


@dataclass(frozen=True)
class EngineSpec:
    """The arguments from which an actor builds its engine."""

    url: str
    task: str
    pinned: Pinned
    settings: EngineSettings
    strategy: Strategy
    gpus: float

    @property
    def actor(self) -> "type[EngineActor]":
        return EngineActor

    @property
    def handful(self) -> int:
        """Maximum number of rows of a call."""
        return HANDFULS * self.settings.rows


class EngineActor:
    """One engine in its own process."""

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec

    def load(self) -> None:
        """Build the engine, which takes seconds to minutes."""
        self._answering = Answering(self._built(), self._spec.strategy)

    def work(self, rows: Sequence[Row]) -> list[Record]:
        return self._answering.work(rows)

    def preview(self, rows: Sequence[Row]) -> Preview:
        """Build the engine, and measure the time of a few rows with and without drafts."""
        return measure(self._built(), self._spec.strategy, rows)

    def _built(self) -> "EngineBuilder":
        from tasc_runtime.engine.builder import EngineBuilder

        spec = self._spec
        return EngineBuilder.of_task(
            connect(spec.url),
            spec.task,
            spec.settings,
            gpus=spec.gpus,
            max_waiting=_MAX_WAITING,
            pinned=spec.pinned,
        )


@dataclass
class _Engine:
    """An engine's actor, its unfinished calls, and the ordinals of its unfinished rows."""

    actor: Any
    calls: list[Any] = field(default_factory=list)
    rows: set[int] = field(default_factory=set)
    running: bool = False


class Pool:
    """Up to ``size`` engines with ``cpus`` logical CPUs each.

    Args:
        pause_s: Seconds before a dead engine is replaced.
        look_s: Seconds between two checks of the cluster's nodes while no engine is running.
    """

    def __init__(
        self,
        spec: EngineSpec,
        size: int,
        cpus: float,
        *,
        pause_s: float = 1.0,
        look_s: float = 5.0,
    ) -> None:
        self._spec, self._size, self._pause_s, self._look_s = spec, size, pause_s, look_s
        self._new: Any = ray.remote(
            num_cpus=cpus,
            num_gpus=spec.gpus,
            max_restarts=0,
            runtime_env=spec.settings.runtime_env,
        )(spec.actor)
        self._engines: list[_Engine] = []
        self._deaths = 0
        self._start_at = 0.0
        self._look_at = time.monotonic() + look_s

    @property
    def running(self) -> int:
        return sum(engine.running for engine in self._engines)

    @property
    def rows_in_flight(self) -> int:
        """Number of rows that were sent to engines and are not finished."""
        return sum(len(engine.rows) for engine in self._engines)

    def poll(self, buffer: Queue, wait_s: float) -> list[Any]:
        """Send rows to engines and return finished ones, after at most ``wait_s`` seconds.

        The rows of a dead engine are sent again.

        Raises:
            JobError: Engines died repeatedly.
            EngineFailed: The engines cannot be built.
            ClusterError: Ray is no longer running.
        """
        self._require_nodes()
        self._fill()
        for engine in self._engines:
            self._feed(engine, buffer)
        owners = {call: engine for engine in self._engines for call in engine.calls}
        if not owners:
            time.sleep(wait_s)
            return []
        done, _ = ray.wait(list(owners), num_returns=1, timeout=wait_s)
        done, _ = ray.wait(list(owners), num_returns=len(owners), timeout=0) if done else (done, [])
        return [record for call in done for record in self._on_result(owners[call], call, buffer)]

    def preview(self, rows: Sequence[Row], timeout_s: float) -> Preview:
        """Measure the time of a few rows on one engine.

        Raises:
            JobError: The engine cannot be built, or the time limit is exceeded.
        """
        actor = self._new.remote(self._spec)
        self._engines.append(_Engine(actor))
        try:
            found: Preview = ray.get(actor.preview.remote(rows), timeout=timeout_s)
            return found
        except ray.exceptions.GetTimeoutError as error:
            raise JobError(f"no engine answered {len(rows)} rows in {timeout_s:g} s") from error
        except RayError as error:
            raise JobError(f"no engine can be built: {_cause(error)}") from error

    def close(self) -> list[int]:
        """End all engines.

        Returns:
            The ordinals of rows that were sent to them and are not finished.
        """
        for engine in self._engines:
            with suppress(RayError):
                ray.kill(engine.actor)
        unfinished = [ordinal for engine in self._engines for ordinal in engine.rows]
        self._engines.clear()
        return unfinished

    def _require_nodes(self) -> None:
        if self.running or time.monotonic() < self._look_at:
            return
        self._look_at = time.monotonic() + self._look_s
        if not any(node["Alive"] for node in ray.nodes()):
            raise ClusterError(
                "all nodes of Ray have died; start Ray and run the job again, which resumes it"
            )

    def _fill(self) -> None:
        if time.monotonic() < self._start_at:
            return
        while len(self._engines) < self._size:
            actor = self._new.remote(self._spec)
            self._engines.append(_Engine(actor, [actor.load.remote()]))

    def _feed(self, engine: _Engine, buffer: Queue) -> None:
        handful = self._spec.handful
        max_rows = (_IN_FLIGHT + 1) * handful
        while engine.running and len(engine.calls) < _IN_FLIGHT:
            rows = buffer.take(min(handful, max_rows - len(engine.rows)))
            if not rows and (engine.calls or not engine.rows):
                return
            engine.rows.update(row.ordinal for row in rows)
            engine.calls.append(engine.actor.work.remote(rows))

    def _on_result(self, engine: _Engine, call: Any, buffer: Queue) -> list[Any]:
        if call not in engine.calls:  # the engine died, and another of its calls failed
            return []
        engine.calls.remove(call)
        try:
            records: list[Any] | None = ray.get(call)
        except RayError as error:
            self._mark_dead(engine, error, buffer)
            return []
        if records is None:
            engine.running = True
            return []
        finished = [record.ordinal for record in records if record.is_whole]
        engine.rows.difference_update(finished)
        self._deaths = 0 if finished else self._deaths
        return records

    def _mark_dead(self, engine: _Engine, error: RayError, buffer: Queue) -> None:
        self._engines.remove(engine)
        engine.calls.clear()
        with suppress(RayError):
            ray.kill(engine.actor)
        self._deaths += 1
        if isinstance(error, RayTaskError) and isinstance(error.cause, FileError):
            raise JobError(str(error.cause)) from error
        if self._deaths >= _MAX_DEATHS * self._size:
            machines = not engine.running and not _is_error_of_task(error)
            raise (EngineFailed if machines else JobError)(
                f"engines ended {self._deaths} times without a finished row: {_cause(error)}; fix"
                " the cause and run the job again, which resumes it"
            ) from error
        self._start_at = time.monotonic() + self._pause_s
        buffer.requeue(engine.rows)


def _is_error_of_task(error: RayError) -> bool:
    """Whether an engine of the task has this error on every machine."""
    return isinstance(error, RayTaskError) and isinstance(error.cause, _TASKS)


def _cause(error: RayError) -> str:
    """Returns the message of the engine's error, without Ray's traceback."""
    if isinstance(error, RayTaskError) and isinstance(error.cause, Exception):
        return f"{type(error.cause).__name__}: {error.cause}"
    return str(error).strip().splitlines()[-1]
