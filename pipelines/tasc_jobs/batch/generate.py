"""A batch job over rows: each good one answered once, in order, whatever is killed on the way.

It says what a row asks for and what is kept of its answer; `tasc_jobs.batch` does the work. Engines
are built by the same worker as online replicas, with the same drafting.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from tasc_jobs.batch import JobProgress, JobReport, JobSpec, Row, run_job
from tasc_jobs.batch.folder import JobFolder
from tasc_jobs.batch.input_rows import Input, open_input
from tasc_jobs.batch.job_files import Source, check_output, check_written, job_folder, reject_file
from tasc_jobs.batch.output_files import write_files
from tasc_jobs.batch.preview import Preview
from tasc_jobs.batch.runner import preview_job
from tasc_runtime.engine.builder import EngineBuilder
from tasc_runtime.engine_settings import EngineSettings
from tasc_runtime.errors import FileError
from tasc_runtime.protocol import Answer, Call
from tasc_runtime.sampling_options import SamplingOptions

PREVIEW_ROWS = 20


@dataclass(frozen=True)
class RowAnswers:
    """One answer to each row, by one rule; random numbers of each row are its own."""

    asked: SamplingOptions
    draft: bool

    def calls(self, row: Row, worker: EngineBuilder) -> Sequence[Call]:
        asked = dataclasses.replace(self.asked, prompt=row.ordinal)
        return [Call(row.id, row.payload, templated=True, draft=self.draft, options=asked)]

    def content(self, row: Row, answers: Sequence[Answer], worker: EngineBuilder) -> dict[str, Any]:
        result = answers[0].result
        return {
            "text": result.text,
            "tokens": list(result.tokens),
            "finish_reason": result.finish_reason,
            "model": worker.record.model,
            "adapter": self.asked.adapter_of(worker.record) or worker.record.adapter,
            "index_version": result.index_version,
        }


def generate(
    url: str,
    task: str,
    source: Source | Path,
    output: Path,
    *,
    engine: EngineSettings | None = None,
    draft: bool = True,
    asked: SamplingOptions | None = None,
    reject: Path | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    progress: Callable[[JobProgress], None] = lambda progress: None,
    **job: Any,
) -> JobReport:
    """Answer every good row of ``source``, in order, into ``output``, .jsonl or .parquet.

    The output appears only when it is whole. Until then, and afterwards for the record, the job's
    state is in the folder ``OUTPUT.job``; the same call goes on where an earlier one ended.

    Args:
        asked: How answers are wanted.
        reject: Where rows without an answer go, as JSON lines ``line, id, reason`` and, of several
            files, ``file``; beside the output if unset. It is there only if there are any.
        job: More of a `JobSpec`: actors, max_errors, restart ...

    Raises:
        FileError: The input cannot be read, or the output not be written, or a file of the input
            would be written to.
        UnknownTask: There is no such task.
        JobError: See `run_job`.
    """
    check_output(output)
    source = Source.of(source) if isinstance(source, Path) else source
    rejects = reject or reject_file(output)
    check_written(source.files, (output, rejects))
    spec, found = _spec(url, task, source, output, engine, draft, asked, job)
    strategy = RowAnswers(asked or SamplingOptions(), draft)
    finish = partial(write_files, output, rejects)
    return run_job(spec, found.rows, strategy, finish, should_stop=should_stop, progress=progress)


def dry_run(
    url: str,
    task: str,
    source: Source | Path,
    output: Path,
    *,
    engine: EngineSettings | None = None,
    asked: SamplingOptions | None = None,
    **job: Any,
) -> tuple[Preview, int]:
    """Time the first rows with drafts and without; what was found, and the rows there are.

    It writes nothing.

    Raises:
        FileError: The input cannot be read, or has no row that can be answered.
        JobError: No engine can be built.
    """
    spec, found = _spec(url, task, source, output, engine, True, asked, {**job, "restart": True})
    good = (row for row in found.rows() if row.refused is None)
    rows = list(islice(good, PREVIEW_ROWS))
    if not rows:
        raise FileError("no row of the input can be answered; see what --input-field names")
    return preview_job(spec, rows, RowAnswers(asked or SamplingOptions(), draft=True)), found.total


def _spec(
    url: str,
    task: str,
    source: Source | Path,
    output: Path,
    engine: EngineSettings | None,
    draft: bool,
    asked: SamplingOptions | None,
    job: dict[str, Any],
) -> tuple[JobSpec, Input]:
    source = Source.of(source) if isinstance(source, Path) else source
    engine = engine or EngineSettings()
    begun = None if job.get("restart") else JobFolder(job_folder(output)).begun()
    if begun and begun.report and not output.exists():
        begun, job = None, {**job, "restart": True}  # it was done, and somebody took the output
    found = open_input(source, url, begun.pins.get("input") if begun else None)
    pins = {
        "input": found.pins,
        "input_field": source.input_field,
        "id_field": source.id_field,
        "task": task,
        "draft": draft,
        "max_model_len": engine.max_model_len,
        **_pins_of(asked or SamplingOptions()),
    }
    spec = JobSpec(url, task, job_folder(output), pins, engine, total=found.total, **job)
    return spec, found


def _pins_of(asked: SamplingOptions) -> dict[str, Any]:
    """What changes answers; of a guide, which may be long, its hash."""
    pins = dataclasses.asdict(asked)
    if asked.guide:
        text = json.dumps([asked.guide.spec.choices, asked.guide.spec.text])
        pins["guide"] = [asked.guide.spec.kind, hashlib.sha256(text.encode()).hexdigest()]
    del pins["prompt"], pins["choice"]
    return pins
