"""One start of a batch job: what is missing is answered, what is finished is moved to its files.

A row's record is written once, to Redis, by the engine's process; moved in order to part files; and
only then removed from Redis. So there is no time at which a finished row is nowhere. The job does
not know what its rows ask for or what its output looks like.
"""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import TypeAlias, TypeVar

import ray

from tasc_jobs.batch.errors import JobStalled, NoEngine, TooManyErrors
from tasc_jobs.batch.folder import Begun, JobFolder
from tasc_jobs.batch.pool import EngineSpec, Pool
from tasc_jobs.batch.window import Saved, Window
from tasc_jobs.batch.work import JobProgress, JobReport, JobSpec, Record, Row, Totals
from tasc_store import JobResults, StoreError

_READ_ROWS = 512  # of the input in one turn
_WAIT_S = 0.2
_TOLD_S = 0.5
_RETRY_S = 0.2
_T = TypeVar("_T")

Finish: TypeAlias = Callable[[Iterable[Record], bool], None]
"""Writes the final files from records in order; told whether these are all of them."""


class Job:
    """One start of a job."""

    def __init__(
        self,
        spec: JobSpec,
        held: JobFolder,
        begun: Begun,
        results: JobResults,
        engine: EngineSpec,
        progress: Callable[[JobProgress], None],
    ) -> None:
        self._spec, self._folder, self._begun, self._results = spec, held, begun, results
        self._progress = progress
        self._pool = Pool(engine, spec.actors, spec.actor_cpus, self._lost)
        self._window = Window(iter(()), 0, (), 1)
        self._resumed = 0
        self._flushed = self._moved = time.monotonic()
        self._told = 0.0

    def run(
        self, source: Iterator[Row], finish: Finish, should_stop: Callable[[], bool]
    ) -> JobReport:
        self._open(source)
        self._tell()  # of what is done from now on, earlier starts' rows are no part
        stopped = should_stop()
        try:
            while not self._window.empty and not stopped:
                self._require_few_errors(finish)
                self._turn()
                self._require_movement()
                stopped = should_stop()
            while self._window.read(_READ_ROWS):  # what an earlier start saved may be there
                pass
            self._require_few_errors(finish)
        finally:
            self._pool.close()
        self._tell()
        stopped = not self._window.empty
        report = JobReport(**asdict(self._totals()), stopped=stopped, resumed=self._resumed)
        finish(self._records(), not stopped)
        if not stopped:
            self._folder.end(self._begun, asdict(report))
            with suppress(StoreError):  # the job is done; what it leaves there goes by itself
                self._patiently(self._results.clear)
        return report

    def _open(self, source: Iterator[Row]) -> None:
        """Find what earlier starts have done."""
        first = self._folder.resume()
        self._patiently(lambda: self._results.resume_at(first))
        there = sorted(self._patiently(self._results.rows))
        known = [row for row in there if row >= first]
        if known != there:  # the job was killed between writing a part and forgetting its entries
            self._patiently(lambda: self._results.moved(there[0], first))
        entries = self._patiently(lambda: self._results.get(known))
        saved = [_saved(row, e) for row, e in zip(known, entries, strict=True) if e is not None]
        self._window = Window(source, first, saved, self._spec.max_unflushed)
        self._resumed = first + len(saved)

    def _turn(self) -> None:
        read = self._window.read(_READ_ROWS)
        idle = not self._window.has_room
        if self._pool.turn(self._window, _WAIT_S if idle else 0.0) or read:
            self._moved = time.monotonic()
        self._flush()
        if time.monotonic() - self._told >= _TOLD_S:
            self._tell()

    def _flush(self) -> None:
        """Move what is saved to a part, if it is enough, or old enough, or all there is."""
        ready = self._window.ready
        aged = time.monotonic() - self._flushed >= self._spec.part_seconds
        full = ready == self._window.size and not self._window.has_room
        if ready >= self._spec.part_rows or (ready and (aged or full)):
            self._move(min(ready, self._spec.part_rows))

    def _move(self, count: int) -> None:
        rows = self._window.head(count)
        records = self._found(rows)
        whole = next((i for i, record in enumerate(records) if record is None), count)
        if whole < count:  # Redis has come back without what was written last
            self._window.again(rows[i].ordinal for i in range(count) if records[i] is None)
        if done := [record for record in records[:whole] if record is not None]:
            first = self._window.first
            self._folder.add(done)
            self._patiently(lambda: self._results.moved(first, first + whole))
            self._window.drop(whole)
        self._flushed = time.monotonic()

    def _found(self, rows: Sequence[Row]) -> list[Record | None]:
        """Records of rows, None where Redis has none."""
        asked = [row.ordinal for row in rows if row.refused is None]
        entries = dict(zip(asked, self._patiently(lambda: self._results.get(asked)), strict=True))
        return [_record(row, entries.get(row.ordinal)) for row in rows]

    def _records(self) -> Iterator[Record]:
        """All that is finished, in order."""
        yield from self._folder.records()
        rows = self._window.behind()
        for start in range(0, len(rows), self._spec.part_rows):
            found = self._found(rows[start : start + self._spec.part_rows])
            yield from (record for record in found if record is not None)

    def _lost(self, ordinals: set[int]) -> None:
        """An engine died: hand out again what it had not saved."""
        asked = sorted(ordinals)
        found = self._patiently(lambda: self._results.get(asked))
        there = [_saved(o, e) for o, e in zip(asked, found, strict=True) if e is not None]
        self._window.save(there)
        self._window.again(ordinals - {each.ordinal for each in there})

    def _totals(self) -> Totals:
        waiting = self._window.saved
        errors, tokens = sum(s.failed for s in waiting), sum(s.tokens for s in waiting)
        steps = sum(s.steps for s in waiting)
        return self._folder.totals + Totals(len(waiting), errors, tokens, steps)

    def _tell(self) -> None:
        self._told = time.monotonic()
        found = self._totals()
        self._progress(
            JobProgress(
                found.rows,
                self._resumed,
                self._spec.total,
                found.errors,
                found.tokens,
                found.steps,
                self._pool.up,
                self._pool.held,
            )
        )

    def _require_few_errors(self, finish: Finish) -> None:
        most = self._spec.max_errors
        if most is None or self._totals().errors <= most:
            return
        while self._window.ready:
            self._move(min(self._window.ready, self._spec.part_rows))
        found = self._totals()
        finish(self._records(), False)
        first = f" (first: {' '.join(found.first_error.split())})" if found.first_error else ""
        raise TooManyErrors(
            f"{found.errors} of {found.rows} rows have no answer{first}, and --max-errors is "
            f"{most}; raise it and run the job again, which goes on where it was, or mend the"
            " input and add --restart"
        )

    def _require_movement(self) -> None:
        stalled = time.monotonic() - self._moved
        if stalled < self._spec.stall_s:
            return
        up, size, held = self._pool.up, self._spec.actors, self._pool.held
        free = ray.available_resources() if not up else {}
        room = f"; the cluster has {free.get('CPU', 0):g} CPUs and {free.get('GPU', 0):g} GPUs free"
        raise (JobStalled if up else NoEngine)(
            f"no row was finished for {stalled:.0f} s: {up} of {size} engines are up, {held} rows "
            f"are with them{room if not up else ''}. Run the job again, it goes on where it was; "
            "if rows may take that long, raise --stall-timeout"
        )

    def _patiently(self, action: Callable[[], _T]) -> _T:
        """What ``action`` returns, as soon as Redis is there."""
        ends = time.monotonic() + self._spec.store_wait_s
        while True:
            try:
                return action()
            except StoreError:
                if time.monotonic() >= ends:
                    raise
                time.sleep(_RETRY_S)


def _record(row: Row, entry: bytes | str | None) -> Record | None:
    if row.refused is not None:
        return Record(row.ordinal, row.id, row.line, row.file, None, row.refused, 0, 0)
    if entry is None:
        return None
    return Record(row.ordinal, row.id, row.line, row.file, **json.loads(entry))


def _saved(ordinal: int, entry: bytes | str) -> Saved:
    found = json.loads(entry)
    return Saved(ordinal, found["error"] is not None, found["tokens"], found["steps"])
