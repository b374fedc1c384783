"""The tasks that ship with tasc-serve: their model, adapters, data and prompt templates."""

from pathlib import Path
from typing import Any

from tasc_runtime.data.rows import read_raw_rows
from tasc_store import TaskRecord
from tasc_text import TaskTokenizer

HERE = Path(__file__).resolve().parent
MODEL, ADAPTERS = HERE / "tasc-demo-7m", HERE / "adapters"
TEMPLATES = {
    "massive_en": "intent and slots: {input}\n",
    "pos_ewt": "part of speech: {input}\n",
    "clinc150": "intent: {input}\n",  # for benchmarks; its data does not ship
}
TASK = "massive_en"  # task of `tasc demo`
TASKS = (TASK, "pos_ewt")  # tasks of `tasc demo --serve`


def demo_record(task: str, **precision: Any) -> TaskRecord:
    """Returns the task record of a shipped task, in float32.

    Args:
        precision: Another ``dtype``, and a ``quantization``.
    """
    return TaskRecord(
        name=task,
        model=str(MODEL),
        adapter=str(ADAPTERS / task),
        fingerprint=TaskTokenizer.from_folder(MODEL).fingerprint,
        template=TEMPLATES[task],
        max_tokens=256,
        **precision,
    )


def data_file(task: str, split: str) -> Path:
    """Returns the file with the shipped rows of a task; ``split`` is train or test."""
    return HERE / "data" / f"{task}.{split}.jsonl.gz"


def read_split(task: str, split: str) -> list[dict[str, str]]:
    return [record.value for record in read_raw_rows(data_file(task, split))]
