"""The parts of the TASC-ft benchmark; each repeats tables or figures of the paper."""

import argparse
import random
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer

from benchmarks.common import Figure, show_table, to_stderr
from benchmarks.demo_model.train import train_base
from benchmarks.draft.tasks import open_tokenizer
from benchmarks.finetune.agreement import MeasuredRun, check
from benchmarks.finetune.runs import HALF_EPOCHS, PCS, FtRun, Workshop
from benchmarks.finetune.tasks import TASKS
from tasc_jobs.demo.tasks import MODEL
from tasc_jobs.statistics.distribution import distribution
from tasc_text import TaskTokenizer
from tasc_train.enrich.ngram_selection import Enriched, EnrichSettings, enrich, refined
from tasc_train.forecast import lengths_by_budget

Part = tuple[list[Figure], dict[str, Any]]
Found = dict[FtRun, dict[str, Any]]

BEFORE_AFTER = (0, 500)  # new tokens of `both` and `seeds`


@dataclass(frozen=True)
class Options:
    """The command line."""

    parts: tuple[str, ...]
    data: Path
    work: Path
    tokenizers: tuple[Path, ...]
    tasks: tuple[str, ...]
    test_rows: int
    repeats: int
    processes: int
    make_only: bool
    json: Path | None


def _workshop(options: Options) -> Workshop:
    return Workshop(options.data, options.work, options.test_rows, options.repeats)


def _fine_tuned(
    options: Options, runs: Sequence[FtRun], *, drafts: bool = False, longest_last: bool = False
) -> Found | None:
    """Make the runs and measure them; None with --make-only."""
    workshop = _workshop(options)
    workshop.make_all(runs[::-1] if longest_last else runs, options.processes)
    return None if options.make_only else workshop.measure_all(runs, drafts=drafts)


# Lengths: Tables 1 and 9

LENGTH_BUDGETS = (0, 60, 125, 250, 500, 1000)
SHORTER = {("eurlex_labels", "gpt2"): 1.85, ("massive_en", "gpt2"): 5.5}
_DRAWS = 200


def lengths(options: Options) -> Part:
    """How much shorter outputs become with new tokens, and how evenly tokens are used.

    The outputs alone determine both; no model runs. The range is that of 200 draws of test rows.
    """
    figures, found = list[Figure](), dict[str, Any]()
    for folder in options.tokenizers or (MODEL,):
        tokenizer, shorter, even = open_tokenizer(folder), [], []
        for task in options.tasks or TASKS:
            to_stderr(f"{folder.name} {task}")
            own = found[f"{folder.name} {task}"] = _lengths(options.data, task, tokenizer)
            curve, draws = own["reduction"], own["draws"]
            before, after = own["bytes_per_token"]
            shorter.append([
                task, *(f"{x:.2f}" for x in curve), f"{draws[0]:.2f}-{draws[1]:.2f}",
                f"{own['refined']:.2f}", f"{before:.2f} > {after:.2f}", f"{after / before:.2f}",
            ])  # fmt: skip
            sides = [f"{own[s][0]:.3f} > {own[s][1]:.3f}" for s in ("outputs", "inputs")]
            even.append([task, *sides])
            figures += _length_figures(f"{task}, {folder.name}", own)
        show_table(
            f"{folder.name}, n_max 4: test outputs shorter by, with so many new tokens",
            ["task", *map(str, LENGTH_BUDGETS), "200 draws", "refined", "bytes a token", "ratio"],
            shorter,
        )
        show_table(
            f"{folder.name}: entropy of tokens over its greatest, before and with 1,000 new ones",
            ["task", "outputs", "inputs"],
            even,
        )
    return figures, found


def _length_figures(name: str, own: dict[str, Any]) -> list[Figure]:
    task, _, tokenizer = name.partition(", ")
    bar, (before, after) = SHORTER.get((task, tokenizer)), own["outputs"]
    curve, draws = own["reduction"], own["draws"]
    return [
        Figure(f"{name}: test outputs shorter", curve[-1], "x", bar, True, *draws),
        Figure(f"{name}: refined over greedy", own["refined"] / curve[-1], "x", 1.0),
        Figure(f"{name}: normalised entropy rises by", after - before, "", 0.0),
    ]


def _lengths(data: Path, task: str, tokenizer: TaskTokenizer) -> dict[str, Any]:
    train, test = (TASKS[task].read(data, split) for split in ("train", "test"))
    outputs, judged = [r.output for r in train], [r.output for r in test]
    settings = EnrichSettings(LENGTH_BUDGETS[-1], 4, PCS)
    found = enrich(tokenizer, outputs, settings)
    better = refined(tokenizer, outputs, settings.refining)
    before, *after = lengths_by_budget(tokenizer, found, judged, LENGTH_BUDGETS)
    size = sum(len(text.encode()) for text in judged)
    bits = {
        name: _normalised(tokenizer, found, texts)
        for name, texts in (("outputs", outputs), ("inputs", [r.input for r in train]))
    }
    return {
        "new_tokens": len(found.tokens),
        "reduction": [before / length for length in after],
        "refined": before / int(_token_counts(better.tokenizer, judged).sum()),
        "draws": _draws(tokenizer, found, judged),
        "bytes_per_token": (size / before, size / after[-1]),
        **bits,
    }


def _draws(tokenizer: TaskTokenizer, found: Enriched, texts: Sequence[str]) -> tuple[float, float]:
    """The middle 95 % of the reduction over draws of rows with replacement."""
    counts = [_token_counts(backend, texts) for backend in (tokenizer.backend, found.tokenizer)]
    drawn = np.random.default_rng(0).integers(len(texts), size=(_DRAWS, len(texts)))
    ratios = counts[0][drawn].sum(1) / counts[1][drawn].sum(1)
    low, high = np.quantile(ratios, (0.025, 0.975))
    return float(low), float(high)


def _token_counts(backend: Tokenizer, texts: Sequence[str]) -> NDArray[np.int64]:
    encoded = backend.encode_batch_fast(list(texts), add_special_tokens=False)
    return np.array([len(each.ids) for each in encoded])


def _normalised(
    tokenizer: TaskTokenizer, found: Enriched, texts: Sequence[str]
) -> tuple[float, float]:
    """Entropy of tokens over that of a uniform distribution, before and with new tokens."""
    sides = ((tokenizer.backend, 0), (found.tokenizer, len(found.tokens)))
    figures = []
    for backend, new in sides:
        encoded = backend.encode_batch_fast(list(texts), add_special_tokens=False)
        counts = Counter(id_ for each in encoded for id_ in each.ids)
        figures.append(distribution(Counter(counts.values()), 1, tokenizer.vocab_size + new))
    return figures[0].normalised_entropy, figures[1].normalised_entropy


# Seeds: Figure 3

SEEDS = (0, 1, 2)
FASTER = {"massive_en": 2.0, "clinc150": 1.7}
# The model must learn to say in new tokens what the base knows, from as many rows as the base has
# seen. An adapter of rank 16 cannot learn as much.
SEED_ROWS, SEED_EPOCHS = (
    {"massive_en": 11_514, "clinc150": 15_000},
    {"massive_en": 4, "clinc150": 1},
)
SEED_RANK = 64


def seeds(options: Options) -> Part:
    """Times and quality with and without new tokens, with three seeds."""
    tasks = [task for task in FASTER if task in (options.tasks or FASTER)]
    runs = [
        FtRun(task, "demo", 4, budget, seed, SEED_ROWS[task], SEED_EPOCHS[task], SEED_RANK)
        for task in tasks for seed in SEEDS for budget in BEFORE_AFTER
    ]  # fmt: skip
    if (found := _fine_tuned(options, runs)) is None:
        return [], {}
    figures, rows = list[Figure](), []
    for task in tasks:
        measures = TASKS[task].measures
        sides = {
            b: [found[r] for r in runs if r.task == task and r.budget == b] for b in BEFORE_AFTER
        }
        for budget, each in sides.items():
            quality = (f"{name} {_spread([e['quality'][name] for e in each])}" for name in measures)
            rows.append([
                task, str(each[0]["budget"] if budget else 0),
                _spread([e["steps_per_answer"] for e in each]),
                _spread([e["ms_per_answer"] for e in each]),
                "\n".join(quality), f"{SEED_ROWS[task]:,} x {SEED_EPOCHS[task]}",
            ])  # fmt: skip
        before, after = sides.values()
        figures.append(_speed_up(task, before, after))
        figures += [_lost(task, name, before, after) for name in measures]
    show_table(
        f"{options.test_rows} test rows, b = 8: mean (least to greatest) of seeds 0, 1, 2",
        ["task", "new tokens", "steps", "ms an answer", "quality", "learnt"],
        rows,
    )
    return figures, {run.name: found[run] for run in runs}


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.fmean(values):.3g} ({min(values):.3g}-{max(values):.3g})"


def _speed_up(task: str, before: Any, after: Any) -> Figure:
    ratios = [a["ms_per_answer"] / b["ms_per_answer"] for a, b in zip(before, after, strict=True)]
    name = f"{task}: time without new tokens / with"
    return Figure(
        name, statistics.median(ratios), "x", FASTER[task], True, min(ratios), max(ratios)
    )


def _lost(task: str, name: str, before: Any, after: Any) -> Figure:
    """The difference of the means of a measure; the extremes are those of one seed."""
    judged = [[100 * e["quality"][name] for e in side] for side in (before, after)]
    lost = statistics.fmean(judged[0]) - statistics.fmean(judged[1])
    own = [b - a for b, a in zip(*judged, strict=True)]
    bar = max(judged[0]) - min(judged[0])
    title = f"{task}: {name} lost; the bar is the seeds' spread without new tokens"
    return Figure(title, lost, "points", bar, False, min(own), max(own))


# Epochs: Table 7

EPOCHS_TASK = "clinc150"
EPOCHS = (1, 3, 5, 10)


def epochs(options: Options) -> Part:
    """The effect of more epochs on one task with new tokens."""
    runs = [FtRun(EPOCHS_TASK, epochs=epochs) for epochs in EPOCHS]
    if (found := _fine_tuned(options, runs, longest_last=True)) is None:
        return [], {}
    names = list(next(iter(found.values()))["quality"])
    show_table(
        f"{EPOCHS_TASK}, new tokens, by epochs of {runs[0].of.rows:,} rows; seed 0 alone",
        ["epochs", *names, "steps", "ms an answer"],
        [
            [
                f"{run.epochs:g}", *(f"{each['quality'][name]:.3f}" for name in names),
                f"{each['steps_per_answer']:.2f}", f"{each['ms_per_answer']:.2f}",
            ]
            for run, each in found.items()
        ],
    )  # fmt: skip
    return [], {run.name: found[run] for run in runs}


# Both: Table 6, and together

BETTER_ON = 4  # tasks of six


def both(options: Options) -> Part:
    """TASC-ft and drafting, alone and together, on six tasks.

    The speed of each task's plainly fine-tuned model without drafts is 1. Runs of one model with
    and without drafts alternate. The two models of a task are measured one after the other, so that
    changes of the machine are part of their difference. A strict figure supplements that of the
    medians: every run of both is faster than every run of either.
    """
    tasks = options.tasks or tuple(TASKS)
    runs = [FtRun(task, budget=budget) for task in tasks for budget in BEFORE_AFTER]
    if (found := _fine_tuned(options, runs, drafts=True)) is None:
        return [], {}
    by_medians, by_all_runs, rows = 0, 0, []
    for task in tasks:
        models = [found[FtRun(task, budget=budget)] for budget in BEFORE_AFTER]
        sides = [model["sides"][side] for model in models for side in ("plain", "drafted")]
        _, drafting, tokens, together = (side["ms_per_answer"] for side in sides)
        by_medians += together["median"] < min(drafting["median"], tokens["median"])
        by_all_runs += together["max"] < min(drafting["min"], tokens["min"])
        name = TASKS[task].measures[0]
        quality = ", ".join(f"{model['quality'][name]:.3f}" for model in models)
        rows.append([task, *(_times(side, sides[0]) for side in sides), f"{name} {quality}"])
    show_table(
        f"{options.test_rows} test rows, b = 8: milliseconds an answer (speed-up), steps an answer",
        ["task", "neither", "drafting (TASC-spec)", "TASC-ft", "both", "quality: neither, TASC-ft"],
        rows,
    )
    bar = BETTER_ON if tasks == tuple(TASKS) else None
    figures = [
        Figure("tasks on which both are faster than either, by medians", by_medians, "tasks", bar),
        Figure("the same, slowest run of both, fastest of either", by_all_runs, "tasks"),
    ]
    return figures, {run.name: found[run] for run in runs}


def _times(side: Any, neither: Any) -> str:
    ms, before = (each["ms_per_answer"]["median"] for each in (side, neither))
    return f"{ms:.2f} ({before / ms:.2f} x), {side['steps_per_answer']:.2f}"


# Forecast: appendix E

FORECAST_TASKS = ("pos_ewt", "clinc150")
BASES = ("demo", "half")
N_MAX = {"pos_ewt": (2, 6), "clinc150": (2, 3)}
FORECAST_BUDGETS = (0, 60, 125, 250, 500)
TAU, RIGHT = -0.9, 0.9
FORECAST_ROWS = {"pos_ewt": 3000, "clinc150": 1500}  # with fewer, answers in new tokens do not end


def forecast(options: Options) -> Part:
    """Whether entropy forecasts times: two tasks, two sizes, two n_max.

    A point is a fine-tune that differs from all others. Where the outputs have fewer new tokens
    than two budgets, these are one point. With n_max 2 and 3 clinc150 has more than 250 new tokens,
    with 4 and 6 it has not. Without new tokens n_max has no effect, so each n_max has its own seed.
    """
    _make_half(_workshop(options))
    runs = [
        FtRun(task, base, n_max, budget, seed, FORECAST_ROWS[task])
        for task in FORECAST_TASKS for base in BASES for seed, n_max in enumerate(N_MAX[task])
        for budget in FORECAST_BUDGETS
    ]  # fmt: skip
    if (found := _fine_tuned(options, runs)) is None:
        return [], {}
    settings = {run: f"{run.task}, {run.base}, n_max {run.n_max}" for run in runs}
    lines = [MeasuredRun.of(found[run] | {"setting": settings[run]}) for run in runs]
    judged = check(lines)
    rows = []
    for each in judged.settings:
        own = [line for line in lines if line.setting == each.setting]
        cells = [f"{line.renyi2_bits:.2f} > {line.ms_per_answer:.2f}" for line in own]
        taus = [f"{tau:.2f}" if tau is not None else "" for tau in (each.tau, each.tau_steps)]
        rows.append([each.setting, *cells, *taus, f"{each.right} of {each.rises}"])
    show_table(
        f"{judged.runs} distinct fine-tunes, by budget: H2 in bits > ms an answer",
        ["setting", *map(str, FORECAST_BUDGETS), "tau", "tau of steps", "right"],
        rows,
    )
    times, steps = ([getattr(e, tau) for e in judged.settings] for tau in ("tau", "tau_steps"))
    figures = [
        _mean_tau("mean Kendall's tau of settings, entropy and time", times, TAU),
        _mean_tau("the same, entropy and steps", steps, None),
        Figure("time falls where entropy rises", judged.right_share or 0.0, "", RIGHT),
    ]
    return figures, {"check": judged.as_json, "runs": {run.name: found[run] for run in runs}}


def _mean_tau(name: str, taus: Sequence[float | None], bar: float | None) -> Figure:
    """The mean of the settings, with the least and the greatest of them."""
    known = [tau for tau in taus if tau is not None] or [0.0]
    return Figure(name, statistics.fmean(known), "", bar, False, min(known), max(known))


def _make_half(workshop: Workshop) -> None:
    """Train the base of half the size of the shipped one from scratch, if it is not there."""
    if (workshop.base("half") / "config.json").is_file():
        return
    torch.manual_seed(0)
    options = argparse.Namespace(
        data=workshop.data, size="half", vocab_size=8192, base_epochs=HALF_EPOCHS,
        batch_tokens=3072, device="cpu",
    )  # fmt: skip
    train_base(options, workshop.bases, random.Random(0))
