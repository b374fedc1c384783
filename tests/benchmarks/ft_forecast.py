"""Whether entropy forecasts times (the paper's appendix E): two tasks, two sizes, two n_max.

A point is a fine-tune that differs from all others: where the outputs have fewer tokens to give
than two budgets ask for, those are one. n_max 2 and 3 give clinc150 more than 250, 4 and 6 do not.
"""

import argparse
import random
import statistics
from collections.abc import Sequence
from typing import Any

import torch
from bench_ft import Asked
from draft_bars import Figure
from draft_tables import table_of
from ft_crew import make_all, measure_all
from ft_runs import HALF_EPOCHS, FtRun, Workshop
from rich.console import Console

from tasc_jobs.demo.train import train_base
from tasc_jobs.forecast_ft.check import MeasuredRun, check

TASKS = ("pos_ewt", "clinc150")
BASES = ("demo", "half")
N_MAX = {"pos_ewt": (2, 6), "clinc150": (2, 3)}
BUDGETS = (0, 60, 125, 250, 500)
TAU, RIGHT = -0.9, 0.9
ROWS = {"pos_ewt": 3000, "clinc150": 1500}  # with fewer, answers in new tokens do not end


def measure(asked: Asked, console: Console) -> tuple[list[Figure], dict[str, Any]]:
    """Without new tokens n_max says nothing, so each n_max has a seed of its own."""
    workshop = Workshop(asked.data, asked.work, asked.test_rows, asked.repeats)
    _make_half(workshop)
    runs = [
        FtRun(task, base, n_max, budget, seed, ROWS[task])
        for task in TASKS for base in BASES for seed, n_max in enumerate(N_MAX[task])
        for budget in BUDGETS
    ]  # fmt: skip
    make_all(workshop, runs, asked.processes)
    if asked.make_only:
        return [], {}
    found = measure_all(workshop, runs, drafts=False)
    settings = {run: f"{run.task}, {run.base}, n_max {run.n_max}" for run in runs}
    lines = [MeasuredRun(**(found[run] | {"setting": settings[run]})) for run in runs]
    judged = check(lines)
    table = table_of(
        f"{judged.runs} distinct fine-tunes, by budget: H2 in bits > ms an answer",
        ["setting", *map(str, BUDGETS), "tau", "tau of steps", "right"],
    )
    for each in judged.settings:
        own = [line for line in lines if line.setting == each.setting]
        cells = [f"{line.renyi2_bits:.2f} > {line.ms_per_answer:.2f}" for line in own]
        taus = [f"{tau:.2f}" if tau is not None else "" for tau in (each.tau, each.tau_steps)]
        table.add_row(each.setting, *cells, *taus, f"{each.right} of {each.rises}")
    console.print(table)
    figures = [
        _mean_tau("mean Kendall's tau of settings, entropy and time",
                  [each.tau for each in judged.settings], TAU),
        _mean_tau("the same, entropy and steps",
                  [each.tau_steps for each in judged.settings], None),
        Figure("time falls where entropy rises", judged.right_share or 0.0, "", RIGHT),
    ]  # fmt: skip
    return figures, {"check": judged.as_json, "runs": {run.name: found[run] for run in runs}}


def _mean_tau(name: str, taus: Sequence[float | None], bar: float | None) -> Figure:
    """With the least and the greatest of the settings."""
    known = [tau for tau in taus if tau is not None] or [0.0]
    mean = statistics.fmean(known)
    return Figure(name, mean, "", bar, False, least=min(known), greatest=max(known))


def _make_half(workshop: Workshop) -> None:
    """The base of half the shipped one's size, from scratch."""
    if (workshop.base("half") / "config.json").is_file():
        return
    torch.manual_seed(0)
    asked = argparse.Namespace(
        data=workshop.data, size="half", vocab_size=8192, base_epochs=HALF_EPOCHS,
        batch_tokens=3072, device="cpu",
    )  # fmt: skip
    train_base(asked, workshop.bases, random.Random(0))
