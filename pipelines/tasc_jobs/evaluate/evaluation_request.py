"""What `tasc evaluate` is given, as an evaluation: from files, or from a task and its corpus."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch

from tasc_draft import DraftSettings
from tasc_engine import ModelSource
from tasc_engine.model.loading import DTYPES
from tasc_jobs.errors import EmptyCorpusError, UsageError
from tasc_jobs.evaluate.evaluation import Evaluation
from tasc_jobs.evaluate.quality import Metrics
from tasc_jobs.evaluate.subject import Asking, Setup
from tasc_jobs.tuning.task_rows import from_corpus
from tasc_runtime.engine.model_source import device_of, model_source
from tasc_runtime.rows import Fields, read_corpus
from tasc_store import CorpusRow, CorpusStore, TaskRecord, TaskStore, connect
from tasc_text import PromptTemplate

MAX_TOKENS = 256


@dataclass(frozen=True)
class EvaluationRequest:
    """What was said; a task's record says the rest.

    Attributes:
        train: Files of rows to draft from; the task's corpus, if there are none.
        limit: Take only so many test rows.
    """

    task: str | None
    model: Path | None
    template: str | None
    test: tuple[Path, ...]
    train: tuple[Path, ...]
    fields: tuple[str, str]
    dtype: str | None
    device: str
    max_tokens: int | None
    limit: int | None


@dataclass(frozen=True)
class EvaluationOptions:
    """How it is measured."""

    metrics: Metrics
    setup: Setup
    repeats: int
    drafts: bool
    setting: str


def evaluation(url: str | None, given: EvaluationRequest, how: EvaluationOptions) -> Evaluation:
    """Read rows, and the task's record where there is a task.

    Raises:
        UsageError: Without a task, a model or a template is missing; or the dtype is none.
        FileError, EmptyCorpusError, StoreError: Rows or the record cannot be read.
        TemplateError: The template has not exactly one place for the input.
    """
    if given.dtype is not None and given.dtype not in DTYPES:
        raise UsageError(f"dtype is {given.dtype}; choose one of {', '.join(DTYPES)}")
    test = list(islice(read_corpus(given.test, Fields(*given.fields)), given.limit))
    if not test:
        raise EmptyCorpusError(f"no rows in {', '.join(map(str, given.test))}; name other files")
    record, train = _stored(url, given) if url else (None, _train(given))
    source = _source(given, record)
    return Evaluation(
        source, _asking(given, record), how.setup, how.metrics, test, train, how.repeats,
        how.drafts, how.setting or given.task or source.folder.name,
    )  # fmt: skip


def _stored(url: str, given: EvaluationRequest) -> tuple[TaskRecord, Sequence[CorpusRow]]:
    assert given.task is not None
    with connect(url) as client:
        record = TaskStore(client).get(given.task)
        if given.train:
            return record, _train(given)
        corpus = CorpusStore(client, record.corpus_name)
        return record, list(from_corpus(corpus, len(corpus)))


def _train(given: EvaluationRequest) -> list[CorpusRow]:
    return list(read_corpus(given.train, Fields(*given.fields)))


def _source(given: EvaluationRequest, record: TaskRecord | None) -> ModelSource:
    """The model named has its adapter in its weights; the task's has the one of its record."""
    device = device_of(given.device, gpus=torch.cuda.device_count())
    if given.model is not None:
        dtype = given.dtype or (record.dtype if record else "float32")
        return ModelSource(given.model, dtype=dtype, device=device)
    if record is None:
        raise UsageError("files do not say which model to evaluate; name one with --model")
    if record.adapters:
        names = ", ".join(record.adapter_names)
        raise UsageError(
            f"task {record.name} has several adapters ({names}); name with --model a model that "
            "has one of them in its weights"
        )
    return model_source(record, device)


def _asking(given: EvaluationRequest, record: TaskRecord | None) -> Asking:
    if given.template is not None:
        template = given.template.replace("\\n", "\n")
    elif record is not None:
        template = record.template
    else:
        raise UsageError("files do not say how to ask; name the prompt with --template")
    return Asking(
        PromptTemplate(template),
        given.max_tokens or (record.max_tokens if record else MAX_TOKENS),
        record.stop if record else (),
        record.draft if record else DraftSettings(),
    )
