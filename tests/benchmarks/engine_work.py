"""The rows that are answered and the folder that all sides read their weights from.

It is written with the adapter merged, in float32, so that every side rounds the same numbers. The
bench model lies where `make bench-model` puts it. It runs no engine.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

from engine_args import Asked
from engine_loop import Job

from tasc_engine.loading import ModelSource, load_model
from tasc_jobs.demo.tasks import MODEL, TEMPLATES, demo_record, read_split
from tasc_jobs.demo.train import SIZES
from tasc_serve.sources import model_source
from tasc_text import PromptTemplate, TaskTokenizer

_BENCH_MODEL = Path(__file__).resolve().parents[2] / ".bench" / "model" / SIZES["bench"].name


def model_of(asked: Asked) -> Path:
    """The folder of the model that answers; the shipped one has an adapter for each task."""
    if asked.model is not None:
        return asked.model
    return _BENCH_MODEL if _BENCH_MODEL.is_dir() and not asked.demo else MODEL


@dataclass(frozen=True)
class Work:
    """One task's rows; ``job`` goes to every side."""

    task: str
    job: Job

    @property
    def folder(self) -> Path:
        return Path(self.job.folder)


def work_of(task: str, asked: Asked, folder: Path) -> Work:
    """``folder`` is where a merged model may be written."""
    model = asked.model or export(task, model_of(asked), folder / task)
    tokenizer = TaskTokenizer.from_folder(model)
    template = PromptTemplate(TEMPLATES[task])
    rows = read_split(task, "test")[: asked.rows]
    job = Job(
        folder=str(model),
        task=task,
        prompts=[tokenizer.encode_prompt(template.render(r["input"])) for r in rows],
        max_tokens=asked.max_tokens if asked.model else demo_record(task).max_tokens,
        eos=list(tokenizer.eos_ids),
        threads=asked.threads,
        dtype=asked.dtype,
    )
    return Work(task, job)


def export(task: str, model: Path, folder: Path) -> Path:
    """A model with a task's adapter merged, as any project reads it."""
    shipped = model_source(demo_record(task), "cpu")
    source = shipped if model == MODEL else ModelSource(model)
    load_model(source).save_pretrained(folder)
    for file in model.glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder
