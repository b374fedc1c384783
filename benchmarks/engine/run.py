"""Run the engine benchmark: all sides of each task in turn, then compare their answers.

All sides read their weights from one folder. It has the adapter merged in float32, so that every
side rounds the same numbers.
"""

import shutil
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.common import digits, show_figures, show_table
from benchmarks.engine.equal import NEAR, TOLERANCE, Answers, Equality, compare
from benchmarks.engine.loop import Job
from benchmarks.engine.report import Found, Options, figures, record, show_task
from benchmarks.engine.sides import Side, in_turn, start
from benchmarks.engine.steps import ceiling, step_times
from tasc_engine.model.loading import load_model
from tasc_jobs.demo.tasks import MODEL, TEMPLATES, demo_record, read_split
from tasc_runtime.engine.builder import model_source
from tasc_runtime.progress import note, show_progress
from tasc_text import PromptTemplate, TaskTokenizer


def measured(options: Options) -> dict[str, Any]:
    """Measure all tasks; tables are printed on the way."""
    every, found = [], []
    with TemporaryDirectory(prefix="engine-bench-") as folder:
        for task in options.tasks:
            note(f"{task}: writing weights, measuring the ceiling")
            found.append(one_task(job_of(task, options, Path(folder)), options, Path(folder)))
            show_task(found[-1])
            every += figures(found[-1])
    show_figures(every)
    return record(options, (options.model or MODEL).name, found, every)


def stepped(options: Options) -> dict[str, Any]:
    """Time steps of random weights."""
    assert options.shape is not None, "the command line names it"
    dtype, int8 = getattr(torch, options.dtype), options.quantization is not None
    times, top = step_times(options.shape, dtype, options.threads, int8)
    title = f"{options.shape}, {options.quantization or options.dtype}, {options.threads} threads"
    show_table(title, ["step", "ms"], [[name, digits(ms)] for name, ms in times.items()])
    own = {"step_ms": times, "ceiling_step_ms": 1000 * top.step_seconds}
    return record(options, options.shape, [], []) | own


def one_task(job: Job, options: Options, folder: Path) -> Found:
    dtype = getattr(torch, options.dtype)
    model = AutoModelForCausalLM.from_pretrained(job.folder, dtype=dtype)
    top = ceiling(model, dtype, options.threads)
    del model
    with ExitStack() as stack:
        sides = start(job, options.peers, folder, stack)
        settings = sum(len(side.settings) for side in sides)
        with show_progress(job.task, settings * options.repeats, "runs") as bar:
            runs = in_turn(sides, len(job.prompts), options.repeats, bar.advance)
    by_setting = {m.setting: m.runs[0].answers for m in runs if m.side == "ours"}
    rounded = None
    if options.dtype != "float32" or options.quantization:
        answers = by_setting["drafted 8"], by_setting["plain 8"]
        judge = never_near if options.quantization else partial(margins, job, folder)
        rounded = compare(*answers, job.prompts, judge, TOLERANCE)
    return Found(job.task, tuple(runs), top, in_float32(job, folder), rounded)


def in_float32(job: Job, folder: Path) -> Equality:
    """Ours, drafted at every step, eight rows together, against transformers row by row."""
    job, rows = replace(job, dtype="float32", quantization=""), len(job.prompts)
    note(f"{job.task}: comparing answers in float32")
    with closing(Side("ours exact", job, (), folder)) as ours:
        drafted, _ = ours.run("always 8", range(rows))
    with closing(Side("transformers exact", job, (), folder)) as theirs:
        plain, _ = theirs.run("plain 1", range(rows))
    judge = partial(margins, job, folder)
    return compare(drafted.answers, plain.answers, job.prompts, judge, NEAR)


def never_near(prefixes: Answers) -> list[float]:
    """Margins where answers have to be equal."""
    return [inf] * len(prefixes)


def margins(job: Job, folder: Path, prefixes: Answers) -> list[float]:
    """The margins of transformers in the job's dtype."""
    with closing(Side("transformers judge", job, (), folder)) as judge:
        found: list[float] = judge.call(prefixes=prefixes)
    return found


def job_of(task: str, options: Options, folder: Path) -> Job:
    """The rows of a task; a merged model is written below ``folder``."""
    model = options.model or export(task, folder / task)
    tokenizer = TaskTokenizer.from_folder(model)
    template = PromptTemplate(TEMPLATES[task])
    rows = read_split(task, "test")[: options.rows]
    return Job(
        folder=str(model),
        task=task,
        prompts=[tokenizer.encode_prompt(template.render(r["input"])) for r in rows],
        max_tokens=options.max_tokens if options.model else demo_record(task).max_tokens,
        eos=list(tokenizer.eos_ids),
        threads=options.threads,
        dtype=options.dtype,
        quantization=options.quantization or "",
    )


def export(task: str, folder: Path) -> Path:
    """Write the shipped model with a task's adapter merged, in the form that any project reads."""
    load_model(model_source(demo_record(task), "cpu")).save_pretrained(folder)
    for file in MODEL.glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder
