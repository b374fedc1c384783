"""What `tasc finetune` is given, as a job; and how it is run, here or by Ray Train workers."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from redis import Redis

from tasc_jobs.errors import EmptyCorpusError, UsageError
from tasc_jobs.finetune.finetuning import Finetune, finetune
from tasc_jobs.finetune.hyperparameters import FinetuneSettings
from tasc_jobs.runtime.stages import StageProgress
from tasc_jobs.tuning.task_rows import from_corpus
from tasc_runtime.rows import Fields, read_corpus
from tasc_store import CorpusRow, CorpusStore, TaskRecord, TaskStore, UnknownTask, connect
from tasc_text import PromptTemplate, resolve_folder


@dataclass(frozen=True)
class FinetuneRequest:
    """What to train, as far as it was said; the task's record says the rest."""

    task: str
    model: str | None
    tokenizer: Path | None
    template: str | None
    files: tuple[Path, ...]
    fields: tuple[str, str]
    eos: str | None = None

    @property
    def wants_store(self) -> bool:
        return not (self.files and self.model and self.template)


@dataclass(frozen=True)
class FinetuneOptions:
    """What changes no result.

    Attributes:
        threads: Of a process on a CPU; None: all cores.
    """

    workers: int
    threads: int | None


@dataclass(frozen=True)
class FinetuneReport:
    """What became of it."""

    found: dict[str, Any]

    @property
    def as_json(self) -> dict[str, Any]:
        return self.found

    @property
    def in_words(self) -> str:
        found = self.found
        return (
            f"{found['steps']} steps on {found['rows']:,} rows ({found['too_long']} were too long),"
            f" loss {found['first_loss']:.3f} -> {found['loss']:.3f}, {found['new_tokens']} new"
            f" tokens, {found['seconds']:.0f} s"
            f"\n{found['output']}; `tasc evaluate --model {found['output']}/model` says how good "
            "it is, and whether it writes in its new tokens"
        )


def run(
    job: Finetune, how: FinetuneOptions, progress: StageProgress, say: Callable[[str], None]
) -> FinetuneReport:
    """Raises what `finetune` does."""
    if how.workers == 1:
        if how.threads:
            torch.set_num_threads(how.threads)
        return FinetuneReport(finetune(job, progress, say=say))
    from tasc_jobs.finetune.distributed import finetune_by
    from tasc_jobs.runtime.ray_local import local_ray

    with local_ray(num_cpus=how.workers + 1):
        gpus = torch.cuda.is_available()
        return FinetuneReport(finetune_by(how.workers, job, progress, say, gpus=gpus))


def job_of(
    url: str | None,
    given: FinetuneRequest,
    settings: FinetuneSettings,
    output: Path,
    checkpoint_s: float,
) -> Finetune:
    """Everything to be learnt, in memory; raises what a store, a file of rows or a template may."""
    record, rows = _stored(url, given) if url else (None, [])
    if given.files:
        rows = list(read_corpus(given.files, Fields(*given.fields)))
    if not rows:
        raise EmptyCorpusError(f"task {given.task} has no rows to learn; run `tasc ingest` first")
    name, revision = given.model, None
    if name is None and record:
        name, revision = record.model, record.revision
    template = given.template or (record.template if record else None)
    if name is None or template is None:
        lacks = "--template" if name else "--model"
        raise UsageError(
            f"there is no {lacks}, and no task {given.task} to take it from; give both --model and "
            "--template, or register the task (`tasc task create`)"
        )
    folder = resolve_folder(name, revision)
    text = template.replace("\\n", "\n") if given.template else template
    is_local = Path(name).expanduser().is_dir()
    return Finetune(
        given.task, folder, given.tokenizer or folder, rows, PromptTemplate(text), settings, output,
        checkpoint_s, base_name=None if is_local else name,
        revision=None if is_local else _commit(folder) or revision, eos=given.eos,
    )  # fmt: skip


def _commit(folder: Path) -> str | None:
    """What the hub's cache has a copy of: branches and tags move, and the copy does not."""
    return folder.name if folder.parent.name == "snapshots" else None


def _stored(url: str, given: FinetuneRequest) -> tuple[TaskRecord | None, list[CorpusRow]]:
    """The task's record, where one is needed, and the rows of its corpus."""
    with connect(url) as client:
        needed = given.model is None or given.template is None
        record = _record(client, given.task) if needed else None
        if given.files:
            return record, []
        corpus = CorpusStore(client, record.corpus_name if record else given.task)
        return record, list(from_corpus(corpus, len(corpus)))


def _record(client: Redis, task: str) -> TaskRecord | None:
    try:
        return TaskStore(client).get(task)
    except UnknownTask:
        return None
