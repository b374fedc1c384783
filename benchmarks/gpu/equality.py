"""The parts that check answers: float32 against `generate` of transformers, and the tests.

Drafted float32 answers must equal those of `generate`, except for near-ties, because the order of
sums differs. A part with a difference that is no near-tie fails.
"""

import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from benchmarks.common import ROOT
from benchmarks.engine.equal import compare
from benchmarks.gpu.answers import judge_of
from benchmarks.gpu.gpu import Found, Here
from benchmarks.gpu.work import (
    BASE,
    DEMO,
    DRAFTED,
    PLAIN,
    TASK,
    Work,
    encoded,
    index_of,
    rows,
    share_of_equal,
    task_index,
)
from tasc_engine import EngineConfig, ModelSource, Target
from tasc_engine.model.loading import load_model
from tasc_text import TaskTokenizer
from tiny import make_model, make_tokenizer

TINY = ("qwen2", "llama", "mistral", "gemma2")
# Logits of the demo model are about 20; a GPU's float32 sums differ by less than this.
NEAR = 1e-3
_TOKENS = 24
_COUNT = re.compile(r"(\d+) (passed|failed|errors?|skipped)")


def equality(found: Found, here: Here) -> None:
    """Tiny random models, rows with an adapter beside rows without, and drawn answers."""
    for name in TINY[: here(len(TINY), 2)]:
        folder = here.work / name
        make_tokenizer(folder)
        reference, model = (
            make_model(folder, name, dtype=torch.float32).to(here.device) for _ in range(2)
        )
        reference.set_attn_implementation("eager")
        tokenizer, random = TaskTokenizer.from_folder(folder), np.random.default_rng(0)
        prompts = [random.integers(1, tokenizer.vocab_size, n).tolist() for n in range(3, 43, 3)]
        answers = generated(reference, prompts)
        index = index_of(tokenizer, prompts[::2], answers[::2])
        target = Target(model, EngineConfig(rows=4, max_model_len=128, prefill_chunk=16))
        work = Work(target, tokenizer, index, prompts, max_tokens=_TOKENS)
        ran = work.run(DRAFTED, len(prompts))
        accepted = int(ran.totals.accepted.sum())
        judged(found, name, ran.answers, answers, prompts, reference, accepted)
    shipped(found, here)


def shipped(found: Found, here: Here) -> None:
    """The shipped model: every other row uses its adapter; then drawn answers."""
    adapter, tokenizer = DEMO / "adapters" / TASK, TaskTokenizer.from_folder(BASE)
    source = ModelSource(BASE, device=here.device, adapters=((TASK, adapter),))
    target = Target.load(source, EngineConfig(rows=8))
    prompts = encoded(tokenizer, [row["input"] for row in rows("test")[: here(64, 8)]])
    index = task_index(tokenizer, rows("train")[: here(2000, 300)])
    kinds: tuple[dict[str, Any], ...] = ({"adapter": TASK}, {})
    work = Work(target, tokenizer, index, prompts, max_tokens=_TOKENS, kinds=kinds)
    ran = work.run(DRAFTED, len(prompts))
    for first, name in enumerate(("rows with an adapter", "rows without beside them")):
        model = load_model(ModelSource(BASE))
        reference = (model if first else merged(model, adapter)).to(here.device)
        own, accepted = prompts[first::2], int(ran.totals.accepted.sum())
        answers = generated(reference, own)
        judged(found, name, ran.answers[first::2], answers, own, reference, accepted)
    work.kinds = [{"parameters": {"temperature": 1.0}, "seed": seed} for seed in range(64)]
    drafted, plain = (work.run(kind, len(prompts)).answers for kind in (DRAFTED, PLAIN))
    # A draw near the edge of a token may differ.
    same = share_of_equal(drafted, plain)
    found.figure("drawn answers that drafts leave equal", same, "of the rows")


@torch.no_grad()
def merged(model: Any, adapter: Path) -> Any:
    """Add a LoRA adapter to the weights of a model (Hu et al. 2021, arXiv 2106.09685).

    peft is not used, as another release of it may not read the settings of the adapter.
    """
    settings = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
    parts = load_file(adapter / "adapter_model.safetensors")
    for name, down in parts.items():
        if name.endswith(".lora_A.weight"):
            up = parts[name.replace("lora_A", "lora_B")]
            layer = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            scale = settings["lora_alpha"] / settings["r"]
            model.get_submodule(layer).weight += scale * (up.float() @ down.float())
    return model


@torch.inference_mode()
def generated(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    """The answer of ``generate`` to each prompt alone."""
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=model.device)
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=_TOKENS, do_sample=False,
            pad_token_id=0,
        )  # fmt: skip
        answers.append(out[0, len(prompt) :].tolist())
    return answers


def judged(
    found: Found, name: str, ours: list[list[int]], others: list[list[int]],
    prompts: list[list[int]], model: Any, accepted: int,
) -> None:  # fmt: skip
    """Record how many answers are equal; raises AssertionError if one that differs is no tie."""
    equal = compare(ours, others, prompts, judge_of(model), NEAR)
    found.figure(
        f"{name}, equal to `generate`", equal.identical, "of the rows", rows=equal.rows,
        greatest_margin=equal.greatest_margin, accepted=accepted,
    )  # fmt: skip
    assert not equal.above, f"{name}: {equal.above} answers differ by more than {NEAR}"


def tests(found: Found, here: Here) -> None:
    """Test the kernels and captured graphs against their references."""
    names = "test_gpu_graphs.py" if here.dry else "test_gpu_*.py"
    files = [str(path) for path in (ROOT / "tests" / "unit" / "tasc_engine").glob(names)]
    command = [
        sys.executable, "-m", "pytest", "-q", "-W", "default", "-o", "addopts=", "-rsfE",
        "--noconftest", "-p", "no:cacheprovider", *files,
    ]  # fmt: skip
    # Most of the time is spent in compiling kernels, each on one core.
    if not here.dry and find_spec("xdist") is not None:
        command += ["-n", "8"]
    done = subprocess.run(command, capture_output=True, text=True)
    print(done.stdout[-20000:], done.stderr[-2000:])
    lines = done.stdout.strip().splitlines() or [""]
    found.put("said", [s[:200] for s in lines if s.startswith(("FAILED", "ERROR", "SKIPPED"))])
    for count, kind in _COUNT.findall(lines[-1]):
        found.figure(kind, float(count), "tests")
    assert done.returncode == 0, f"pytest ended with {done.returncode}"
