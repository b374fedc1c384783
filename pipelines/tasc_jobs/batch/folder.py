"""A job's state on disk: what it was begun with, and finished rows in part files, in order.

One process holds a folder at a time. A part is there whole or not at all, and says in its first
line what it adds up to. It knows no Redis and no engine.
"""

import fcntl
import json
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

from tasc_jobs.batch.errors import JobBusy, JobChanged
from tasc_jobs.batch.work import Record, Totals
from tasc_jobs.errors import JobError
from tasc_runtime.errors import FileError
from tasc_runtime.rows import json_line, whole_file

_FORMAT = 1
_PART = re.compile(r"part-(\d{12})-(\d{12})\.jsonl")
_FIELDS = tuple(field.name for field in fields(Record))
_SHOWN = 60  # characters of a setting in an error


@dataclass(frozen=True)
class Begun:
    """What a job was begun with.

    Attributes:
        pins: Whatever changes its result.
        report: Of the job as a whole, once it is done.
    """

    id: str
    pins: dict[str, Any]
    record_version: int
    index_version: int | None
    report: dict[str, Any] | None = None


class JobFolder:
    """The state of one job. Make one with `held`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.totals = Totals()

    @classmethod
    @contextmanager
    def held(cls, path: Path) -> Iterator[Self]:
        """Hold a folder for the block; made if its parent is there.

        Raises:
            JobBusy: Another process holds it.
            FileError: It cannot be made or written to.
        """
        try:
            path.mkdir(exist_ok=True)
            lock = (path / "lock").open("a+")
        except OSError as error:
            raise FileError(f"no place for the job's state: {error}; name another") from error
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
        """What the job was begun with; None for one that is new.

        Raises:
            JobError: The folder is of another program, or damaged.
        """
        try:
            content = json.loads((self.path / "job.json").read_bytes())
            if content.pop("format") != _FORMAT:
                raise ValueError(f"its format is not {_FORMAT}")
            return Begun(**content)
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise JobError(
                f"{self.path / 'job.json'} cannot be read ({error}); --restart begins anew"
            ) from error

    def begin(
        self, pins: Mapping[str, Any], record_version: int, index_version: int | None
    ) -> Begun:
        self.discard()
        self._write_begun(Begun(uuid.uuid4().hex, dict(pins), record_version, index_version))
        begun = self.begun()
        assert begun is not None
        return begun

    def repin(self, begun: Begun, index_version: int | None) -> Begun:
        """Go on with another draft index; finished rows stay."""
        found = replace(begun, index_version=index_version)
        self._write_begun(found)
        return found

    def end(self, begun: Begun, report: Mapping[str, Any]) -> None:
        """Keep what the job came to, and let go of its parts."""
        self._write_begun(replace(begun, report=dict(report)))
        self._remove(self._parts())

    def discard(self) -> None:
        """Throw away all but the lock; what the job was begun with goes first."""
        (self.path / "job.json").unlink(missing_ok=True)
        self._remove(self._parts())
        self.totals = Totals()

    def resume(self) -> int:
        """Read what the parts add up to; the first row that is in none.

        Parts behind a missing one are removed: their rows are answered again.
        """
        for left in self.path.glob("*.partial"):
            left.unlink()
        self.totals, stop = Totals(), 0
        parts = self._parts()
        for at, (first, end, path) in enumerate(parts):
            if first != stop:
                self._remove(parts[at:])
                break
            with path.open("rb") as lines:
                self.totals += Totals(**_parsed(lines.readline(), path))
            stop = end
        return stop

    def add(self, records: Sequence[Record]) -> None:
        """Write the next rows as one part; on return they outlive a failing machine."""
        totals = Totals.of(records)
        lines = [asdict(totals), *([getattr(r, name) for name in _FIELDS] for r in records)]
        first, stop = records[0].ordinal, records[-1].ordinal + 1
        with whole_file(self.path / f"part-{first:012}-{stop:012}.jsonl") as file:
            file.writelines(map(json_line, lines))
        self.totals += totals

    def records(self) -> Iterator[Record]:
        """All rows in parts, in order."""
        for _, _, path in self._parts():
            with path.open("rb") as lines:
                next(lines)
                for line in lines:
                    yield Record(*_parsed(line, path))

    def _parts(self) -> list[tuple[int, int, Path]]:
        found = ((_PART.fullmatch(p.name), p) for p in self.path.iterdir())
        return sorted((int(m[1]), int(m[2]), p) for m, p in found if m)

    @staticmethod
    def _remove(parts: Sequence[tuple[int, int, Path]]) -> None:
        for _, _, path in reversed(parts):
            path.unlink()

    def _write_begun(self, begun: Begun) -> None:
        with whole_file(self.path / "job.json") as file:
            file.write(json_line({"format": _FORMAT, **asdict(begun)}))


def require_same(begun: Begun, pins: Mapping[str, Any], folder: Path) -> None:
    """Raise JobChanged unless a job was begun with these pins."""
    now = json.loads(json.dumps(dict(pins)))
    names = sorted(n for n in {*now, *begun.pins} if now.get(n) != begun.pins.get(n))
    if not names:
        return
    told = "; ".join(
        f"{name} was {_shown(begun.pins.get(name))}, is {_shown(now.get(name))}" for name in names
    )
    state = "is done" if begun.report else "has begun"
    raise JobChanged(
        f"the job in {folder} {state} with another input or other settings: {told}. Run it with"
        " those, write to another output, or throw what it has away with --restart"
    )


def remove(path: Path) -> None:
    """A whole job's folder."""
    shutil.rmtree(path, ignore_errors=True)


def _parsed(line: bytes, path: Path) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise JobError(
            f"{path} is damaged ({error}); delete it and run the job again: its rows, and those"
            " behind it, are answered anew"
        ) from error


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
