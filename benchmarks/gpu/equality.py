"""The stage that compares drafted answers on the device with ``generate`` of transformers.

In float32 they must be equal, except for near-ties, because the order of sums differs. In half
precision drafted answers are compared with plain ones of the same engine, with the margins of the
float32 model, and with the answers in float32.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from benchmarks.engine.equal import TOLERANCE, Answers, compare
from benchmarks.gpu.gpu import Found, Here
from benchmarks.gpu.work import BASE, Work, index_of, model_folder
from tasc_engine import EngineConfig, Target
from tasc_text import TaskTokenizer
from tiny import make_model, make_tokenizer

TINY = ("qwen2", "llama", "mistral", "gemma2")
# Logits of the demo model are about 20; a GPU's float32 sums differ by less than this.
NEAR = 1e-3
TOKENS = 24


def equality(found: Found, here: Here) -> None:
    for name in TINY[: here(len(TINY), 2)]:
        found.put(f"tiny {name}", tiny(name, here))
    demo(found, here)
    adapted(found, here)
    sampled(found, here)


def tiny(name: str, here: Here) -> dict[str, Any]:
    """A random model, with drafts from half of its answers."""
    folder = here.folder / name
    make_tokenizer(folder)
    reference = make_model(folder, name, dtype=torch.float32).to(here.device)
    reference.set_attn_implementation("eager")
    model = make_model(folder, name, dtype=torch.float32).to(here.device)
    tokenizer, random = TaskTokenizer.from_folder(folder), np.random.default_rng(0)
    prompts = [random.integers(1, tokenizer.vocab_size, n).tolist() for n in range(3, 43, 3)]
    answers = generated(reference, prompts, TOKENS)
    index = index_of(tokenizer, prompts[::2], answers[::2])
    target = Target(model, EngineConfig(rows=4, max_model_len=128, prefill_chunk=16))
    ran = Work(target, tokenizer, index, prompts, TOKENS).run(True, 4, len(prompts))
    said = held_against(ran.answers, answers, prompts, reference, NEAR)
    return {**said, "accepted": int(ran.totals.accepted.sum()), "steps": ran.totals.steps}


def demo(found: Found, here: Here) -> None:
    """The shipped model on its test rows."""
    number = here(64, 4)
    reference = load(model_folder(here), here.device)
    work = Work.of_demo(here, "float32", number)
    answers = generated(reference, work.prompts, work.max_tokens)
    whole = work.run(True, 8, number)
    said = held_against(whole.answers, answers, work.prompts, reference, NEAR)
    found.put("demo float32", {**said, "accepted": int(whole.totals.accepted.sum())})
    half = Work.of_demo(here, here.dtype, number)
    drafted, plain = half.run(True, 8, number), half.run(False, 8, number)
    for name, one, other in (
        ("demo drafted against plain", drafted, plain.answers),
        ("demo drafted against float32", drafted, answers),
    ):
        said = held_against(one.answers, other, work.prompts, reference, TOLERANCE)
        found.put(name, {**said, "accepted": int(one.totals.accepted.sum()), "dtype": here.dtype})


def adapted(found: Found, here: Here) -> None:
    """Rows that use an adapter beside rows of the base model, in one engine."""
    work = Work.of_demo(here, "float32", here(32, 4), merged=False)
    work.max_tokens = TOKENS  # the base model does not end its answers
    ran, said = work.run(True, 8, len(work.prompts)), []
    for first, folder in enumerate((model_folder(here), BASE)):
        reference, prompts = load(folder, here.device), work.prompts[first::2]
        answers = generated(reference, prompts, work.max_tokens)
        said.append(held_against(ran.answers[first::2], answers, prompts, reference, NEAR))
    for name, each in zip(("demo adapter", "demo base beside it"), said, strict=True):
        found.put(name, {**each, "accepted": int(ran.totals.accepted.sum())})


def sampled(found: Found, here: Here) -> None:
    """Drawn answers with drafts and without; a draw near the edge of a token may differ."""
    work = Work.of_demo(here, "float32", here(64, 4))
    work.kinds = [{"parameters": {"temperature": 1.0}, "seed": seed} for seed in range(64)]
    drafted, plain = (work.run(kind, 8, len(work.prompts)) for kind in (True, False))
    same = [a == b for a, b in zip(drafted.answers, plain.answers, strict=True)]
    accepted = int(drafted.totals.accepted.sum())
    found.put("demo sampled", {"identical": sum(same) / len(same), "accepted": accepted})


def load(folder: Path, device: str) -> Any:
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    return model.to(device).eval()


@torch.inference_mode()
def generated(model: Any, prompts: list[list[int]], most: int) -> list[list[int]]:
    """The answer of ``generate`` to each prompt alone."""
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=model.device)
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=most, do_sample=False,
            pad_token_id=0,
        )  # fmt: skip
        answers.append(out[0, len(prompt) :].tolist())
    return answers


def held_against(
    ours: Answers, others: Answers, prompts: list[list[int]], model: Any, limit: float
) -> dict[str, Any]:
    """Compare answers; margins are those of the model."""

    @torch.inference_mode()
    def judge(prefixes: Answers) -> list[float]:
        margins = []
        for prefix in prefixes:
            logits = model(input_ids=torch.tensor([prefix], device=model.device)).logits[0, -1]
            first, second = logits.float().topk(2).values.tolist()
            margins.append(first - second)
        return margins

    equal = compare(ours, others, prompts, judge, limit)
    return {
        "rows": equal.rows,
        "identical": equal.identical,
        "compared": equal.compared,
        "per_token": equal.per_token,
        "above": equal.above,
        "greatest_margin": equal.greatest_margin,
        "limit": equal.limit,
    }
