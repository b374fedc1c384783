"""Quality of the shipped adapters on their full test splits, by our engine with drafts on.

    python -m tasc_jobs.demo.evaluate

One engine at a time, in this process; no store and no service. Prints one JSON object.
"""

import json
from typing import Any

import torch

from tasc_jobs.demo.tasks import TASKS, demo_record, read_split
from tasc_jobs.evaluate.measured_model import MeasuredModel, Setup, answer
from tasc_jobs.evaluate.quality import Metrics, quality
from tasc_jobs.task_inputs import GenerationSettings
from tasc_runtime.engine.builder import device_of, model_source
from tasc_runtime.progress import Progress
from tasc_store import CorpusRow
from tasc_text import PromptTemplate

MAX_TOKENS = 512
_METRICS: dict[str, Metrics] = {"massive_en": "massive", "pos_ewt": "tags"}


def evaluate(task: str) -> dict[str, Any]:
    """Quality and block efficiency of one task over its whole test split."""
    record = demo_record(task)
    source = model_source(record, device_of("auto", gpus=torch.cuda.device_count()))
    generation = GenerationSettings(PromptTemplate(record.template), MAX_TOKENS, draft=record.draft)
    measured = MeasuredModel(source, generation, Setup())
    rows = read_split(task, "test")
    train = [CorpusRow(r["id"], r["input"], r["output"]) for r in read_split(task, "train")]
    prompts = measured.prompts([r["input"] for r in rows])
    with Progress(task, len(prompts)) as bar:
        run = answer(measured, prompts, measured.index(train), bar.advance)
    found = quality(run.texts, [r["output"] for r in rows], _METRICS[task])
    return {"rows": len(rows), "block_efficiency": run.tokens / run.steps, **found}


def main() -> None:
    print(json.dumps({task: evaluate(task) for task in TASKS}))


if __name__ == "__main__":
    main()
