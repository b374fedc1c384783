"""``Generator`` of CTranslate2 as a side: batches of prompts of like length, without prompt lookup.

The converter writes the weights in float32. The generator computes in int8 if the job asks for it;
else in the job's dtype if it supports it on this processor, otherwise in float32. Batches are those
of CTranslate2 for a list of prompts: the longest first. It reports neither steps nor first tokens.
Where the processor is not Intel's, it computes by oneDNN; ``CT2_USE_MKL=1`` took ten times as long.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ctranslate2
from loop import Job, Other, Ran, Run, no_other, serve
from transformers import AutoTokenizer


class CTranslate2:
    """The settings are ``plain`` and the rows of a batch."""

    def __init__(self, job: Job) -> None:
        self.job = job
        tokenizer: Any = AutoTokenizer.from_pretrained(job.folder)
        self.texts = tokenizer.convert_ids_to_tokens
        self.eos = tokenizer.convert_ids_to_tokens(job.eos)
        able = ctranslate2.get_supported_compute_types("cpu")
        computed = next(kind for kind in (job.quantization, job.dtype, "float32") if kind in able)
        with tempfile.TemporaryDirectory(prefix="engine-bench-ct2-") as folder:
            converted = Path(folder) / "model"
            convert(job.folder, converted)
            self.generator: Any = ctranslate2.Generator(
                str(converted), device="cpu", compute_type=computed,
                intra_threads=job.threads, inter_threads=1,
            )  # fmt: skip

    def run(self, setting: str, prompts: Sequence[list[int]]) -> Ran:
        batch, ran = int(setting.split()[1]), Ran([[] for _ in prompts])
        order = sorted(range(len(prompts)), key=lambda row: -len(prompts[row]))
        for begin in range(0, len(order), batch):
            rows = order[begin : begin + batch]
            texts = [self.texts(prompts[row]) for row in rows]
            began = time.perf_counter()
            results = self.generator.generate_batch(
                texts,
                max_length=self.job.max_tokens,
                end_token=self.eos,
                include_prompt_in_result=False,
            )
            took = time.perf_counter() - began
            ran.seconds += took
            ran.latency += [took] * len(texts)
            for row, result in zip(rows, results, strict=True):
                ran.answers[row] = self.job.whole(list(result.sequences_ids[0]))
        return ran


def convert(model: str, folder: Path) -> None:
    """Convert in a child process, so that its memory does not count."""
    converter = [sys.executable, "-m", "ctranslate2.converters.transformers"]
    subprocess.run([*converter, "--model", model, "--output_dir", folder], check=True)


def load(job: Job) -> tuple[Run, Other]:
    return CTranslate2(job).run, no_other


if __name__ == "__main__":
    serve(load)
