"""Times and quality with new tokens and without, by three seeds (the paper's Figure 3)."""

import statistics
from collections.abc import Sequence
from typing import Any

from bench_ft import Asked
from draft_bars import Figure
from draft_tables import table_of
from ft_crew import make_all, measure_all
from ft_runs import FtRun, Workshop
from ft_tasks import TASKS
from rich.console import Console

SEEDS = (0, 1, 2)
FASTER = {"massive_en": 2.0, "clinc150": 1.7}
BUDGETS = (0, 500)
# Enough to say in new tokens what the base knows, of as many rows as it has seen: so much is not
# learnt by an adapter of rank 16.
ROWS, EPOCHS = {"massive_en": 11_514, "clinc150": 15_000}, {"massive_en": 4, "clinc150": 1}
RANK = 64


def measure(asked: Asked, console: Console) -> tuple[list[Figure], dict[str, Any]]:
    workshop = Workshop(asked.data, asked.work, asked.test_rows, asked.repeats)
    tasks = [task for task in FASTER if task in (asked.tasks or FASTER)]
    runs = [
        FtRun(task, "demo", 4, budget, seed, ROWS[task], EPOCHS[task], RANK)
        for task in tasks for seed in SEEDS for budget in BUDGETS
    ]  # fmt: skip
    make_all(workshop, runs, asked.processes)
    if asked.make_only:
        return [], {}
    found = measure_all(workshop, runs, drafts=False)
    title = f"{asked.test_rows} test rows, b = 8: mean (least to greatest) of seeds 0, 1, 2"
    table = table_of(title, ["task", "new tokens", "steps", "ms an answer", "quality", "learnt"])
    figures = list[Figure]()
    for task in tasks:
        sides = {b: [found[r] for r in runs if r.task == task and r.budget == b] for b in BUDGETS}
        for budget, each in sides.items():
            table.add_row(
                task, str(each[0]["budget"] if budget else 0),
                spread([e["steps_per_answer"] for e in each]),
                spread([e["ms_per_answer"] for e in each]),
                "\n".join(
                    f"{name} {spread([e['quality'][name] for e in each])}"
                    for name in TASKS[task].measures
                ),
                f"{ROWS[task]:,} x {EPOCHS[task]}",
            )  # fmt: skip
        figures += _figures(task, FASTER[task], sides[0], sides[500])
    console.print(table)
    return figures, {run.name: found[run] for run in runs}


def spread(values: Sequence[float]) -> str:
    return f"{statistics.fmean(values):.3g} ({min(values):.3g}-{max(values):.3g})"


def _figures(task: str, bar: float, before: Any, after: Any) -> list[Figure]:
    ratios = [a["ms_per_answer"] / b["ms_per_answer"] for a, b in zip(before, after, strict=True)]
    return [
        Figure(f"{task}: time without new tokens / with", statistics.median(ratios), "x", bar,
               least=min(ratios), greatest=max(ratios)),
        *(_lost(task, name, before, after) for name in TASKS[task].measures),
    ]  # fmt: skip


def _lost(task: str, name: str, before: Any, after: Any) -> Figure:
    """Of a measure: the means' difference; the least and the greatest are a seed's own."""
    judged = [[100 * e["quality"][name] for e in side] for side in (before, after)]
    lost = statistics.fmean(judged[0]) - statistics.fmean(judged[1])
    own = [b - a for b, a in zip(*judged, strict=True)]
    return Figure(f"{task}: {name} lost; the bar is the seeds' spread without new tokens", lost,
                  "points", max(judged[0]) - min(judged[0]), upwards=False, least=min(own),
                  greatest=max(own))  # fmt: skip
