"""llama.cpp with q8_0 weights as a side: as many sequences as rows together, without drafts.

`to_gguf` writes the weights. The loop is that of llama.cpp's server, without HTTP: a step decodes
the last token of each open row and the whole prompts of new rows, and an ended row is replaced.
The next token of a row is the greatest of its logits. Flash attention over one cache that the
sequences share was the fastest of the settings here; caches of their own took a third longer.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from loop import Job, Other, Ran, Run, no_other, serve

LENGTH = 1024  # tokens of a sequence


@dataclass
class Row:
    """An open row: the tokens that the next step decodes, and how many came before them."""

    index: int
    sequence: int
    fed: list[int]
    began: float
    past: int = 0


class LlamaCpp:
    """The settings are ``plain`` and the rows decoded together."""

    def __init__(self, job: Job) -> None:
        self.job, self.context = job, cache(self._context)
        with tempfile.TemporaryDirectory(prefix="engine-bench-gguf-") as folder:
            file = Path(folder) / "model.gguf"
            script = Path(__file__).with_name("to_gguf.py")
            # In a child process, so that its memory does not count.
            subprocess.run([sys.executable, script, job.folder, file], check=True)
            params = llama_cpp.llama_model_default_params()
            self.model: Any = llama_cpp.llama_model_load_from_file(bytes(file), params)
        vocab = llama_cpp.llama_model_get_vocab(self.model)
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(vocab)
        self.batch = llama_cpp.llama_batch_init(job.batch * LENGTH, 0, 1)

    def run(self, setting: str, prompts: Sequence[list[int]]) -> Ran:
        """Decode until all rows are answered."""
        batch, rows = int(setting.split()[1]), len(prompts)
        context, began = self.context(batch), time.perf_counter()
        ran, open_, row = Ran([[] for _ in range(rows)]), list[Row](), 0
        while open_ or row < rows:
            while row < rows and len(open_) < batch:
                sequence = min(set(range(batch)) - {one.sequence for one in open_})
                open_.append(Row(row, sequence, prompts[row], time.perf_counter()))
                row += 1
            tokens = self.step(context, open_)
            ran.steps += 1
            ran.row_steps += len(open_)
            open_ = [
                one
                for one, token in zip(open_, tokens, strict=True)
                if self.goes_on(context, one, token, ran)
            ]
        ran.seconds = time.perf_counter() - began
        return ran

    def step(self, context: Any, open_: Sequence[Row]) -> list[int]:
        """The next token of each row."""
        batch, last, n = self.batch, list[int](), 0
        for row in open_:
            for token in row.fed:
                batch.token[n], batch.pos[n], batch.logits[n] = token, row.past, 0
                batch.n_seq_id[n], batch.seq_id[n][0] = 1, row.sequence
                row.past += 1
                n += 1
            batch.logits[n - 1] = 1
            last.append(n - 1)
        batch.n_tokens = n
        if code := llama_cpp.llama_decode(context, batch):
            raise RuntimeError(f"llama_decode returned {code} for {n} tokens")
        shape = (self.vocab_size,)
        logits = (llama_cpp.llama_get_logits_ith(context, i) for i in last)
        return [int(np.ctypeslib.as_array(each, shape).argmax()) for each in logits]

    def goes_on(self, context: Any, row: Row, token: int, ran: Ran) -> bool:
        """Note the token of a row; whether the row needs another one."""
        answer, now = ran.answers[row.index], time.perf_counter()
        if not answer:
            ran.first.append(now - row.began)
        answer.append(token)
        row.fed = [token]
        if token not in self.job.eos and len(answer) < self.job.max_tokens:
            return True
        ran.latency.append(now - row.began)
        memory = llama_cpp.llama_get_memory(context)
        llama_cpp.llama_memory_seq_rm(memory, row.sequence, -1, -1)
        return False

    def _context(self, batch: int) -> Any:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = params.n_batch = batch * LENGTH
        params.n_seq_max = batch
        params.n_threads = params.n_threads_batch = self.job.threads
        params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
        params.kv_unified = params.no_perf = True
        return llama_cpp.llama_init_from_model(self.model, params)


def load(job: Job) -> tuple[Run, Other]:
    return LlamaCpp(job).run, no_other


if __name__ == "__main__":
    serve(load)
