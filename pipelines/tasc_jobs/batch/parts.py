"""The batch job of `tasc generate` that writes a folder of parts, on a disk or in an object store.

The input is cut into parts by its size: ranges of bytes of JSON lines, ranges of rows of Parquet
files. Each engine reads the rows of a part, answers them and writes the part's file. The process of
the job holds only a summary of each part. The manifest in the folder lists the finished parts; a
job that was killed does the parts that it does not list, and a part that is done twice has the same
content.
"""

import re
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from copy import copy
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from zlib import decompressobj

import pyarrow as pa
import pyarrow.parquet as pq

from tasc_jobs.batch.columns import OwnColumns
from tasc_jobs.batch.cost import DryRun
from tasc_jobs.batch.engines import HANDFULS, Answering, EngineActor, EngineSpec
from tasc_jobs.batch.folder import Begun, JobState, begun_line, locked, read_begun
from tasc_jobs.batch.generate import RowAnswers, job_spec, measured, write_files
from tasc_jobs.batch.inputs import Source, own_columns, own_schema, row_of
from tasc_jobs.batch.job import run
from tasc_jobs.batch.places import FileAt, Place
from tasc_jobs.batch.repeats import Repeats
from tasc_jobs.batch.work import JobProgress, JobReport, PartRecord, Record, Row, Totals
from tasc_jobs.errors import JobError, UsageError
from tasc_protocol import Request
from tasc_runtime.data.row_texts import RowTexts
from tasc_runtime.data.rows import SUFFIXES, RawRow, check_file, read_raw_rows
from tasc_runtime.engine_settings import EngineSettings
from tasc_runtime.errors import FileError

PART_BYTES = 1 << 20
MANIFEST = "_manifest.json"
_LOCK = ".lock"
_REJECTED = "_rejected"
_PLANNERS = 16  # threads that read the beginnings and the footers of files
_SAVE_S, _SAVE_SHARE = 5.0, 20  # seconds between two writes of the manifest; more if it is large
_WORK_S = 1.0  # maximum time of a call, after which the numbers of finished rows are returned
_SAMPLED_BYTES = 1 << 16
_MOST_DEFLATED = 1100  # bytes of which a byte of a gzip file can be made


@dataclass(frozen=True)
class Part:
    """A part of the input, which becomes a part of the output.

    Attributes:
        ordinal: Index of the part.
        name: Name of its file, without the suffix.
        begin, end: The range in the file, see `read_raw_rows`.
        base: Number that makes the ordinals of its rows differ from those of all other parts.
    """

    ordinal: int
    name: str
    file: FileAt
    begin: int
    end: int
    base: int


@dataclass(frozen=True)
class PartWork:
    """The work of an engine that answers parts.

    Attributes:
        place: The folder of the output.
        suffix: Suffix of the parts: ``.jsonl`` or ``.parquet``.
        own: Types of the user's columns, if they are kept in Parquet files.
        dedupe_bytes: See `JobSpec`; each engine copies the answers that it has decoded itself.
    """

    place: Place
    source: Source
    suffix: str
    own: pa.Schema | None = None
    dedupe_bytes: int = 0

    def raw_rows(self, part: Part) -> list[RawRow]:
        """Reads the rows of a part.

        Raises:
            FileError: The file cannot be read, or it has changed.
        """
        read = partial(
            read_raw_rows,
            Path(part.file.path),
            (self.source.input_field, self.source.id_field),
            keep=self.source.keep_columns,
            between=(part.begin, part.end),
        )
        return part.file.read(lambda opened: list(read(opened=opened)))

    def rows(self, part: Part, raw: Iterable[RawRow]) -> Iterator[Row]:
        """Yields the rows of a part. Ids are not compared with those of other rows."""
        fields = self.source.input_field, self.source.id_field
        file, texts = part.file.name, RowTexts(part.file.name)
        if part.begin and not file.endswith(".parquet"):  # its lines count from its beginning
            file = f"{file}@{part.begin}"
        for record in raw:
            yield row_of(record, part.base + record.line, file, texts, *fields)

    def write(
        self, part: Part, raw: Sequence[RawRow], records: Sequence[Record], columns: Any
    ) -> None:
        """Writes the answers and the rejected rows of a part."""
        own, in_order = None, sorted(records, key=lambda record: record.ordinal)
        if self.source.keep_columns:
            own_rows = partial(own_columns, raw, self.source.id_field)
            own = OwnColumns(own_rows, lambda: True, self.own)
        with TemporaryDirectory() as folder:
            output, reject = Path(folder, part.name + self.suffix), Path(folder, "rejected")
            write_files(output, reject, in_order, True, columns=columns, own=own)
            if reject.exists():
                self.place.write(f"{_REJECTED}/{part.name}.jsonl", reject.read_bytes())
            self.place.write(output.name, output.read_bytes())


@dataclass(frozen=True)
class PartSpec(EngineSpec):
    """The arguments from which an actor builds its engine, and answers parts."""

    parts: PartWork

    @property
    def actor(self) -> type[EngineActor]:
        return PartActor

    @property
    def handful(self) -> int:
        return 1


@dataclass
class _Open:
    """A part whose rows are being answered."""

    part: Part
    raw: list[RawRow]
    records: list[Record] = field(default_factory=list)
    told: int = 0
    written: Future[None] | None = None

    def report(self, is_whole: bool) -> PartRecord:
        self.told = len(self.records)
        totals = Totals()
        for record in self.records:
            totals.add(record)
        failed = [record for record in self.records if record.error is not None]
        first = min(failed, key=lambda record: record.ordinal, default=None)
        error = None if first is None else f"row {first.id}: {first.error}"
        report = replace(totals.report(0), first_error=error)
        return PartRecord(self.part.ordinal, self.part.name, report, is_whole)


class PartActor(EngineActor):
    """One engine that answers the rows of parts, and writes the parts.

    The rows of a part follow the last rows of the part before at once, so that the engine stays
    full. A thread writes finished parts meanwhile.
    """

    _spec: PartSpec

    def load(self) -> None:
        builder, strategy = self._built(), self._spec.strategy
        self._answering = Answering(builder, strategy)
        may_copy = strategy.is_repeatable(builder.record)
        self._repeats = Repeats(self._spec.parts.dedupe_bytes if may_copy else 0)
        self._open = dict[int, _Open]()
        self._rows = dict[int, tuple[Row, _Open]]()
        self._todo = deque[Row]()
        self._writer = ThreadPoolExecutor(1)

    def work(self, parts: Sequence[Part]) -> list[PartRecord]:  # type: ignore[override]
        """Answer rows for about a second.

        Returns:
            The state of each part of which rows were finished, and of each that is now written.

        Raises:
            FileError: The input cannot be read, it has changed, or a part cannot be written.
        """
        for part in parts:
            self._begin(part)
        end, most = time.monotonic() + _WORK_S, HANDFULS * self._spec.settings.rows
        while self._rows and time.monotonic() < end:
            rows = [self._todo.popleft() for _ in range(min(most, len(self._todo)))]
            self._keep(self._answering.work(rows))
        if not self._rows:
            wait([each.written for each in self._open.values() if each.written], _WORK_S)
        found = list[PartRecord]()
        for each in list(self._open.values()):
            is_whole = each.written is not None and each.written.done()
            if each.written and is_whole:
                each.written.result()
                del self._open[each.part.ordinal]
            if is_whole or each.told < len(each.records):
                found.append(each.report(is_whole))
        return found

    def _begin(self, part: Part) -> None:
        raw = self._spec.parts.raw_rows(part)
        opened = self._open[part.ordinal] = _Open(part, raw)
        refused = list[Record]()
        for row in self._spec.parts.rows(part, raw):
            self._rows[row.ordinal] = row, opened
            if row.refused:
                refused.append(Record.of(row, None, row.refused))
            elif not self._repeats.add(row):
                self._todo.append(row)
        self._keep(refused)
        if not raw:
            opened.written = self._writer.submit(self._write, opened)

    def _keep(self, records: Sequence[Record]) -> None:
        """Keeps finished rows, and the rows that repeat them."""
        for record in records:
            row, _ = self._rows[record.ordinal]
            if not row.refused:
                self._todo.extend(self._repeats.finish(row, record))
        for record in chain(records, self._repeats.copies()):
            _, opened = self._rows.pop(record.ordinal)
            opened.records.append(record)
            if len(opened.records) == len(opened.raw):
                opened.written = self._writer.submit(self._write, opened)

    def _write(self, opened: _Open) -> None:
        columns = self._spec.strategy.columns  # type: ignore[attr-defined]
        self._spec.parts.write(opened.part, opened.raw, opened.records, columns)


class Parts(JobState):
    """The parts of a job: which are finished, by the manifest, and which are to be done.

    Make one with `held`. It is also the `Queue` from which engines take parts.
    """

    has_room = False

    def __init__(self, place: Place, parts: Sequence[Part], suffix: str) -> None:
        super().__init__(place.shown)
        self._place, self._parts, self._suffix = place, parts, suffix
        self._begun: Begun | None = None
        self._whole = Totals()
        self._running = dict[int, PartRecord]()
        self._unfinished, self._todo = set[int](), deque[int]()
        self._save_at, self._is_saved = 0.0, True

    @classmethod
    @contextmanager
    def held(cls, place: Place, parts: Sequence[Part], suffix: str) -> Iterator["Parts"]:
        """Lock a folder on a disk for the block, and write the manifest at its end.

        A bucket cannot be locked. Jobs that write to it at once write the same parts.

        Raises:
            JobBusy: Another process has locked the folder.
            FileError: The folder cannot be made or written to.
        """
        place.make()
        lock = locked(Path(place.path, _LOCK), place.shown) if place.is_local else nullcontext()
        with lock:
            made = cls(place, parts, suffix)
            try:
                yield made
            finally:
                if not made._is_saved:
                    made._save()

    def begun(self) -> Begun | None:
        content, names = self._place.read(MANIFEST), self._place.names() - {_LOCK}
        if content is None:
            if names:
                raise JobError(
                    f"{self.where} has files of something else, such as {min(names)}; name an "
                    "empty folder"
                )
            return None
        begun = read_begun(content, f"{self.where}/{MANIFEST}")
        kept = {name: each for name, each in begun.parts.items() if name + self._suffix in names}
        lost = len(kept) < len(begun.parts)
        self._begun = replace(begun, parts=kept, report=None if lost else begun.report)
        return self._begun

    def write_begun(self, begun: Begun) -> None:
        self._begun = begun
        self._save()

    def discard(self) -> None:
        if self._place.read(MANIFEST) is None:
            return
        ours = re.compile(rf"({_REJECTED}/)?part-\d{{5}}-\d{{15}}\.(jsonl|parquet)")
        self._place.delete(name for name in self._place.names() if ours.fullmatch(name))
        self._place.delete([MANIFEST])

    @contextmanager
    def resumed(self) -> Iterator["Parts"]:
        """Queue the parts that are not finished."""
        assert self._begun is not None
        reports = self._begun.parts
        for part in self._parts:
            if report := reports.get(part.name):
                record = PartRecord(part.ordinal, part.name, JobReport(**report), True)
                self._whole.add_part(record)
            else:
                self._todo.append(part.ordinal)
        self._unfinished = set(self._todo)
        self._sum()
        yield self

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
            if record.is_whole:
                self._running.pop(record.ordinal, None)
                self._whole.add_part(record)
                self._begun.parts[record.name] = asdict(record.report)
                self._is_saved = False
            else:
                self._running[record.ordinal] = record
        self._sum()
        if not self._is_saved and time.monotonic() >= self._save_at:
            self._save()

    def records(self, whole: bool = False) -> Iterator[Record]:
        return iter(())

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
    """The parts of an input.

    Attributes:
        suffix: Suffix of the parts.
        own: Types of the user's columns, if they are kept in Parquet files.
        total: Number of rows; an estimate for JSON lines.
        pins: The input's fingerprint as JSON values.
    """

    parts: list[Part]
    suffix: str
    own: pa.Schema | None
    total: int
    pins: Any

    @property
    def found(self) -> tuple[Any, int]:
        return self.pins, self.total

    @classmethod
    def of(cls, source: Source, part_bytes: int = PART_BYTES, form: str | None = None) -> "Plan":
        """Cut an input into parts of about ``part_bytes``; reads the beginning of each file.

        Raises:
            FileError: A file cannot be read or is not of the type that its suffix names, there are
                no rows, or columns that are kept have other types in another file.
            UsageError: A corpus is given, two files have the same name, or columns are to be kept
                whose types for Parquet are not known.
        """
        if source.is_corpus:
            raise UsageError("--input: a corpus has no parts; write its answers to one file")
        files = [file for given in source.given for file in Place.of(given).files(SUFFIXES)]
        names = Counter(file.name for file in files)
        if double := next((name for name, count in names.items() if count > 1), None):
            raise UsageError(f"--input: {double} is given twice; name each file once")
        with ThreadPoolExecutor(_PLANNERS) as pool:
            looks = list(pool.map(partial(_look, source, part_bytes), files))
        parts, base = list[Part](), 0
        for number, (file, look) in enumerate(zip(files, looks, strict=True)):
            for begin, end in look.ranges:
                name = f"part-{number:05}-{begin:015}"
                parts.append(Part(len(parts), name, file, begin, end, base + begin))
            base += look.places
        if not (total := sum(look.rows for look in looks)):
            raise FileError(f"{files[0].name} has no rows; there is nothing to generate")
        suffix = f".{form}" if form else ".parquet" if looks[0].schema else ".jsonl"
        own = _own_schema(source, [look.schema for look in looks]) if suffix == ".parquet" else None
        listed = [[file.name, file.size, file.mtime_ns] for file in files]
        return cls(parts, suffix, own, total, {"files": listed, "bytes": part_bytes, "to": suffix})


@dataclass(frozen=True)
class _Look:
    """A file of an input, which was opened.

    Attributes:
        ranges: Its parts.
        rows: Number of its rows, or an estimate.
        places: An upper limit of its rows and of the positions at which its parts begin.
        schema: The types of its columns, if it is a Parquet file.
    """

    ranges: list[tuple[int, int]]
    rows: int
    places: int
    schema: pa.Schema | None = None


def _look(source: Source, part_bytes: int, file: FileAt) -> _Look:
    path, used = Path(file.path), {source.input_field, source.id_field}
    file.read(lambda opened: check_file(path, (source.input_field,), opened))
    if path.suffix == ".parquet":
        found = file.read(pq.read_metadata)
        size = sum(
            column.total_uncompressed_size
            for group in map(found.row_group, range(found.num_row_groups))
            for column in map(group.column, range(group.num_columns))
            if source.keep_columns or column.path_in_schema.partition(".")[0] in used
        )
        rows = found.num_rows
        step = max(1, part_bytes * rows // max(1, size))
        ranges = [(at, min(at + step, rows)) for at in range(0, rows, step)]
        return _Look(ranges, rows, rows, found.schema.to_arrow_schema().remove_metadata())
    sample = file.read(lambda opened: opened.read_at(min(_SAMPLED_BYTES, file.size), 0))
    lines, step, longest = sample, part_bytes, 1
    if path.suffix == ".gz":
        lines, step, longest = (
            decompressobj(31).decompress(sample),
            max(1, file.size),
            _MOST_DEFLATED,
        )
    estimate = file.size * max(1, lines.count(b"\n")) // max(1, len(sample))
    ranges = [(at, min(at + step, file.size)) for at in range(0, file.size, step)]
    return _Look(ranges, estimate, file.size * longest)


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
    source: Source,
    output: str,
    *,
    part_bytes: int = PART_BYTES,
    form: str | None = None,
    engine: EngineSettings | None = None,
    draft: bool = True,
    asked: Request | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    progress: Callable[[JobProgress], None] = lambda progress: None,
    **job: Any,
) -> JobReport:
    """Write the answers to the valid rows of ``source`` as parts to a folder.

    The same call resumes an interrupted job. Rejected rows are in the folder ``_rejected``.

    Args:
        source: Paths and URLs of files, of folders with files at any depth, and patterns.
        output: Path or URL of the folder. On a disk, all nodes must share it.
        part_bytes: Approximate bytes of input of a part.
        form: ``jsonl`` or ``parquet``; None: that of the first file.
        engine, draft, asked, job: See `generate`. Random numbers depend on the place of a row in
            the files, not on its number.

    Raises:
        FileError, UsageError: See `Plan.of`.
        UnknownTask: The task does not exist.
        JobError: The folder has files of something else. See also `run_job`.
    """
    place, plan = Place.of(output), Plan.of(source, part_bytes, form)
    asked = asked or Request()
    spec = job_spec(url, task, source, Path(place.path), plan.found, engine, draft, asked, job)
    work = PartWork(place, source, plan.suffix, plan.own, spec.dedupe_bytes)
    return run(
        spec,
        Parts.held(place, plan.parts, plan.suffix),
        lambda state, dedupe_bytes: state.resumed(),
        RowAnswers(asked, draft),
        partial(PartSpec, parts=work),
        lambda records, whole: None,
        should_stop=should_stop,
        progress=progress,
    )


def dry_run(
    url: str,
    task: str,
    source: Source,
    output: str,
    *,
    part_bytes: int = PART_BYTES,
    form: str | None = None,
    engine: EngineSettings | None = None,
    asked: Request | None = None,
    **job: Any,
) -> DryRun:
    """Measure the time of the first rows with and without drafts; see `generate.dry_run`."""
    place, plan = Place.of(output), Plan.of(source, part_bytes, form)
    spec = job_spec(url, task, source, Path(place.path), plan.found, engine, True, asked, job)
    work = PartWork(place, source, plan.suffix)
    rows = (row for part in plan.parts for row in work.rows(part, work.raw_rows(part)))
    return measured(spec, rows, asked)
