"""Runs the engine benchmark: all sides of each task in turn, then whether their answers are equal.

It prints tables as it goes and returns the object of the last line.
"""

from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from draft_tables import show_figures
from engine_args import Asked
from engine_ceiling import Ceiling, ceiling
from engine_equal import NEAR, TOLERANCE, Answers, Equality, compare
from engine_figures import Found, figures
from engine_loop import Job
from engine_peers import exact, start
from engine_report import report
from engine_shapes import step_times
from engine_sides import Side, in_turn
from engine_tables import show_equality, show_steps, show_task
from engine_work import Work, work_of
from rich.console import Console
from transformers import AutoModelForCausalLM

from tasc_jobs.progress import Progress, note


def measured(asked: Asked, out: Console) -> dict[str, Any]:
    """All tasks."""
    every, found = [], []
    with TemporaryDirectory(prefix="engine-bench-") as folder:
        for task in asked.tasks:
            note(f"{task}: writing weights, measuring the ceiling")
            work = work_of(task, asked, Path(folder))
            found.append(one_task(work, asked, Path(folder)))
            show_task(out, found[-1])
            show_equalities(out, found[-1])
            every += figures(found[-1])
    show_figures(out, every)
    return report(asked, found, every)


def one_task(work: Work, asked: Asked, folder: Path) -> Found:
    top = ceiling_of(work.folder, asked)
    with ExitStack() as stack:
        sides = start(work, asked.peers, folder, stack)
        settings = sum(len(side.settings) for side in sides)
        with Progress(work.task, settings * asked.repeats, "runs") as bar:
            runs = in_turn(sides, len(work.job.prompts), asked.repeats, bar.advance)
    by_setting = {m.setting: m.runs[0].answers for m in runs if m.side == "ours"}
    rounded = None
    if asked.dtype != "float32":
        answers = by_setting["drafted 8"], by_setting["plain 8"]
        judge = partial(margins, work.job, folder)
        rounded = compare(*answers, work.job.prompts, judge, TOLERANCE)
    return Found(work.task, tuple(runs), top, in_float32(work, folder), rounded)


def in_float32(work: Work, folder: Path) -> Equality:
    """Ours drafted at every step, eight together; transformers without drafts, one by one."""
    job, rows = exact(work.job), len(work.job.prompts)
    note(f"{work.task}: comparing answers in float32")
    with closing(Side("ours exact", job, (), folder)) as ours:
        drafted, _ = ours.run("always 8", rows)
    with closing(Side("transformers exact", job, (), folder)) as theirs:
        plain, _ = theirs.run("plain 1", rows)
    judge = partial(margins, job, folder)
    return compare(drafted.answers, plain.answers, job.prompts, judge, NEAR)


def margins(job: Job, folder: Path, prefixes: Answers) -> list[float]:
    """By transformers in the job's dtype."""
    with closing(Side("transformers judge", job, (), folder)) as judge:
        found: list[float] = judge.call(prefixes=prefixes)
    return found


def ceiling_of(folder: Path, asked: Asked) -> Ceiling:
    dtype = getattr(torch, asked.dtype)
    return ceiling(AutoModelForCausalLM.from_pretrained(folder, dtype=dtype), dtype, asked.threads)


def show_equalities(out: Console, found: Found) -> None:
    show_equality(out, "float32, ours drafted against transformers one by one", found.exact)
    if found.rounded is not None:
        show_equality(out, "this dtype, ours drafted against ours plain", found.rounded)


def stepped(asked: Asked, out: Console) -> dict[str, Any]:
    """Steps of random weights."""
    rows, top = step_times(asked)
    show_steps(out, f"{asked.shape}, {asked.dtype}, {asked.threads} threads", rows)
    times: dict[str, Any] = dict(rows)
    return report(asked, [], []) | {"step_ms": times, "ceiling_step_ms": 1000 * top.step_seconds}
