"""Run benchmark scripts as users do, from another folder and on a few of the shipped rows."""

import gzip
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tasc_jobs.demo.tasks import read_split

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TIMEOUT_S = 900  # of a test, in pyproject.toml
GRACE_S = 30.0
_SPARE_S = 60.0  # a script is ended this long before its test times out


def run(
    script: str, *options: str | Path, timeout_s: float = TIMEOUT_S
) -> subprocess.CompletedProcess[str]:
    """Run a script, named by its path below ``benchmarks``, to its end.

    It does not inherit what a Ray of this process has set for its own children.

    Args:
        timeout_s: The timeout of the test, or its share of it; see `complete`.
    """
    command = [sys.executable, str(BENCHMARKS / script), *map(str, options)]
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return complete(command, env, timeout_s - _SPARE_S)


def complete(
    command: Sequence[str], env: Mapping[str, str], deadline_s: float = TIMEOUT_S - _SPARE_S
) -> subprocess.CompletedProcess[str]:
    """Run a command in a process group of its own; after the deadline the group is ended.

    The deadline has to be before the timeout of the test, so that no process is left behind.
    """
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(
            command, cwd=tempfile.gettempdir(), env=env, stdout=out, stderr=err,
            start_new_session=True,
        )  # fmt: skip
        is_late = False
        try:
            process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            is_late = True
        finally:
            if process.poll() is None:
                _end_group(process)
        out.seek(0)
        err.seek(0)
        done = subprocess.CompletedProcess(command, process.returncode, out.read(), err.read())
    if is_late:
        pytest.fail(f"{command} was ended after {deadline_s:g} s\n{done.stdout}{done.stderr}")
    return done


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Send SIGTERM to a process group, and SIGKILL to those that do not end."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        deadline = time.monotonic() + GRACE_S
        while time.monotonic() < deadline:
            process.poll()
            os.killpg(process.pid, 0)  # raises ProcessLookupError when all have ended
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def record(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """The JSON object of the last line of a successful run."""
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def few_rows(folder: Path, few: Mapping[str, int]) -> Path:
    """Makes a folder of task data with ``few`` rows of each split of massive_en."""
    (folder / "massive_en").mkdir(parents=True)
    for split, rows in few.items():
        file = folder / "massive_en" / f"{split}.jsonl.gz"
        with gzip.open(file, "wt", encoding="utf-8") as lines:
            lines.writelines(
                json.dumps(row) + "\n" for row in read_split("massive_en", split)[:rows]
            )
    return folder
