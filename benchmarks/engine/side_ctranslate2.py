"""``Generator`` of CTranslate2 as a side: batches in file order, without prompt lookup.

The converter writes the weights in float32. The generator computes in the job's dtype if it
supports it on this processor, otherwise in float32. It reports neither steps nor first tokens.
"""

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ctranslate2
from ctranslate2.converters import TransformersConverter
from loop import Job, Other, Ran, Run, no_other, serve
from transformers import AutoTokenizer


class CTranslate2:
    """The only setting is ``plain 8``."""

    def __init__(self, job: Job) -> None:
        self.job = job
        tokenizer: Any = AutoTokenizer.from_pretrained(job.folder)
        self.texts = tokenizer.convert_ids_to_tokens
        self.eos = tokenizer.convert_ids_to_tokens(job.eos)
        able = ctranslate2.get_supported_compute_types("cpu")
        computed = job.dtype if job.dtype in able else "float32"
        with tempfile.TemporaryDirectory(prefix="engine-bench-ct2-") as folder:
            converted = Path(folder) / "model"
            TransformersConverter(job.folder).convert(str(converted))
            self.generator: Any = ctranslate2.Generator(
                str(converted), device="cpu", compute_type=computed,
                intra_threads=job.threads, inter_threads=1,
            )  # fmt: skip

    def run(self, setting: str, prompts: Sequence[list[int]]) -> Ran:
        batch, ran = int(setting.split()[1]), Ran([])
        for begin in range(0, len(prompts), batch):
            texts = [self.texts(p) for p in prompts[begin : begin + batch]]
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
            ran.answers += [self.job.whole(list(r.sequences_ids[0])) for r in results]
        return ran


def load(job: Job) -> tuple[Run, Other]:
    return CTranslate2(job).run, no_other


if __name__ == "__main__":
    serve(load)
