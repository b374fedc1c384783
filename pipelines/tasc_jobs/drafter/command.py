"""What `tasc train-drafter` is given, as a job: from files, or from a task and its corpus."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from tasc_draft import DraftSettings
from tasc_engine import ModelSource
from tasc_engine.model.loading import DTYPES
from tasc_jobs.drafter.answers import read_answers
from tasc_jobs.drafter.hyperparameters import DrafterSettings
from tasc_jobs.drafter.training_run import DrafterJob
from tasc_jobs.errors import EmptyCorpusError, UsageError
from tasc_jobs.evaluate.subject import Asking, Setup
from tasc_jobs.tuning.task_rows import from_corpus
from tasc_runtime.engine.model_source import device_of, model_source
from tasc_runtime.rows import Fields, read_corpus
from tasc_store import CorpusRow, CorpusStore, TaskRecord, TaskStore, connect
from tasc_text import PromptTemplate, resolve_folder

_MAX_TOKENS = 256


@dataclass(frozen=True)
class TrainDrafterRequest:
    """The target and its rows, as far as they were said; the task's record says the rest.

    Attributes:
        limit: Take only so many rows.
    """

    task: str
    model: str | None
    adapter: str | None
    template: str | None
    files: tuple[Path, ...]
    fields: tuple[str, str]
    answers: Path | None
    dtype: str | None
    device: str
    max_tokens: int | None
    limit: int | None

    @property
    def wants_store(self) -> bool:
        return not ((self.files or self.answers) and self.model and self.template)


def job_of(
    url: str | None,
    given: TrainDrafterRequest,
    settings: DrafterSettings,
    setup: Setup,
    output: Path,
    checkpoint_s: float,
) -> DrafterJob:
    """Read rows or answers, and the task's record where one is needed.

    Raises:
        UsageError: What was given contradicts itself.
        FileError, EmptyCorpusError, StoreError: Rows or the record cannot be read.
        TemplateError: The template has not exactly one place for the input.
    """
    if given.dtype is not None and given.dtype not in DTYPES:
        raise UsageError(f"dtype is {given.dtype}; choose one of {', '.join(DTYPES)}")
    if given.adapter and not given.model:
        raise UsageError(f"--adapter {given.adapter} has no model; name its base with --model")
    record, rows = _stored(url, given) if url else (None, _rows(given))
    answers = read_answers(given.answers)[: given.limit] if given.answers else None
    if not rows and not answers:
        raise EmptyCorpusError(f"task {given.task} has no rows to answer; run `tasc ingest` first")
    return DrafterJob(
        given.task, _source(given, record), _asking(given, record), setup, rows, answers, settings,
        output, checkpoint_s,
    )  # fmt: skip


def in_words(found: dict[str, Any]) -> str:
    return (
        f"{found['steps']} steps on {found['rows']:,} answers ({found['left_out']} were left out), "
        f"loss {found['first_loss']:.3f} -> {found['loss']:.3f}, {found['parameters']:,} "
        f"parameters, {found['seconds']:.0f} s; of {found['held_out']} answers held out, "
        f"{found['agreement']:.1%} of the tokens are the drafter's own guess\n{found['output']}"
    )


def _stored(url: str, given: TrainDrafterRequest) -> tuple[TaskRecord | None, Sequence[CorpusRow]]:
    """The task's record, where one is needed, and rows to answer."""
    with connect(url) as client:
        needed = given.model is None or given.template is None
        record = TaskStore(client).get(given.task) if needed else None
        if given.files or given.answers:
            return record, _rows(given)
        corpus = CorpusStore(client, record.corpus_name if record else given.task)
        return record, list(from_corpus(corpus, len(corpus)))[: given.limit]


def _rows(given: TrainDrafterRequest) -> list[CorpusRow]:
    if given.answers:
        return []
    return list(islice(read_corpus(given.files, Fields(*given.fields)), given.limit))


def _source(given: TrainDrafterRequest, record: TaskRecord | None) -> ModelSource:
    device = device_of(given.device, gpus=torch.cuda.device_count())
    if given.model is not None:
        dtype = given.dtype or (record.dtype if record else "float32")
        adapter = resolve_folder(given.adapter) if given.adapter else None
        return ModelSource(resolve_folder(given.model), adapter, dtype, device)
    assert record is not None  # the store was asked
    if record.adapters:
        names = ", ".join(record.adapter_names)
        raise UsageError(
            f"task {record.name} has several adapters ({names}), a drafter is for one; name it "
            "with --model and --adapter"
        )
    return model_source(record, device)


def _asking(given: TrainDrafterRequest, record: TaskRecord | None) -> Asking:
    given_text = given.template.replace("\\n", "\n") if given.template else None
    return Asking(
        PromptTemplate(given_text or (record.template if record else "")),
        given.max_tokens or (record.max_tokens if record else _MAX_TOKENS),
        record.stop if record else (),
        record.draft if record else DraftSettings(),
    )
