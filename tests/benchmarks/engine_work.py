"""The rows that are answered and the folder that all sides read their weights from.

The folder is written with the adapter merged, in float32, so that every side rounds the same
numbers. It runs no engine.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

from engine_args import Asked
from engine_loop import Job

from tasc_engine.target import load_model
from tasc_jobs.demo.tasks import MODEL, TEMPLATES, demo_record, read_split
from tasc_serve.worker import model_source
from tasc_text import PromptTemplate, TaskTokenizer


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
    model = asked.model or export(task, folder / task)
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


def export(task: str, folder: Path) -> Path:
    """The shipped model with a task's adapter merged, as any project reads it."""
    model = load_model(model_source(demo_record(task), "cpu"))
    model.save_pretrained(folder)
    for file in MODEL.glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder
