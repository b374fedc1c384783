"""The shipped model in NF4, drafts on: memory, quality, and what drafts change."""

from typing import Any

import torch
from bench_requests import Asked
from draft_bars import Figure
from requests_engine import Drafted, Run, load, prompts
from torch import nn

from tasc_engine import GenerationRequest
from tasc_engine.loading import ModelSource, load_model
from tasc_jobs.demo.tasks import HERE, MODEL, TEMPLATES, read_split
from tasc_jobs.evaluate.quality import IntentQuality, intent_quality
from tasc_text import PromptTemplate

TASK = "massive_en"
MEMORY, POINTS = 0.3, 2.0


def measure(asked: Asked) -> tuple[list[Figure], dict[str, Any]]:
    """All against the same model in bfloat16."""
    render = PromptTemplate(TEMPLATES[TASK]).render
    train, test = (read_split(TASK, split) for split in ("train", "test"))
    test = test[: asked.rows]
    ids = prompts([render(r["input"]) for r in test])
    requests = [GenerationRequest(str(i), p, 128) for i, p in enumerate(ids)]
    examples = [(render(r["input"]), r["output"]) for r in train]
    runs: dict[str, Run] = {}
    for name in ("nf4", None):
        adapter = HERE / "adapters" / TASK
        ours = Drafted(load(dtype="bfloat16", quantization=name, adapter=adapter), examples)
        runs[f"{name}"] = ours.run(requests)
        runs[f"{name} plain"] = ours.run(requests, draft=False)
    truth = [r["output"] for r in test]
    quality = {name: intent_quality(run.texts, truth) for name, run in runs.items()}
    share = linear_bytes("nf4") / linear_bytes(None)
    lost = 100 * worst_loss(quality["None"], quality["nf4"])
    changed, tokens = differences(runs["nf4"], runs["nf4 plain"])
    efficiency = {name: run.totals.block_efficiency for name, run in runs.items()}
    return [
        Figure("nf4: memory of linear layers / bfloat16", share, "x", MEMORY, upwards=False),
        Figure("nf4: quality lost, the worst of three", lost, "points", POINTS, upwards=False),
        Figure("nf4: drafted rows unlike plain NF4's, a token", changed / tokens, "", None),
        Figure(
            "nf4: block efficiency / bfloat16's", efficiency["nf4"] / efficiency["None"], "x", 0.9
        ),
    ], {
        "rows": len(test),
        "quality": {name: vars(found) for name, found in quality.items()},
        "block_efficiency": efficiency,
        "tokens_per_second": {name: run.tokens_per_second for name, run in runs.items()},
    }


def linear_bytes(quantization: Any) -> int:
    """Of weights between embedding and head, and of what is needed to read them."""
    model = load_model(ModelSource(MODEL, dtype="bfloat16", quantization=quantization))
    linears = [
        m for n, m in model.named_modules() if isinstance(m, nn.Linear) and "lm_head" not in n
    ]
    return sum(_bytes(linear.weight) for linear in linears)


def _bytes(weight: Any) -> int:
    state = getattr(weight, "quant_state", None)
    kept = state.as_dict(packed=False).values() if state else ()
    tensors = [weight, *(t for t in kept if isinstance(t, torch.Tensor))]
    return sum(t.nbytes for t in tensors)


def worst_loss(full: IntentQuality, quantised: IntentQuality) -> float:
    return max(vars(full)[name] - vars(quantised)[name] for name in vars(full))


def differences(drafted: Run, plain: Run) -> tuple[int, int]:
    """First differences, and the tokens up to them."""
    changed = tokens = 0
    for a, b in zip(drafted.results, plain.results, strict=True):
        same = [x == y for x, y in zip(a.tokens, b.tokens, strict=False)]
        changed += a.tokens != b.tokens
        tokens += same.index(False) + 1 if False in same else len(same)
    return changed, tokens
