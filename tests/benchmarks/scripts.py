"""Run benchmark scripts as users do, from another folder and on a few of the shipped rows."""

import gzip
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasc_jobs.demo.tasks import read_split

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def run(script: str, *options: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a script, named by its path below ``benchmarks``, to its end.

    It does not inherit what a Ray of this process has set for its own children.
    """
    command = [sys.executable, str(BENCHMARKS / script), *map(str, options)]
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return subprocess.run(
        command, cwd=tempfile.gettempdir(), env=env, capture_output=True, text=True, check=False
    )


def record(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """The JSON object of the last line of a successful run."""
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


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
