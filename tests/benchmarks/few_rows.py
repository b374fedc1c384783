"""Benchmarks as their users run them, on a few of the shipped rows. It judges nothing."""

import gzip
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasc_jobs.demo.tasks import read_split


def few_rows(folder: Path, few: Mapping[str, int]) -> Path:
    """A folder of task data with so many rows of each split of massive_en."""
    (folder / "massive_en").mkdir(parents=True)
    for split, rows in few.items():
        file = folder / "massive_en" / f"{split}.jsonl.gz"
        with gzip.open(file, "wt", encoding="utf-8") as lines:
            lines.writelines(
                json.dumps(row) + "\n" for row in read_split("massive_en", split)[:rows]
            )
    return folder


def run(benchmark: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(Path(__file__).with_name(benchmark)), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def last_line(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """The JSON object that a run ends with."""
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
