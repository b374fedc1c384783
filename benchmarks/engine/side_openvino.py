"""Continuous batching of OpenVINO GenAI as a side, with and without its prompt lookup.

The exporter writes the weights in float32, or in int8 if the job asks for it. The plugin computes
in the job's dtype, or in float32 with int8 weights, and keeps its cache in that dtype (its default
is 8 bits). OpenVINO 2026.4.1 fails with a division by zero if bf16 is requested with one thread or
one core. So it loads with its own number of threads, which are not pinned, and each run restricts
them to as many cores as the job has threads.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai
from loop import Job, Other, Ran, Run, hold, no_other, serve

LOOKUP_TOKENS, LOOKUP_NGRAM = 8, 2
CACHE_GB = 1
PRECISION = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}


class OpenVino:
    """The settings are ``plain 8``, ``lookup 8`` and ``lookup 1``; an ended row is replaced."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._temporary = tempfile.TemporaryDirectory(prefix="engine-bench-openvino-")
        self.folder = Path(self._temporary.name)
        export(Path(job.folder), self.folder, "int8" if job.quantization == "int8" else "fp32")
        self.pipelines = {kind: self.pipeline(kind) for kind in ("plain", "lookup")}
        self.next_id = 0

    def run(self, setting: str, prompts: Sequence[list[int]]) -> Ran:
        """Step until all rows are answered; the time includes reading the handles."""
        hold(self.job.threads)  # for each run, because a run may start threads
        kind, batch = setting.split()
        pipeline, config = self.pipelines[kind], self.config(kind)
        rows = len(prompts)
        ran, open_ = Ran([[] for _ in range(rows)]), dict[int, tuple[Any, float]]()
        began, row = time.perf_counter(), 0
        while open_ or row < rows:
            while row < rows and len(open_) < int(batch):
                open_[row] = self.add(pipeline, prompts[row], config), time.perf_counter()
                row += 1
            pipeline.step()
            ran.steps += 1
            ran.row_steps += len(open_)
            self.read(ran, open_)
        ran.seconds = time.perf_counter() - began
        ran.answers = [self.job.whole(answer) for answer in ran.answers]
        return ran

    def add(self, pipeline: Any, ids: list[int], config: Any) -> Any:
        self.next_id += 1
        prompt = ov.Tensor(np.array([ids], np.int64))
        return pipeline.add_request(self.next_id, prompt, config)

    @staticmethod
    def read(ran: Ran, open_: dict[int, tuple[Any, float]]) -> None:
        now = time.perf_counter()
        for i, (handle, began) in list(open_.items()):
            while handle.can_read():
                if not ran.answers[i]:
                    ran.first.append(now - began)
                ran.answers[i] += handle.read()[0].generated_ids
            if handle.get_status() != genai.GenerationStatus.RUNNING:
                ran.latency.append(now - began)
                del open_[i]

    def pipeline(self, kind: str) -> Any:
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = CACHE_GB
        # int8 weights are multiplied fastest if the rest is float32.
        precision = "f32" if self.job.quantization == "int8" else PRECISION[self.job.dtype]
        properties: dict[str, Any] = {
            "INFERENCE_PRECISION_HINT": precision,
            "KV_CACHE_PRECISION": precision,
            "ENABLE_CPU_PINNING": False,
        }
        if kind == "lookup":
            properties["prompt_lookup"] = True
        return genai.ContinuousBatchingPipeline(str(self.folder), scheduler, "CPU", properties)

    def config(self, kind: str) -> Any:
        config = genai.GenerationConfig()
        config.max_new_tokens, config.do_sample = self.job.max_tokens, False
        config.eos_token_id, config.stop_token_ids = self.job.eos[0], set(self.job.eos)
        if kind == "lookup":
            config.num_assistant_tokens, config.max_ngram_size = LOOKUP_TOKENS, LOOKUP_NGRAM
        return config


def export(model: Path, folder: Path, weights: str) -> None:
    """Export in a child process, so that its memory does not count."""
    command = [
        sys.executable, "-m", "optimum.commands.optimum_cli", "export", "openvino", "--model",
        str(model), "--task", "text-generation-with-past", "--weight-format", weights, str(folder),
    ]  # fmt: skip
    subprocess.run(command, check=True)


def load(job: Job) -> tuple[Run, Other]:
    return OpenVino(job).run, no_other


if __name__ == "__main__":
    serve(load)
