"""TASC-ft and drafting, alone and together, on six tasks (the paper's Table 6, and beyond it).

Of one model, runs with drafts and without take turns. The two models of a task are measured one
after the other: what the machine does meanwhile is in their difference. So there is a strict figure
beside that of the medians: every run of both is faster than every run of either.
"""

from collections.abc import Sequence
from typing import Any

from bench_ft import Asked
from draft_bars import Figure
from draft_tables import table_of
from ft_crew import make_all, measure_all
from ft_runs import FtRun, Workshop
from ft_tasks import TASKS
from rich.console import Console

BUDGETS = (0, 500)
BETTER_ON = 4  # tasks of six


def measure(asked: Asked, console: Console) -> tuple[list[Figure], dict[str, Any]]:
    """Each task's plainly fine-tuned model, without drafts, is 1."""
    workshop = Workshop(asked.data, asked.work, asked.test_rows, asked.repeats)
    tasks = asked.tasks or tuple(TASKS)
    runs = [FtRun(task, budget=budget) for task in tasks for budget in BUDGETS]
    make_all(workshop, runs, asked.processes)
    if asked.make_only:
        return [], {}
    found = measure_all(workshop, runs, drafts=True)
    table = table_of(
        f"{asked.test_rows} test rows, b = 8: milliseconds an answer (speed-up), steps an answer",
        ["task", "neither", "drafting (TASC-spec)", "TASC-ft", "both", "quality: neither, TASC-ft"],
    )
    by_medians = by_all_runs = 0
    for task in tasks:
        models = [found[FtRun(task, budget=budget)] for budget in BUDGETS]
        sides = [model["sides"][side] for model in models for side in ("plain", "drafted")]
        _, drafting, tokens, both = (side["ms_per_answer"] for side in sides)
        by_medians += both["median"] < min(drafting["median"], tokens["median"])
        by_all_runs += both["most"] < min(drafting["least"], tokens["least"])
        table.add_row(task, *map(_told, sides, [sides[0]] * len(sides)), _quality(task, models))
    console.print(table)
    bar = BETTER_ON if tasks == tuple(TASKS) else None
    figures = [
        Figure("tasks on which both are faster than either, by medians", by_medians, "tasks", bar),
        Figure("the same, slowest run of both, fastest of either", by_all_runs, "tasks"),
    ]
    return figures, {run.name: found[run] for run in runs}


def _told(side: Any, neither: Any) -> str:
    ms, before = (each["ms_per_answer"]["median"] for each in (side, neither))
    return f"{ms:.2f} ({before / ms:.2f} x), {side['steps_per_answer']:.2f}"


def _quality(task: str, models: Sequence[Any]) -> str:
    name = TASKS[task].measures[0]
    return f"{name} " + ", ".join(f"{model['quality'][name]:.3f}" for model in models)
