"""The shipped model with two adapters in one batch, and quantised to NF4."""

from typing import Any

import torch
from torch import nn

from benchmarks.common import Figure
from benchmarks.requests.engines import Drafted, Options, Run, load, prompts
from tasc_engine import Request
from tasc_engine.model.loading import ModelSource, load_model
from tasc_jobs.demo.tasks import ADAPTERS, MODEL, TASKS, TEMPLATES, read_split
from tasc_jobs.statistics.quality import IntentQuality, intent_quality
from tasc_text import PromptTemplate

TASK = "massive_en"
MEMORY, POINTS, OVER_MERGED = 0.3, 2.0, 0.8


def adapters(options: Options) -> tuple[list[Figure], dict[str, Any]]:
    """Compare two adapters in one batch with two merged models.

    Half of the rows are of each task. Nothing is drafted, so that only the forward differs.
    """
    folders = tuple((task, ADAPTERS / task) for task in TASKS)
    both = Drafted(load(adapters=folders), [("a", "a")])
    merged = {task: Drafted(load(adapter=folder), [("a", "a")]) for task, folder in folders}
    requests = _requests(options.rows)
    mixed = [r for pair in zip(*requests.values(), strict=True) for r in pair]
    ratios, equal = [], 0
    for _ in range(options.repeats):
        together = both.run(mixed, draft=False)
        apart = {t: merged[t].run([_of_base(r) for r in requests[t]], draft=False) for t in TASKS}
        tokens = sum(len(r.tokens) for run in apart.values() for r in run.results)
        ratios.append(
            together.tokens_per_second / (tokens / sum(run.seconds for run in apart.values()))
        )
        own = {r.id: r.tokens for run in apart.values() for r in run.results}
        equal = sum(r.tokens == own[r.id] for r in together.results)
    return [
        Figure("adapters: rows equal to merged", equal, f"of {len(mixed)}", len(mixed)),
        Figure.of_runs(
            "adapters: two in a batch / one merged", ratios, "x", OVER_MERGED, upwards=True
        ),
    ], {"rows": len(mixed), "equal": equal, "ratios": ratios}


def _requests(rows: int) -> dict[str, list[Request]]:
    made = {}
    for task in TASKS:
        template = PromptTemplate(TEMPLATES[task])
        inputs = [r["input"] for r in read_split(task, "test")[: rows // 2]]
        ids = prompts([template.render(text) for text in inputs])
        made[task] = [Request(f"{task}-{i}", p, 64, adapter=task) for i, p in enumerate(ids)]
    return made


def _of_base(request: Request) -> Request:
    return Request(request.id, request.prompt, request.max_tokens)


def nf4(options: Options) -> tuple[list[Figure], dict[str, Any]]:
    """Compare memory, quality and drafts of the model in NF4 with those in bfloat16."""
    render = PromptTemplate(TEMPLATES[TASK]).render
    train, test = (read_split(TASK, split) for split in ("train", "test"))
    test = test[: options.rows]
    ids = prompts([render(r["input"]) for r in test])
    requests = [Request(str(i), p, 128) for i, p in enumerate(ids)]
    examples = [(render(r["input"]), r["output"]) for r in train]
    runs: dict[str, Run] = {}
    for name in ("nf4", None):
        adapter = ADAPTERS / TASK
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
    """Bytes of the linear layers between embedding and head, quantisation state included."""
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
    """The number of rows that differ, and the tokens up to their first differences."""
    changed = tokens = 0
    for a, b in zip(drafted.results, plain.results, strict=True):
        same = [x == y for x, y in zip(a.tokens, b.tokens, strict=False)]
        changed += a.tokens != b.tokens
        tokens += same.index(False) + 1 if False in same else len(same)
    return changed, tokens
