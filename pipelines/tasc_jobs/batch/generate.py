"""The batch job of `tasc generate`: writes a file with the answer to each row of an input.

This module defines the request of a row and the content of its record, writes the output and
displays the progress of the job.
"""

import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from msgspec.structs import replace

from tasc_jobs.batch.columns import (
    ANSWER,
    LOGPROBS,
    PROBABILITIES,
    OwnColumns,
    OwnRow,
    json_row,
)
from tasc_jobs.batch.cost import DryRun, Meter
from tasc_jobs.batch.folder import JobFolder
from tasc_jobs.batch.inputs import (
    Input,
    Source,
    check_places,
    job_folder,
    named_from,
    open_input,
    reject_file,
    require_own,
)
from tasc_jobs.batch.job import preview_job, run_job
from tasc_jobs.batch.repeats import Repeats
from tasc_jobs.batch.work import (
    JobProgress,
    JobReport,
    JobSpec,
    Read,
    Record,
    Row,
    TooManyErrors,
    row_request,
)
from tasc_jobs.errors import JobError
from tasc_protocol import PARAMETERS, Request, Whole
from tasc_runtime.data.rows import row_writer
from tasc_runtime.engine.reader import PromptTooLong, adapter_of
from tasc_runtime.engine_settings import EngineSettings
from tasc_runtime.errors import FileError
from tasc_runtime.progress import Progress
from tasc_store import TaskRecord, TaskStore, connect

if TYPE_CHECKING:
    from tasc_runtime.engine.builder import EngineBuilder

PREVIEW_ROWS = 20
_LEAST_ERRORS, _ROWS_PER_ERROR = 10, 10  # default limits of rows without an answer
_DEDUPE_BYTES = 64 << 20  # default memory of answers for later rows with equal inputs
# Request fields that a row sets, or that affect no answer. All others are compared on resumption.
_NOT_PINNED = {
    *("id", "prompt", "templated", "draft", "stream", "parameters", "prompt_index"),
    *("choice_index", "n", "prompts", "timeout_s", "committed_ids", "record_version"),
    "scoring",
}


@dataclass(frozen=True)
class RowAnswers:
    """The strategy that requests one answer per row, with independent random numbers per row."""

    asked: Request
    draft: bool

    def requests(self, row: Row, builder: "EngineBuilder") -> Sequence[Read]:
        number = row.ordinal if row.place is None else row.place
        place = {"prompt": row.payload, "prompt_index": number}
        # Drafts choose which unlikely labels are scored, and so would change the output's bytes.
        draft = self.draft and self.asked.scoring is None
        asked = row_request(replace(self.asked, templated=True, draft=draft, **place), row)
        try:
            return [(asked, builder.reader.request(asked))]
        except PromptTooLong as error:
            raise ValueError(
                f"the prompt has {error.tokens} tokens and a row holds {error.longest}, the answer "
                f"included; {_way_out(error, builder.positions)}"
            ) from error
        except ValueError as error:
            raise ValueError(str(error).removeprefix(f"request {asked.id}: ")) from error

    def content(self, row: Row, answers: Sequence[Whole], record: TaskRecord) -> dict[str, Any]:
        ((result, token_texts),) = answers
        content: dict[str, Any] = {
            "text": result.text,
            "tokens": list(result.tokens),
            "finish_reason": result.finish_reason,
            "model": record.model,
            "adapter": adapter_of(self.asked.adapter, record) or record.adapter,
            "index_version": result.index_version,
        }
        if self.asked.logprobs is not None:
            content[LOGPROBS.name] = [token.as_json for token in token_texts]
        if (scores := result.scores) is not None:
            found = scores.probabilities
            content["probability"], content["unseen_mass"] = found[0], scores.unseen
            content["probabilities"] = [
                {"label": label, "probability": probability}
                for label, probability in zip(scores.labels, found, strict=True)
            ]
        return content

    def is_repeatable(self, record: TaskRecord) -> bool:
        """Whether no random numbers are drawn, which each row has its own of."""
        sampling = {**record.sampling.given, **self.asked.parameters}
        return self.asked.scoring is not None or not sampling.get("temperature")

    @property
    def columns(self) -> pa.Schema:
        """The columns of the answers."""
        more = [] if self.asked.logprobs is None else [LOGPROBS]
        return pa.schema([*ANSWER, *more, *(PROBABILITIES if self.asked.scoring else ())])


def _way_out(error: PromptTooLong, positions: int) -> str:
    if error.tokens >= positions:
        return f"shorten the row: the model takes at most {positions} tokens"
    most = f", up to {positions}," if positions < sys.maxsize else ""
    return f"shorten the row, or raise --max-model-len{most} and add --restart"


def generate(
    url: str,
    task: str,
    source: Source,
    output: Path,
    *,
    engine: EngineSettings | None = None,
    draft: bool = True,
    asked: Request | None = None,
    reject: Path | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    progress: Callable[[JobProgress], None] = lambda progress: None,
    **job: Any,
) -> JobReport:
    """Write the answer to each valid row of ``source`` to ``output``, .jsonl or .parquet, in order.

    The output appears when it is complete. Until then the state of the job is in the folder
    ``OUTPUT.job``, which keeps a report afterwards. The same call resumes an interrupted job.

    Args:
        draft: Whether to use drafts.
        asked: A request without a prompt. With ``logprobs``, answers have a column of that name;
            with ``scoring``, columns of probabilities.
        reject: File for rows without an answer, as JSON lines with ``output``, ``line``, ``id`` and
            ``reason``, and ``file`` if the input has several files. The file exists only if some
            row has no answer. None uses a file next to the output.
        job: Other fields of `JobSpec`, such as ``actors``, ``max_errors`` and ``restart``. Without
            ``max_errors``, a tenth of the rows may have no answer, and 10 rows in any case. Without
            ``dedupe_bytes``, 64 MiB are used.

    Raises:
        UsageError: See `check_places`.
        FileError: The input cannot be read, or the output cannot be written.
        UnknownTask: The task does not exist.
        JobError: See `run_job`.
    """
    rejects = reject or reject_file(output)
    check_places(source, output, rejects)
    spec, opened = _spec(url, task, source, output, engine, draft, asked, job)
    strategy = RowAnswers(asked or Request(), draft)
    columns, own = strategy.columns, opened.own
    finish = partial(write_files, output, rejects, columns=columns, own=own)
    try:
        return run_job(
            spec, opened.rows, strategy, finish, should_stop=should_stop, progress=progress
        )
    except TooManyErrors as error:
        raise TooManyErrors(f"{error}; see {rejects}") from error


def dry_run(
    url: str,
    task: str,
    source: Source,
    output: Path,
    *,
    engine: EngineSettings | None = None,
    asked: Request | None = None,
    reject: Path | None = None,
    **job: Any,
) -> DryRun:
    """Measure the time of the first rows with and without drafts. Writes nothing.

    If the job copies the answers of equal rows, the first different rows are measured.

    Raises:
        UsageError: See `check_places`.
        FileError: The input cannot be read or has no valid row.
        JobError: No engine can be built, or none of the first rows can be answered.
    """
    check_places(source, output, reject or reject_file(output))
    spec, opened = _spec(url, task, source, output, engine, True, asked, {**job, "restart": True})
    return measured(spec, opened.rows(), asked)


def measured(spec: JobSpec, rows: Iterable[Row], asked: Request | None) -> DryRun:
    """Measure the time of the first valid rows; see `dry_run`."""
    strategy = RowAnswers(asked or Request(), draft=True)
    with closing(connect(spec.url)) as client:
        may_copy = strategy.is_repeatable(TaskStore(client).get(spec.task))
    repeats = Repeats(spec.dedupe_bytes if may_copy else 0)
    good = (row for row in rows if row.refused is None)
    compared = list(islice(good, spec.window_rows))  # as many as a job holds in memory
    rows = [row for row in compared if not repeats.add(row)]
    if not rows:
        raise FileError("the input has no valid row; check --input-field")
    found = preview_job(spec, rows[:PREVIEW_ROWS], strategy)
    if not found.rows:
        raise JobError(
            f"none of the first {found.refused} valid rows can be answered (first: "
            f"{found.first_error}); fix the input, or name its field with --input-field"
        )
    total = max(spec.total or 0, len(compared))  # of JSON lines it is an estimate
    return DryRun(found, total, spec.actors, len(compared), len(compared) - len(rows))


def _spec(
    url: str,
    task: str,
    source: Source,
    output: Path,
    engine: EngineSettings | None,
    draft: bool,
    asked: Request | None,
    job: dict[str, Any],
) -> tuple[JobSpec, Input]:
    begun = None if job.get("restart") else JobFolder(job_folder(output)).begun()
    if begun and begun.report and not output.exists():
        # The job is finished, but its output was deleted.
        begun, job = None, {**job, "restart": True}
    opened = open_input(source, url, begun.pins.get("input") if begun else None)
    folder, found = job_folder(output), ({"input": opened.pins}, opened.total)
    return job_spec(url, task, source, folder, found, engine, draft, asked, job), opened


def job_spec(
    url: str,
    task: str,
    source: Source,
    folder: Path,
    found: tuple[Mapping[str, Any], int],
    engine: EngineSettings | None,
    draft: bool,
    asked: Request | None,
    job: dict[str, Any],
) -> JobSpec:
    """Returns the specification of a job, with the defaults of its fields.

    Args:
        found: The pins of the input, and its number of rows.
    """
    input_pins, total = found
    engine = engine or EngineSettings()
    if job.get("max_errors") is None:
        job = {**job, "max_errors": max(_LEAST_ERRORS, total // _ROWS_PER_ERROR)}
    pins = {
        **input_pins,
        "input_field": source.input_field,
        "id_field": source.id_field,
        "task": task,
        "draft": draft,
        "max_model_len": engine.max_model_len,
        **({"keep_columns": True} if source.keep_columns else {}),
        **({"backend": "vllm", "vllm": engine.vllm} if engine.backend == "vllm" else {}),
        **_pins_of(asked or Request()),
    }
    job = {"dedupe_bytes": _DEDUPE_BYTES, **job}
    return JobSpec(url, task, folder, pins, engine, total=total, **job)


def _pins_of(asked: Request) -> dict[str, Any]:
    """Returns the options that affect answers. A guide is hashed, because it may be long."""
    names = (name for name in asked.__struct_fields__ if name not in _NOT_PINNED)
    pins = {name: getattr(asked, name) for name in names}
    pins |= {name: asked.parameters.get(name) for name in PARAMETERS}
    pins["stop"] = asked.stop or None  # earlier versions pinned None if there were no stop strings
    if asked.scoring:  # earlier versions did not have it
        pins["scoring"] = asdict(asked.scoring)
    if asked.guide:
        text = json.dumps([asked.guide.choices, asked.guide.text])
        pins["guide"] = [asked.guide.kind, hashlib.sha256(text.encode()).hexdigest()]
    return pins


def write_files(
    output: Path,
    reject: Path,
    records: Iterable[Record],
    whole: bool,
    *,
    columns: pa.Schema = ANSWER,
    own: OwnColumns | None = None,
) -> None:
    """Write the rejects, if there are any, and the output if ``whole``.

    Args:
        whole: Whether ``records`` are all records of the job.
        columns: Columns of the answers.
        own: Columns of the user, which are written beside the columns of the answers.

    Raises:
        JobError: The file for rejects has the rejected rows of another output, or the input, from
            which the user's columns are copied, was changed.
        OSError: A file cannot be written.
    """
    require_own(reject, output)
    rejected, output_name = 0, named_from(reject, output)
    own_rows: Iterator[OwnRow] = repeat({})
    shown: Callable[[OwnRow], OwnRow] = json_row
    if own and whole:
        _require_unchanged(own)
        own_rows = own.rows()
        if output.suffix == ".parquet":
            schema, shown = own.table()
            columns = pa.schema([*columns, *schema])
    with ExitStack() as stack:
        answers = stack.enter_context(row_writer(output, columns)) if whole else None
        refusals = stack.enter_context(row_writer(reject))
        for record in records:
            own_row = next(own_rows, {})
            if record.content is None:
                rejected += 1
                refusals({"output": output_name, **_refusal(record)})
            elif answers:
                answers({"id": record.id, **record.content, **shown(own_row)})
        if own and whole:
            _require_unchanged(own)  # the input may have changed while its rows were read
    if not rejected:
        reject.unlink()


def _require_unchanged(own: OwnColumns) -> None:
    if not own.unchanged():
        raise JobError(
            "the input changed while the job ran, so --keep-columns would write the columns of "
            "other rows; put the old input back and run the job again, which keeps its answers, "
            "or answer the new input with --restart"
        )


def _refusal(record: Record) -> dict[str, Any]:
    fields = {"line": record.line, "id": record.id, "reason": record.error}
    return fields if record.file is None else {"file": record.file, **fields}


class BatchProgress:
    """Displays a job on a progress bar. Call it with each `JobProgress`."""

    def __init__(self, bar: Progress, meter: Meter) -> None:
        self._bar, self.meter = bar, meter
        self._done: int | None = None

    def __call__(self, job: JobProgress) -> None:
        self.meter(job)
        done, resumed = job.report.rows, job.report.resumed
        if self._done is None:
            self._done = resumed
            self._bar.resume(resumed)
        if job.total is not None:
            self._bar.set_total(job.total)  # of parts, it is an estimate, which may rise
        starting = not job.engines and done <= resumed
        self._bar.set_suffix("starting engines" if starting else self._rates(job.report))
        self._bar.advance(max(0, done - self._done))
        self._done = max(self._done, done)

    def _rates(self, report: JobReport) -> str:
        cost, parts = self.meter.cost, []
        if cost.tokens and cost.seconds:  # labels have no tokens, and repeats have none either
            parts.append(f"{cost.tokens / cost.seconds:,.0f} decoded tokens/s")
        if report.steps:
            parts.append(f"{report.forwards:.2f} forward passes an answer")
        counts = (report.repeats, "repeats"), (report.errors, "errors")
        parts += [f"{count} {name}" for count, name in counts if count]
        return ", ".join(parts)
