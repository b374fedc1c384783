"""What the batch benchmark answers: a task in Redis and a file of rows with ids of their own."""

import json
import sys
from contextlib import closing
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path

from tasc_jobs.demo.tasks import data_file, demo_record, read_split
from tasc_jobs.index_job import build_and_publish
from tasc_jobs.ingest import ingest
from tasc_jobs.ray_local import local_ray
from tasc_store import TaskRecord, TaskStore, connect
from tasc_text import TaskTokenizer

TASK = "massive_en"
TINY_TOKENS = 48


@dataclass(frozen=True)
class Work:
    """A task, its input and the options that `tasc generate` takes for it."""

    task: str
    source: Path
    rows: int
    options: tuple[str, ...]


def prepare(url: str, folder: Path, rows: int, *, tiny: bool) -> Work:
    """Register the task, with an index unless it is tiny, and write its input."""
    record = _tiny(folder / "model") if tiny else demo_record(TASK)
    with closing(connect(url)) as client:
        TaskStore(client).put(record)
        if not tiny:
            print("draft index ...", file=sys.stderr)
            ingest(client, TASK, [data_file(TASK, "train")], reject=folder / "rejects")
    if not tiny:
        with local_ray():
            build_and_publish(url, record)
    inputs = [row["input"] for row in read_split(TASK, "test")]
    source = folder / "in.jsonl"
    with source.open("w", encoding="utf-8") as file:
        for number, text in enumerate(islice(cycle(inputs), rows)):
            file.write(json.dumps({"id": f"{number:06}", "input": text}) + "\n")
    few = ("--max-unflushed", "200") if tiny else ()
    return Work(record.name, source, rows, ("--max-model-len", "256", *few))


def _tiny(folder: Path) -> TaskRecord:
    import torch

    from tiny import make_model, make_tokenizer

    make_tokenizer(folder)
    make_model(folder, dtype=torch.float32)
    return TaskRecord(
        name=TASK,
        model=str(folder),
        fingerprint=TaskTokenizer.from_folder(folder).fingerprint,
        template="say {input}\n",
        max_tokens=TINY_TOKENS,
    )
