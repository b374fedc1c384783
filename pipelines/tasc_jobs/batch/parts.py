"""The batch job of `tasc generate` that writes a folder of parts, on a disk or in an object store.

The input is cut into parts by its size: ranges of bytes of JSON lines, ranges of rows of Parquet
files. Each engine reads the rows of a part, answers them and writes the part's file. The process of
the job holds only a summary of each part. The manifest in the folder lists the finished parts; a
job that was killed does the parts that it does not list, and a part that is done twice has the same
content.
"""

import re
import time
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from copy import copy
from dataclasses import KW_ONLY, asdict, dataclass, field, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self
from zlib import crc32

import pyarrow as pa
import pyarrow.parquet as pq
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tasc_jobs.batch.columns import OwnColumns
from tasc_jobs.batch.cost import DryRun
from tasc_jobs.batch.engines import HANDFULS, Answering, EngineActor, EngineSpec
from tasc_jobs.batch.folder import Begun, JobState, begun_line, locked, read_begun
from tasc_jobs.batch.generate import RowAnswers, job_spec, measured, write_files
from tasc_jobs.batch.inputs import Source, own_columns, own_schema, row_of
from tasc_jobs.batch.job import run
from tasc_jobs.batch.places import FileAt, Place, is_hidden
from tasc_jobs.batch.repeats import KnownContents, Repeats
from tasc_jobs.batch.work import JobProgress, JobReport, PartRecord, Record, Row, Totals
from tasc_jobs.errors import JobError, UsageError
from tasc_protocol import Request
from tasc_runtime.data.row_texts import MESSAGES, RowTexts
from tasc_runtime.data.rows import SUFFIXES, RawRow, check_file, read_raw_rows
from tasc_runtime.engine_settings import EngineSettings
from tasc_runtime.errors import FileError

PART_BYTES = 1 << 20
MANIFEST = "_manifest.json"
REJECTED = "_rejected"
_LOCK = ".lock"
_OURS = re.compile(rf"({REJECTED}/)?part-\d{{7}}-\d{{15}}\.(jsonl|parquet)")
_PLANNERS = 16  # threads that read the beginnings and the footers of files
_SAVE_S, _SAVE_SHARE = 5.0, 20  # seconds between two writes of the manifest; more if it is large
_WORK_S = 1.0  # maximum time of a call, after which the numbers of finished rows are returned
_COMPARED = 4096  # rows that come next, of which other engines may have the answers
_SAMPLED_BYTES = 1 << 16
_MOST_ROWS = 1 << 14  # in a part of a Parquet file, whose bytes say little if rows repeat
_MOST_GZIP_BYTES = 16 << 20  # a gzip file is one part, which is read into memory


@dataclass(frozen=True)
class Part:
    """A part of the input, which becomes a part of the output.

    Attributes:
        ordinal: Index of the part.
        name: Name of its file, without the suffix.
        begin, end: The range in the file, see `read_raw_rows`.
    """

    ordinal: int
    name: str
    file: FileAt
    begin: int
    end: int


@dataclass(frozen=True)
class PartWork:
    """The work of an engine that answers parts.

    Attributes:
        place: The folder of the output.
        suffix: Suffix of the parts: ``.jsonl`` or ``.parquet``.
        own: Types of the user's columns, if they are kept in Parquet files.
    """

    place: Place
    source: Source
    suffix: str
    own: pa.Schema | None = None

    def raw_rows(self, part: Part) -> list[RawRow]:
        """Reads the rows of a part.

        Raises:
            FileError: The file cannot be read, or it has changed.
        """
        path = Path(part.file.path)
        # Damage alone makes a local Parquet file unreadable. Read by its path, it rejects rows.
        by_path = part.file.is_local and path.suffix == ".parquet"

        def read(opened: Any) -> list[RawRow]:
            found = read_raw_rows(
                path,
                (self.source.input_field, self.source.id_field),
                keep=self.source.keep_columns,
                opened=None if by_path else opened,
                between=(part.begin, part.end),
            )
            return list(found)

        return part.file.read(read)

    def rows(self, part: Part, raw: Iterable[RawRow], first: int = 0) -> Iterator[Row]:
        """Yields the rows of a part with ordinals from ``first``.

        Ids are not compared. The random numbers of a row depend on its id.
        """
        fields = self.source.input_field, self.source.id_field
        file, texts = part.file.name, RowTexts(part.file.name)
        if part.begin and not file.endswith(".parquet"):  # its lines count from its beginning
            file = f"{file}@{part.begin}"
        for ordinal, record in enumerate(raw, first):
            row = row_of(record, ordinal, file, texts, *fields)
            yield replace(row, place=crc32(row.id.encode()))

    def write(self, opened: "_Open", columns: pa.Schema) -> None:
        """Writes the answers and the rejected rows of a part.

        Raises:
            FileError: A file cannot be written.
        """
        own, name = None, opened.part.name
        if self.source.keep_columns:
            own_rows = partial(own_columns, opened.raw, self.source.id_field)
            own = OwnColumns(own_rows, lambda: True, self.own)
        try:
            with TemporaryDirectory() as folder:
                output, reject = Path(folder, name + self.suffix), Path(folder, REJECTED, name)
                reject.parent.mkdir()
                records = sorted(opened.records, key=lambda record: record.ordinal)
                write_files(output, reject, records, True, columns=columns, own=own)
                if reject.exists():
                    self.place.write(f"{REJECTED}/{name}.jsonl", reject.read_bytes())
                self.place.write(output.name, output.read_bytes())
        except OSError as error:  # otherwise, the engine would start again, and fail again
            raise FileError(
                f"cannot write {name} to the folder for temporary files ({error}); make room "
                "there, or set TMPDIR on all nodes"
            ) from error


@dataclass(frozen=True)
class PartSpec(EngineSpec):
    """The arguments from which an actor builds its engine, and answers parts.

    Attributes:
        dedupe_bytes, shared: See `Repeats`.
    """

    strategy: RowAnswers
    _: KW_ONLY
    parts: PartWork
    dedupe_bytes: int = 0
    shared: Any = None

    @property
    def actor(self) -> type[EngineActor]:
        return PartActor

    @property
    def handful(self) -> int:
        return 1


@dataclass
class _Open:
    """A part whose rows are being answered.

    Attributes:
        reported: Number of finished rows in the last report.
        first: The first row without an answer.
    """

    part: Part
    raw: list[RawRow]
    records: list[Record] = field(default_factory=list)
    totals: Totals = field(default_factory=Totals)
    reported: int = 0
    first: Record | None = None
    written: Future[None] | None = None

    def add(self, record: Record) -> None:
        self.records.append(record)
        self.totals.add(record)
        if record.error and (self.first is None or record.ordinal < self.first.ordinal):
            self.first = record

    def report(self, is_whole: bool) -> PartRecord:
        self.reported = len(self.records)
        error = f"row {self.first.id}: {self.first.error}" if self.first else None
        report = replace(self.totals.report(0), first_error=error)
        return PartRecord(self.part.ordinal, report, is_whole)


class PartActor(EngineActor):
    """One engine that answers the rows of parts, and writes the parts.

    The rows of a part follow the last rows of the part before at once, so that the engine stays
    full. Threads read the next part and write finished parts meanwhile.
    """

    _spec: PartSpec

    def load(self) -> None:
        self.begin(Answering(self._built(), self._spec.strategy))

    def begin(self, answering: Answering) -> None:
        self._answering = answering
        self._repeats = Repeats(self._spec.dedupe_bytes, self._spec.shared)
        self._reading = deque[tuple[Part, Future[list[RawRow]]]]()
        self._open = list[_Open]()
        self._rows = dict[int, tuple[Row, _Open]]()
        self._todo = deque[Row]()  # not compared yet
        self._again = deque[Row]()  # the row that they repeat failed
        self._files = ThreadPoolExecutor(2)
        self._next = 0

    def work(self, parts: Sequence[Part]) -> list[PartRecord]:  # type: ignore[override]
        """Answer rows for about a second.

        Returns:
            The state of each part of which rows were finished, and of each that is now written.

        Raises:
            FileError: The input cannot be read, it has changed, or a part cannot be written.
        """
        raw_rows = self._spec.parts.raw_rows
        self._reading.extend((part, self._files.submit(raw_rows, part)) for part in parts)
        self._repeats.exchange(list(islice(self._todo, _COMPARED)))
        end, most = time.monotonic() + _WORK_S, HANDFULS * self._spec.settings.rows
        while time.monotonic() < end:
            while self._reading and (self._reading[0][1].done() or not self._rows):
                part, read = self._reading.popleft()
                self._begin(part, read.result())
            waiting = self._todo or self._again or self._reading
            if not self._rows or (parts and not waiting):
                break  # the next call may bring more rows, which the engine has room for
            self._keep(self._answering.work(self._due(most)))
        if not (self._rows or parts):
            wait([each.written for each in self._open if each.written], _WORK_S)
        found, still = list[PartRecord](), list[_Open]()
        for each in self._open:
            is_whole = each.written is not None and each.written.done()
            if each.written and is_whole:
                each.written.result()
            else:
                still.append(each)
            if is_whole or each.reported < len(each.records):
                found.append(each.report(is_whole))
        self._open = still
        return found

    def _due(self, most: int) -> list[Row]:
        """Returns the next rows that repeat no other row."""
        rows = [self._again.popleft() for _ in range(min(most, len(self._again)))]
        while self._todo and len(rows) < most:
            if not self._repeats.add(row := self._todo.popleft()):
                rows.append(row)
        return rows

    def _begin(self, part: Part, raw: list[RawRow]) -> None:
        opened, refused = _Open(part, raw), list[Record]()
        self._open.append(opened)
        for row in self._spec.parts.rows(part, raw, self._next):
            self._rows[row.ordinal] = row, opened
            if row.refused:
                refused.append(Record.of(row, None, row.refused))
            else:
                self._todo.append(row)
        self._next += len(raw)
        self._keep(refused)
        if not raw:
            self._write(opened)

    def _keep(self, records: Sequence[Record]) -> None:
        """Keeps finished rows, and the rows that repeat them."""
        for record in records:
            row, _ = self._rows[record.ordinal]
            if not row.refused:
                self._again.extend(self._repeats.finish(row, record))
        for record in chain(records, self._repeats.copies()):
            _, opened = self._rows.pop(record.ordinal)
            opened.add(record)
            if len(opened.records) == len(opened.raw):
                self._write(opened)

    def _write(self, opened: _Open) -> None:
        write, columns = self._spec.parts.write, self._spec.strategy.columns
        opened.written = self._files.submit(write, opened, columns)


class Parts(JobState):
    """The parts of a job: which are finished, by the manifest, and which are to be done.

    Make one with `held`. It is also the `Queue` from which engines take parts.
    """

    has_room = False

    def __init__(self, plan: "Plan") -> None:
        super().__init__(plan.place.shown)
        self._place, self._parts, self._suffix = plan.place, plan.parts, plan.suffix
        self._begun: Begun | None = None
        self._whole = Totals()
        self._running = dict[int, PartRecord]()
        self._unfinished, self._todo = set[int](), deque[int]()
        self._save_at, self._is_saved = 0.0, True

    @classmethod
    @contextmanager
    def held(cls, plan: "Plan") -> Iterator["Parts"]:
        """Lock a folder on a disk for the block, and write the manifest at its end.

        A bucket cannot be locked. Jobs that write to it at once write the same parts.

        Raises:
            JobBusy: Another process has locked the folder.
            JobError: The folder has rows, and no manifest.
            FileError: The folder cannot be made or written to.
        """
        (place := plan.place).make()
        made = cls(plan)
        lock: AbstractContextManager[None] = nullcontext()
        if place.is_local:
            made._manifest()  # a folder of others is refused before a lock is put into it
            lock = locked(Path(place.path, _LOCK), place.shown)
        with lock:
            if place.is_local:  # what killed processes left; a bucket shows whole files only
                left = (name for name in place.names() if name.endswith(".partial"))
                place.delete(name for name in left if is_hidden(name))
            try:
                yield made
            finally:
                if not made._is_saved:
                    with suppress(FileError):  # the next run does the parts again
                        made._save()

    def begun(self) -> Begun | None:
        if (content := self._manifest()) is None:
            return None
        ours, begun = self._ours(), read_begun(content, f"{self.where}/{MANIFEST}")
        kept = {name: each for name, each in begun.parts.items() if name + self._suffix in ours}
        lost = len(kept) < len(begun.parts)
        self._begun = replace(begun, parts=kept, report=None if lost else begun.report)
        return self._begun

    def _manifest(self) -> bytes | None:
        """Returns the manifest; None if there is none.

        Raises:
            JobError: There is none, and the folder has rows.
        """
        if (content := self._place.read(MANIFEST)) is None:
            self._ours(is_new=True)
        return content

    def write_begun(self, begun: Begun) -> None:
        self._begun = begun
        self._save()

    def discard(self) -> None:
        if self._place.read(MANIFEST) is None:
            return
        self._place.delete(self._ours())
        self._place.delete([MANIFEST])  # last, as it says that the files are this job's

    def _ours(self, is_new: bool = False) -> set[str]:
        """Returns the names of the parts and of the files of rejected rows.

        Raises:
            JobError: The folder has other rows, or, for a new job, any rows.
        """
        names = self._place.names()
        ours = {name for name in names if _OURS.fullmatch(name)}
        visible = {name for name in names if not is_hidden(name)}
        others = visible | ours if is_new else visible - ours
        if name := min((name for name in others if name.endswith(SUFFIXES)), default=None):
            raise JobError(f"{self.where} has other rows, such as {name}; choose an empty folder")
        return ours

    def resumed(self) -> Self:
        """Queue the parts that are not finished."""
        assert self._begun is not None
        for part in self._parts:
            if report := self._begun.parts.get(part.name):
                self._whole.add_part(PartRecord(part.ordinal, JobReport(**report), True))
            else:
                self._todo.append(part.ordinal)
        self._unfinished = set(self._todo)
        self._sum()
        return self

    @property
    def empty(self) -> bool:
        return not self._unfinished

    def read(self, max_rows: int) -> None:
        """Parts are read by the engines."""

    def take(self, max_rows: int) -> list[Part]:
        return [self._parts[self._todo.popleft()] for _ in range(min(max_rows, len(self._todo)))]

    def requeue(self, ordinals: Iterable[int]) -> None:
        for ordinal in sorted(ordinals, reverse=True):
            self._running.pop(ordinal, None)
            self._todo.appendleft(ordinal)
        self._sum()

    def finish(self, records: Iterable[PartRecord]) -> list[PartRecord]:
        new = [record for record in records if record.ordinal in self._unfinished]
        self._unfinished -= {record.ordinal for record in new if record.is_whole}
        return new

    def add(self, records: Sequence[PartRecord]) -> None:
        assert self._begun is not None
        for record in records:
            self._running[record.ordinal] = record
            if record.is_whole:
                del self._running[record.ordinal]
                self._whole.add_part(record)
                self._begun.parts[self._parts[record.ordinal].name] = asdict(record.report)
                self._is_saved = False
        self._sum()
        if not self._is_saved and time.monotonic() >= self._save_at:
            self._save()

    def _sum(self) -> None:
        self.totals = copy(self._whole)
        for record in self._running.values():
            self.totals.add_part(record)

    def _save(self) -> None:
        assert self._begun is not None
        began = time.monotonic()
        self._place.write(MANIFEST, begun_line(self._begun))
        took = time.monotonic() - began
        self._save_at, self._is_saved = began + max(_SAVE_S, _SAVE_SHARE * took), True


@dataclass(frozen=True)
class Plan:
    """The parts of an input, and the folder of the output.

    Attributes:
        suffix: Suffix of the parts.
        own: Types of the user's columns, if they are kept in Parquet files.
        total: Number of rows; an estimate for JSON lines.
        pins: JSON values of what affects the parts and their rows.
    """

    place: Place
    source: Source
    parts: list[Part]
    suffix: str
    own: pa.Schema | None
    total: int
    pins: dict[str, Any]

    @classmethod
    def of(
        cls, source: Source, output: str, part_bytes: int | None = None, form: str | None = None
    ) -> "Plan":
        """Cut an input into parts of about ``part_bytes``; reads the beginning of each file.

        Raises:
            FileError: A file cannot be read or is not of the type that its suffix names, there are
                no rows, or columns that are kept have other types in another file.
            UsageError: A corpus is given, a file is given twice, or columns are to be kept whose
                types for Parquet are not known.
        """
        if source.is_corpus:
            raise UsageError("--input: a corpus has no parts; write its answers to one file")
        place, part_bytes = Place.of(output), part_bytes or PART_BYTES
        files = _files(source, place)
        with ThreadPoolExecutor(_PLANNERS) as pool:
            looks = list(pool.map(partial(_look, source, part_bytes), files))
        parts, total = list[Part](), sum(look.rows for look in looks)
        for number, (file, look) in enumerate(zip(files, looks, strict=True)):
            for begin, end in look.ranges:
                name = f"part-{number:07}-{begin:015}"
                parts.append(Part(len(parts), name, file, begin, end))
        if not total:
            raise FileError(f"{files[0].name} has no rows; there is nothing to generate")
        suffix = f".{form}" if form else ".parquet" if looks[0].schema else ".jsonl"
        own = _own_schema(source, [look.schema for look in looks]) if suffix == ".parquet" else None
        listed = [{"file": f.name, "bytes": f.size, "changed": f.changed} for f in files]
        pins = {"input": listed, "part_bytes": part_bytes, "format": suffix[1:]}
        return cls(place, source, parts, suffix, own, total, pins)

    @property
    def work(self) -> PartWork:
        return PartWork(self.place, self.source, self.suffix, self.own)

    def rows(self) -> Iterator[Row]:
        """Yields the rows of all parts."""
        first = 0
        for part in self.parts:
            raw = self.work.raw_rows(part)
            yield from self.work.rows(part, raw, first)
            first += len(raw)


def _files(source: Source, place: Place) -> list[FileAt]:
    """Returns the files of an input, without those in the folder of the output."""
    inside = f"{place.path}/"
    files = [
        file
        for given in source.given
        for file in Place.of(given).files(SUFFIXES)
        if file.filesystem != place.filesystem or not file.path.startswith(inside)
    ]
    if not files:
        raise UsageError(f"--output: {place.shown} is the input; name another folder")
    found = dict[Any, str]()
    for file in files:
        if file.key in found:
            raise UsageError(f"--input: {file.name} is also {found[file.key]}; name each file once")
        found[file.key] = file.name
    names = Counter(file.name for file in files)
    return [replace(file, name=file.path) if names[file.name] > 1 else file for file in files]


@dataclass(frozen=True)
class _Look:
    """A file of an input, which was opened.

    Attributes:
        ranges: Its parts.
        rows: Number of its rows, or an estimate.
        schema: The types of its columns, if it is a Parquet file.
    """

    ranges: list[tuple[int, int]]
    rows: int
    schema: pa.Schema | None = None


def _look(source: Source, part_bytes: int, file: FileAt) -> _Look:
    path = Path(file.path)

    def look(opened: Any) -> Any:
        check_file(path, (source.input_field,), opened)
        if path.suffix == ".parquet":
            return pq.read_metadata(opened)
        return opened.read_at(min(_SAMPLED_BYTES, file.size), 0)

    found = file.read(look)
    if path.suffix == ".parquet":
        ranges = _row_ranges(found, source, part_bytes)
        return _Look(ranges, found.num_rows, found.schema.to_arrow_schema().remove_metadata())
    lines, step = found, part_bytes
    if path.suffix == ".gz":
        if file.size > _MOST_GZIP_BYTES:
            raise FileError(
                f"{file.name} has {file.size} bytes, and a gzip file of more than "
                f"{_MOST_GZIP_BYTES} cannot be a part; decompress it, or split it"
            )
        step = max(1, file.size)
        with suppress(zlib.error):  # reading its rows reports the damage
            lines = zlib.decompressobj(31).decompress(found)
    estimate = file.size * max(1, lines.count(b"\n")) // max(1, len(found))
    return _Look([(at, min(at + step, file.size)) for at in range(0, file.size, step)], estimate)


def _row_ranges(found: Any, source: Source, part_bytes: int) -> list[tuple[int, int]]:
    """Returns ranges of rows of a Parquet file; small row groups are joined, large ones are cut."""
    used = {source.input_field, source.id_field, MESSAGES}
    groups = list(map(found.row_group, range(found.num_row_groups)))
    size = sum(
        column.total_uncompressed_size
        for group in groups
        for column in map(group.column, range(group.num_columns))
        if source.keep_columns or {(path := column.path_in_schema), path.partition(".")[0]} & used
    )
    step = max(1, min(_MOST_ROWS, part_bytes * found.num_rows // max(1, size)))
    ranges, begin, end = list[tuple[int, int]](), 0, 0
    for group in groups:
        if end + group.num_rows - begin > step:
            ranges.append((begin, end))
            begin = end
        end += group.num_rows
        cuts = range(begin, end, step)[:-1] if end - begin > step else ()
        ranges += [(at, at + step) for at in cuts]
        begin += step * len(cuts)
    return [(first, last) for first, last in [*ranges, (begin, end)] if first < last]


def _own_schema(source: Source, schemas: Sequence[pa.Schema | None]) -> pa.Schema | None:
    if not source.keep_columns:
        return None
    if None in schemas:
        raise UsageError("--keep-columns: JSON lines have no types for Parquet; add --format jsonl")
    try:
        found = pa.unify_schemas(schemas)
    except pa.ArrowException as error:
        raise FileError(
            f"--keep-columns: the files have columns of different types ({error}); add --format "
            "jsonl, or cast them"
        ) from error
    return own_schema(found, source.id_field)


def generate_parts(
    url: str,
    task: str,
    plan: Plan,
    *,
    engine: EngineSettings | None = None,
    draft: bool = True,
    asked: Request | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    progress: Callable[[JobProgress], None] = lambda progress: None,
    **job: Any,
) -> JobReport:
    """Write the answers to the valid rows of an input as parts to a folder.

    The same call resumes an interrupted job. Rejected rows are in the folder ``_rejected``.

    Args:
        plan: Names paths and URLs of files, of folders with files at any depth, and patterns. If
            the output is on a disk, all nodes must share it.
        engine, draft, asked, job: See `generate`.

    Raises:
        UnknownTask: The task does not exist.
        JobError: The folder has other rows. See also `run_job`.
    """
    asked = asked or Request()
    folder, found = Path(plan.place.path), (plan.pins, plan.total)
    spec = job_spec(url, task, plan.source, folder, found, engine, draft, asked, job)

    def engines(base: EngineSpec, dedupe_bytes: int) -> PartSpec:
        shared = None
        if dedupe_bytes and spec.actors > 1:
            here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), False)
            actor: Any = ray.remote(KnownContents)
            shared = actor.options(num_cpus=0, scheduling_strategy=here).remote(dedupe_bytes)
        fields = vars(base)
        return PartSpec(**fields, parts=plan.work, dedupe_bytes=dedupe_bytes, shared=shared)

    return run(
        spec,
        Parts.held(plan),
        lambda state, dedupe_bytes: nullcontext(state.resumed()),
        RowAnswers(asked, draft),
        engines,
        lambda records, whole: None,
        should_stop=should_stop,
        progress=progress,
    )


def dry_run(
    url: str,
    task: str,
    plan: Plan,
    *,
    engine: EngineSettings | None = None,
    asked: Request | None = None,
    **job: Any,
) -> DryRun:
    """Measure the time of the first rows with and without drafts; see `generate.dry_run`."""
    folder, found = Path(plan.place.path), (plan.pins, plan.total)
    spec = job_spec(url, task, plan.source, folder, found, engine, True, asked, job)
    return measured(spec, plan.rows(), asked)
