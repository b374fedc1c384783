"""Two adapters in one batch, each row held against its own merged model."""

from typing import Any

from bench_requests import Asked
from draft_bars import Figure, timed
from requests_engine import Drafted, load, prompts

from tasc_engine import GenerationRequest
from tasc_jobs.demo.tasks import HERE, TASKS, TEMPLATES, read_split
from tasc_text import PromptTemplate

OVER_MERGED = 0.8


def measure(asked: Asked) -> tuple[list[Figure], dict[str, Any]]:
    """Half of the rows of each task; undrafted, so that only the forward differs."""
    folders = tuple((task, HERE / "adapters" / task) for task in TASKS)
    both = Drafted(load(adapters=folders), [("a", "a")])
    merged = {task: Drafted(load(adapter=folder), [("a", "a")]) for task, folder in folders}
    requests = _requests(asked.rows)
    mixed = [r for pair in zip(*requests.values(), strict=True) for r in pair]
    ratios, equal = [], 0
    for _ in range(asked.repeats):
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
        timed("adapters: two in a batch / one merged", ratios, "x", OVER_MERGED, upwards=True),
    ], {"rows": len(mixed), "equal": equal, "ratios": ratios}


def _requests(rows: int) -> dict[str, list[GenerationRequest]]:
    made = {}
    for task in TASKS:
        template = PromptTemplate(TEMPLATES[task])
        inputs = [r["input"] for r in read_split(task, "test")[: rows // 2]]
        ids = prompts([template.render(text) for text in inputs])
        made[task] = [
            GenerationRequest(f"{task}-{i}", p, 64, adapter=task) for i, p in enumerate(ids)
        ]
    return made


def _of_base(request: GenerationRequest) -> GenerationRequest:
    return GenerationRequest(request.id, request.prompt, request.max_tokens)
