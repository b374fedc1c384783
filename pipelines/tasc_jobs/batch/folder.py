"""A job's state on disk: its settings at the start, and the record of each finished row.

Records are appended to one file as rows finish. Rows finish out of order, but within the window of
rows that the job reads ahead. `records` restores the order and holds at most one window in memory.
One process holds a folder at a time.
"""

import fcntl
import json
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

from tasc_draft.files import whole_file
from tasc_jobs.batch.work import JobBusy, JobChanged, JobUnreadable, Record, Totals
from tasc_jobs.errors import JobError
from tasc_runtime.data.rows import json_line
from tasc_runtime.errors import FileError

log = logging.getLogger(__name__)

_FORMAT = 2
_SYNC_S = 1.0
_FIELDS = tuple(field.name for field in fields(Record))
_SHOWN = 60  # characters of a setting in an error


@dataclass(frozen=True)
class Begun:
    """The contents of ``job.json``, written when the job begins.

    Attributes:
        pins: Inputs and settings that affect the output; a resumed job must have the same.
        report: Summary of the finished job; None until then.
    """

    pins: dict[str, Any]
    record_version: int
    index_version: int | None
    report: dict[str, Any] | None = None


class JobFolder:
    """The state of one job. Make one with `held`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.totals = Totals()
        self._synced = 0.0

    @classmethod
    @contextmanager
    def held(cls, path: Path) -> Iterator[Self]:
        """Lock a folder for the block. Creates it if its parent exists.

        Raises:
            JobBusy: Another process has locked the folder.
            FileError: The folder cannot be created or written to.
        """
        try:
            path.mkdir(exist_ok=True)
            lock = (path / "lock").open("a+")
        except OSError as error:
            raise FileError(
                f"cannot make the folder of the job's state ({error}); choose another"
            ) from error
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise JobBusy(
                    f"another process works on the job in {path}; wait until it ends, or write to"
                    " another output"
                ) from None
            yield cls(path)

    def begun(self) -> Begun | None:
        """Returns the job's settings at the start; None for a new job.

        Raises:
            JobUnreadable: ``job.json`` is damaged, or another release wrote it.
        """
        try:
            content = json.loads((self.path / "job.json").read_bytes())
            if content.pop("format") != _FORMAT:
                raise ValueError(f"its format is not {_FORMAT}")
            return Begun(**content)
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise JobUnreadable(
                f"{self.path / 'job.json'} cannot be read ({error}); start again with --restart"
            ) from error

    def begin(
        self, pins: Mapping[str, Any], record_version: int, index_version: int | None
    ) -> Begun:
        self.discard()
        self._write_begun(Begun(dict(pins), record_version, index_version))
        begun = self.begun()
        assert begun is not None
        return begun

    def repin(self, begun: Begun, index_version: int | None) -> Begun:
        """Continue with another draft index; finished rows are kept."""
        found = replace(begun, index_version=index_version)
        self._write_begun(found)
        return found

    def end(self, begun: Begun, report: Mapping[str, Any]) -> None:
        """Save the job's report, and delete its records."""
        self._write_begun(replace(begun, report=dict(report)))
        self._records.unlink(missing_ok=True)

    def discard(self) -> None:
        """Delete ``job.json``, then the records. The lock file stays."""
        (self.path / "job.json").unlink(missing_ok=True)
        self._records.unlink(missing_ok=True)
        self.totals = Totals()

    def resume(self) -> tuple[int, set[int]]:
        """Count the existing records in `totals`.

        A killed process may leave half a record. The first damaged record and all that follow are
        removed, and their rows are answered again.

        Returns:
            The first row without a record, and the later rows that have one.
        """
        self.totals = Totals()
        first, behind, whole = 0, set[int](), 0
        for record, end in self._read():
            self.totals.add(record)
            behind.add(record.ordinal)
            while first in behind:
                behind.remove(first)
                first += 1
            whole = end
        if self._records.exists() and whole < (size := self._records.stat().st_size):
            log.warning("%s: %d damaged bytes are removed", self._records, size - whole)
            os.truncate(self._records, whole)
        return first, behind

    def add(self, records: Sequence[Record]) -> None:
        """Append records. The last records are lost only if the machine fails."""
        with self._records.open("ab") as file:
            for record in records:
                file.write(json_line([getattr(record, name) for name in _FIELDS]))
                self.totals.add(record)
            file.flush()
            if time.monotonic() - self._synced >= _SYNC_S:
                os.fsync(file.fileno())
                self._synced = time.monotonic()

    def records(self, whole: bool = False) -> Iterator[Record]:
        """Yields the records in the order of their rows.

        Args:
            whole: Require a record for each row that `totals` counts.

        Raises:
            JobError: ``whole`` is set, and a record is missing or damaged. The error is raised only
                after all earlier records were yielded, so replace the output only when the
                iteration is complete.
        """
        following, ahead = 0, dict[int, Record]()
        for record, _ in self._read():
            ahead[record.ordinal] = record
            while following in ahead:
                yield ahead.pop(following)
                following += 1
        if whole and (ahead or following != self.totals.rows):
            raise JobError(
                f"{self._records} is damaged: {following} of {self.totals.rows} records can be read"
                " in order; run the job again, which answers the other rows again"
            )
        yield from (ahead[ordinal] for ordinal in sorted(ahead))  # a stopped job has gaps

    def _read(self) -> Iterator[tuple[Record, int]]:
        """Yields each record before the first damaged one, in file order, and its end offset."""
        end = 0
        with suppress(FileNotFoundError), self._records.open("rb") as lines:
            for line in lines:
                try:
                    record = Record(**dict(zip(_FIELDS, json.loads(line), strict=True)))
                except (ValueError, TypeError):
                    return
                if not line.endswith(b"\n"):
                    return
                end += len(line)
                yield record, end

    @property
    def _records(self) -> Path:
        return self.path / "records.jsonl"

    def _write_begun(self, begun: Begun) -> None:
        with whole_file(self.path / "job.json") as file:
            file.write(json_line({"format": _FORMAT, **asdict(begun)}))


def require_same(begun: Begun, pins: Mapping[str, Any], folder: Path) -> None:
    """Raises JobChanged if a job began with other pins."""
    now = json.loads(json.dumps(dict(pins)))
    names = sorted(n for n in {*now, *begun.pins} if now.get(n) != begun.pins.get(n))
    if not names:
        return
    differences = "; ".join(
        f"{name} was {_shown(begun.pins.get(name))}, is {_shown(now.get(name))}" for name in names
    )
    state = "has ended" if begun.report else "has begun"
    raise JobChanged(
        f"the job in {folder} {state} with another input or other settings: {differences}. Use the "
        "old input and settings, write to another output, or discard the results with --restart"
    )


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
