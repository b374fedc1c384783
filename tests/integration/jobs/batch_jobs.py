"""Batch jobs with a tiny model, in this process or in one that can be killed, and what to kill."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import ray
import torch
from transformers import AutoModelForCausalLM

import support
import tiny
from support import DEADLINE_S
from tasc_runtime.engine_settings import EngineSettings
from tasc_store import TaskRecord
from tasc_text import TaskTokenizer

ENGINE = EngineSettings(rows=8, max_model_len=64, cost_aware=False)
MAX_TOKENS = 12
_DRIVER = """
import os, signal, sys
from pathlib import Path
from tasc_jobs.batch.generate import generate
from tasc_jobs.batch.inputs import Source
from tasc_jobs.ray_local import local_ray
from tasc_runtime.engine_settings import EngineSettings
url, task, source, output, least = sys.argv[1:]
engine = EngineSettings(rows=8, max_model_len=64, cost_aware=False)
def told(found):
    if found.engines and found.report.rows >= int(least):
        print(found.report.rows, flush=True)
        for victim in sys.stdin.readline().split():
            os.kill(int(victim) or os.getpid(), signal.SIGKILL)
with local_ray(object_store_mb=100):
    generate(url, task, Source.of(source), Path(output), engine=engine, progress=told)
"""


def record_of(task: str, folder: Path, **fields: object) -> TaskRecord:
    fields |= {"dtype": "float64", "max_tokens": MAX_TOKENS, "draft": support.EAGER}
    return support.record_of(folder, task, "say {input}\n", **fields)


def expected(folder: Path, inputs: Sequence[str]) -> list[list[int]]:
    """What the model says to each input by itself."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    tokenizer = TaskTokenizer.from_folder(folder)
    prompts = [tokenizer.encode_prompt(f"say {text}\n") for text in inputs]
    return [tiny.plain(model, prompt, MAX_TOKENS) for prompt in prompts]


def rows(count: int) -> list[object]:
    return [
        {"id": f"r{i}", "input": f"wake me at {i} " + "please " * (i % 5)} for i in range(count)
    ]


@contextmanager
def driver(
    url: str, task: str, source: Path, output: Path, *, least: int, own_ray: bool = False
) -> Iterator[subprocess.Popen[str]]:
    """A process that runs the job, on this process's Ray or its own, until it has ``least`` rows.

    It then waits to be told by `tell` whom to kill.
    """
    env = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    if not own_ray:
        env["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
    args = [url, task, str(source), str(output), str(least)]
    process = subprocess.Popen(
        [sys.executable, "-c", _DRIVER, *args],
        env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def rows_done(process: subprocess.Popen[str]) -> int:
    """How many rows a driver has done when it first waits to be told."""
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.strip().isdigit(), process.communicate()
    return int(line)


def kill_itself(process: subprocess.Popen[str]) -> None:
    """Have a driver end by SIGKILL."""
    process.communicate("0\n", timeout=DEADLINE_S)
    assert process.returncode == -signal.SIGKILL


def kill_others(process: subprocess.Popen[str], victims: Sequence[int]) -> str:
    """Have a driver kill other processes, and go on; what it says until it ends."""
    _, err = process.communicate(" ".join(map(str, victims)) + "\n", timeout=DEADLINE_S)
    return err
