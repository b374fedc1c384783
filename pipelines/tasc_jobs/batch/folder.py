"""A job's state: its settings at the start, and the record of each finished row.

Records are appended to one file as rows finish. Rows finish out of order, but within the window of
rows that the job reads ahead. `records` restores the order and holds at most one window in memory.
One process holds a folder at a time.
"""

import fcntl
import json
import logging
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields, replace
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
        parts: Summary of each finished part, by its file name, if the output has parts.
    """

    pins: dict[str, Any]
    record_version: int
    index_version: int | None
    report: dict[str, Any] | None = None
    parts: dict[str, Any] = field(default_factory=dict)


class JobState(ABC):
    """The state of one job, wherever it is stored."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.totals = Totals()

    @abstractmethod
    def begun(self) -> Begun | None:
        """Returns the job's settings at the start; None for a new job.

        Raises:
            JobUnreadable: They are damaged, or another release wrote them.
        """

    @abstractmethod
    def write_begun(self, begun: Begun) -> None:
        """Replace the job's settings."""

    @abstractmethod
    def discard(self) -> None:
        """Delete the settings and all records."""

    @abstractmethod
    def add(self, records: Sequence[Any]) -> None:
        """Keep new records, and count them in `totals`."""

    def records(self, whole: bool = False) -> Iterator[Record]:
        """Yields the records of rows from which the output is still to be written, in order."""
        return iter(())

    def begin(
        self, pins: Mapping[str, Any], record_version: int, index_version: int | None
    ) -> Begun:
        self.discard()
        made = Begun(dict(pins), record_version, index_version)
        begun = read_begun(begun_line(made), self.where)  # as a resumed job reads it
        self.write_begun(begun)
        return begun

    def repin(self, begun: Begun, index_version: int | None) -> Begun:
        """Continue with another draft index; finished rows are kept."""
        found = replace(begun, index_version=index_version)
        self.write_begun(found)
        return found

    def end(self, begun: Begun, report: Mapping[str, Any]) -> None:
        """Save the job's report."""
        self.write_begun(replace(begun, report=dict(report)))

    def require_same(self, begun: Begun, pins: Mapping[str, Any]) -> None:
        """Raises JobChanged if the job began with other pins."""
        now = json.loads(json.dumps(dict(pins)))
        names = sorted(n for n in {*now, *begun.pins} if now.get(n) != begun.pins.get(n))
        if not names:
            return
        differences = "; ".join(
            _difference(name, begun.pins.get(name), now.get(name)) for name in names
        )
        state = "was finished" if begun.report else "was begun"
        raise JobChanged(
            f"the job in {self.where} {state} with another input or other settings: {differences}. "
            "Use the old input and settings, write to another output, or discard the results with "
            "--restart"
        )


@contextmanager
def locked(path: Path, where: Path | str) -> Iterator[None]:
    """Holds a lock file for the block.

    Raises:
        JobBusy: Another process holds it.
        FileError: The file cannot be opened.
    """
    try:
        lock = path.open("a+")
    except OSError as error:
        raise FileError(f"cannot write to {where} ({error}); choose another place") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise JobBusy(
                f"another process works on the job in {where}; wait until it ends, or write to"
                " another output"
            ) from None
        yield


class JobFolder(JobState):
    """The state of a job in a folder on disk. Make one with `held`."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self.path = path
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
        except OSError as error:
            raise FileError(
                f"cannot make the folder of the job's state ({error}); choose another"
            ) from error
        with locked(path / "lock", path):
            yield cls(path)

    def begun(self) -> Begun | None:
        with suppress(FileNotFoundError):
            return read_begun((self.path / "job.json").read_bytes(), self.path / "job.json")
        return None

    def write_begun(self, begun: Begun) -> None:
        with whole_file(self.path / "job.json") as file:
            file.write(begun_line(begun))

    def end(self, begun: Begun, report: Mapping[str, Any]) -> None:
        """Save the job's report, and delete its records."""
        super().end(begun, report)
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


def begun_line(begun: Begun) -> bytes:
    content = {"format": _FORMAT, **asdict(begun)}
    if not begun.parts:  # earlier versions did not have them
        del content["parts"]
    return json_line(content)


def read_begun(content: bytes, where: Path | str) -> Begun:
    """Raises JobUnreadable if the content is damaged, or another release wrote it."""
    try:
        fields = json.loads(content)
        if fields.pop("format") != _FORMAT:
            raise ValueError(f"its format is not {_FORMAT}")
        return Begun(**fields)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise JobUnreadable(
            f"{where} cannot be read ({error}); start again with --restart"
        ) from error


def _difference(name: str, then: Any, now: Any) -> str:
    """Tells how a pin has changed; of a list of files, the first file that differs."""
    try:
        before, after = ({each["file"]: each for each in files} for files in (then, now))
        file = min(file for file in before | after if before.get(file) != after.get(file))
    except (KeyError, TypeError, ValueError):
        return f"{name} was {_shown(then, now)}, is {_shown(now, then)}"
    how = "is new" if file not in before else "is gone" if file not in after else "has changed"
    return f"{name}: {file} {how}"


def _shown(value: Any, other: Any) -> str:
    """Returns a long value from shortly before where it differs from the other."""
    text, other_text = json.dumps(value), json.dumps(other)
    if len(text) <= _SHOWN:
        return text
    pairs = enumerate(zip(text, other_text, strict=False))
    same = next((at for at, (one, two) in pairs if one != two), 0)
    begin = max(0, same - _SHOWN // 2)
    return f"{'...' if begin else ''}{text[begin : begin + _SHOWN]}..."
