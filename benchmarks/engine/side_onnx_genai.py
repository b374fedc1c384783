"""ONNX Runtime GenAI as a side: batches in file order, without drafts.

Its model builder writes weights of 8 bits in blocks of 32, which are multiplied with activations
rounded to 8 bits; a job without quantization has float32. The engine of ONNX Runtime GenAI that
replaces ended rows needs a GPU, so a batch lasts as long as its longest answer. Prompts are padded
at their end: padding in front changes the answers, because it is attended to. So a batch needs the
logits of all places of its prompts; one row needs those of the last place only.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime_genai as genai
from loop import Job, Other, Ran, Run, no_other, serve


class OnnxGenAi:
    """The settings are ``plain`` and the rows of a batch."""

    def __init__(self, job: Job) -> None:
        self.job, self.model = job, cache(self._model)
        used = {token for prompt in job.prompts for token in prompt}
        self.pad = min(set(range(len(used) + 1)) - used)

    def run(self, setting: str, prompts: Sequence[list[int]]) -> Ran:
        batch, ran = int(setting.split()[1]), Ran([])
        model = self.model(batch == 1)
        for begin in range(0, len(prompts), batch):
            self.batch(ran, model, prompts[begin : begin + batch])
        return ran

    def batch(self, ran: Ran, model: Any, prompts: Sequence[list[int]]) -> None:
        began, rows, width = time.perf_counter(), len(prompts), max(map(len, prompts))
        params = genai.GeneratorParams(model)
        length = width + self.job.max_tokens
        params.set_search_options(batch_size=rows, max_length=length, do_sample=False)
        generator = genai.Generator(model, params)
        padded = [prompt + [self.pad] * (width - len(prompt)) for prompt in prompts]
        generator.append_tokens(np.array(padded, np.int32))
        generator.generate_next_token()
        first, steps = time.perf_counter(), 1
        while not generator.is_done():
            generator.generate_next_token()
            steps += 1
        tokens = [generator.get_sequence(i)[width:].tolist() for i in range(rows)]
        took = time.perf_counter() - began
        answers = [self.job.whole(answer) for answer in tokens]
        ran.answers += answers
        ran.seconds += took
        ran.latency += [took] * rows
        ran.first += [first - began] * rows
        ran.steps += steps
        ran.row_steps += sum(map(len, answers))  # a row that has ended is padded

    def _model(self, last_logits: bool) -> Any:
        with tempfile.TemporaryDirectory(prefix="engine-bench-onnx-") as folder:
            build(Path(self.job.folder), Path(folder), self.job.quantization, last_logits)
            config = genai.Config(folder)
            threads = {"intra_op_num_threads": self.job.threads, "inter_op_num_threads": 1}
            decoder = {"session_options": threads}
            own = {"decoder": decoder, "pad_token_id": self.pad, "eos_token_id": self.job.eos}
            config.overlay(json.dumps({"model": own}))
            return genai.Model(config)


def build(model: Path, folder: Path, quantization: str, last_logits: bool) -> None:
    """Build in a child process, so that its memory does not count."""
    command = [
        sys.executable, "-m", "onnxruntime_genai.models.builder", "-m", model, "-o", folder,
        "-c", folder / "cache", "-e", "cpu", "-p", quantization or "fp32",
    ]  # fmt: skip
    if last_logits:
        command += ["--extra_options", "prune_lm_head=true"]
    subprocess.run(command, check=True)


def load(job: Job) -> tuple[Run, Other]:
    return OnnxGenAi(job).run, no_other


if __name__ == "__main__":
    serve(load)
