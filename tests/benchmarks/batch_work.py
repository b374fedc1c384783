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
_COMMAND = "from tasc_jobs.cli import main; main()"
# The command measures step costs of a model that is new, which takes longer than the tiny job.
_TINY_COMMAND = """
import sys
from pathlib import Path
from tasc_jobs.generate import generate
from tasc_jobs.ray_local import local_ray
from tasc_serve.settings import EngineSettings
_, task, _, source, _, output, _, url, *_ = sys.argv[1:]
engine = EngineSettings(max_model_len=256, cost_aware=False)
with local_ray():
    generate(url, task, Path(source), Path(output), engine=engine, max_unflushed=200, part_rows=50)
"""


@dataclass(frozen=True)
class Work:
    """A task, its input, and the program that answers it."""

    task: str
    source: Path
    rows: int
    code: str

    def command(self, output: Path, url: str) -> list[str]:
        """As `tasc generate` is called."""
        files = ["--input", str(self.source), "--output", str(output)]
        options = ["--redis-url", url, "--max-model-len", "256", "--json"]
        return [sys.executable, "-c", self.code, "generate", self.task, *files, *options]


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
    return Work(record.name, source, rows, _TINY_COMMAND if tiny else _COMMAND)


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
