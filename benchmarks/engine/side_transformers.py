"""``generate`` of transformers as a side: left-padded batches in file order, and prompt lookup.

The latency of a row is that of its batch, and so is the time to its first token. The attention is
the default of transformers. This side also computes the margins of the model.
"""

import time
from collections.abc import Sequence
from typing import Any

import torch
from loop import Job, Other, Ran, Run, serve
from transformers import AutoModelForCausalLM

LOOKUP_TOKENS = 8


class Transformers:
    """The settings are ``plain 8``, ``plain 1`` and ``lookup 1``."""

    def __init__(self, job: Job) -> None:
        torch.set_num_threads(job.threads)
        self.job = job
        dtype = getattr(torch, job.dtype)
        self.model: Any = AutoModelForCausalLM.from_pretrained(job.folder, dtype=dtype)
        self.ends: list[float] = []
        self.inside, self.entered = 0.0, 0.0
        self.model.register_forward_pre_hook(self.enter)
        self.model.register_forward_hook(self.leave)

    def run(self, setting: str, prompts: Sequence[list[int]]) -> Ran:
        kind, batch = setting.split()
        ran = Ran([])
        self.inside = 0.0
        for begin in range(0, len(prompts), int(batch)):
            self.batch(ran, prompts[begin : begin + int(batch)], kind)
        ran.verify = self.inside
        return ran

    def batch(self, ran: Ran, prompts: Sequence[list[int]], kind: str) -> None:
        self.ends.clear()
        began = time.perf_counter()
        answers = self.answer(prompts, kind)
        took = time.perf_counter() - began
        ran.seconds += took
        ran.latency += [took] * len(answers)
        ran.first += [self.ends[0] - began] * len(answers)
        ran.steps += len(self.ends)
        # A row that has ended is padded: it can emit only in the steps until its end.
        one = len(prompts) == 1
        ran.row_steps += len(self.ends) if one else sum(map(len, answers))
        ran.answers += answers

    @torch.inference_mode()
    def answer(self, prompts: Sequence[list[int]], kind: str) -> list[list[int]]:
        width, pad = max(map(len, prompts)), self.job.eos[0]
        ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        lookup = {"prompt_lookup_num_tokens": LOOKUP_TOKENS} if kind == "lookup" else {}
        out = self.model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=self.job.max_tokens,
            do_sample=False,
            pad_token_id=pad,
            eos_token_id=self.job.eos,
            **lookup,
        )
        return [self.job.whole(answer) for answer in out[:, width:].tolist()]

    @torch.inference_mode()
    def margins(self, call: dict[str, Any]) -> list[float]:
        """The difference of the two greatest logits after each prefix."""
        found = []
        for prefix in call["prefixes"]:
            logits = self.model(input_ids=torch.tensor([prefix])).logits[0, -1].float()
            first, second = logits.topk(2).values.tolist()
            found.append(first - second)
        return found

    def enter(self, *_: Any) -> None:
        self.entered = time.perf_counter()

    def leave(self, *_: Any) -> None:
        self.ends.append(time.perf_counter())
        self.inside += self.ends[-1] - self.entered


def load(job: Job) -> tuple[Run, Other]:
    side = Transformers(job)
    return side.run, side.margins


if __name__ == "__main__":
    serve(load)
