"""TASC-ft and drafting, alone and together, on six tasks (the paper's Table 6, and beyond it)."""

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
    better = clearly = 0
    for task in tasks:
        cells = _cells(*(found[FtRun(task, budget=budget)] for budget in BUDGETS))
        times = [ms for ms, _ in cells]
        better += times[3] < min(times[1:3])
        clearly += _slowest(found, task) < min(times[1:3])
        quality = [found[FtRun(task, budget=budget)]["quality"] for budget in BUDGETS]
        name = next(iter(quality[0]))
        told = [f"{ms:.2f} ({times[0] / ms:.2f} x), {steps:.2f}" for ms, steps in cells]
        table.add_row(task, *told, f"{name} {quality[0][name]:.3f}, {quality[1][name]:.3f}")
    console.print(table)
    bar = BETTER_ON if tasks == tuple(TASKS) else None
    figures = [
        Figure("tasks on which both are faster than either, by medians", better, "tasks", bar),
        Figure("tasks on which the slowest run of both is, too", clearly, "tasks"),
    ]
    return figures, {run.name: found[run] for run in runs}


def _slowest(found: Any, task: str) -> float:
    both = found[FtRun(task, budget=BUDGETS[1])]["sides"]["drafted"]
    return float(both["ms_per_answer"]["most"])


def _cells(without: Any, with_new: Any) -> list[tuple[float, float]]:
    sides = [each["sides"][side] for each in (without, with_new) for side in ("plain", "drafted")]
    return [(side["ms_per_answer"]["median"], side["steps_per_answer"]) for side in sides]
