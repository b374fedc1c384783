"""Rates of labels' probabilities, compared with guided answers and with brute force.

A guided answer chooses a label token by token. Its choices have the same ends as the labels.
Otherwise it would take `email_querycontact` for `email_query`, which no end of sequence follows.

CLINC150 is answered by an adapter of the shipped model, which `tasc finetune` trains here once, in
ten minutes on one core.
"""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.common import (
    ROOT,
    Figure,
    digits,
    in_turn,
    median_of,
    read_rows,
    show_table,
    to_stderr,
)
from benchmarks.engine.smollm2 import model_of, train_file
from benchmarks.requests.brute_force import BruteForce, load_plain
from benchmarks.requests.engines import Options
from benchmarks.requests.guides import label_sets
from benchmarks.requests.labels import END, TASK, prompt_ids
from tasc_engine.step.plan import Plan
from tasc_jobs.demo.tasks import ADAPTERS, MODEL, TEMPLATES, data_file, demo_record, read_split
from tasc_runtime.llm import LLM, Classification, Completion

OVER_GUIDED, OVER_BRUTE_FORCE, POINTS = 0.7, 3.0, -0.2
BATCHES = (15, 30, 60)  # of brute force
EXACT_ROWS, SMOLLM2_ROWS = 64, 32  # at most; they are slow
CLINC, ADAPTER = "clinc150", ROOT / ".bench" / "labels"
TRAINING = {
    "--epochs": "3",
    "--learning-rate": "1e-3",
    "--batch-rows": "32",
    "--micro-rows": "32",
    "--dropout": "0.1",
    "--quantization": "none",
    "--threads": "1",
}


@dataclass(frozen=True)
class _Run:
    """One run over rows.

    Attributes:
        forwards: Forwards of a row, the mean.
        tokens: Tokens behind the prompt that are forwarded for a row, the mean.
        answers: The label of each row.
    """

    rows_per_second: float
    forwards: float
    tokens: float
    answers: tuple[str | None, ...]


_Calls = dict[str, Callable[[], _Run]]
_Runs = dict[str, list[_Run]]


def labels_speed(options: Options) -> tuple[list[Figure], dict[str, Any]]:
    """Compare the rate of probabilities with guided answers and with brute force."""
    record, massive = demo_record(TASK), label_sets(None)[0]
    gold = [label for _, label in massive.test[: options.rows]]
    texts = [row["input"] for row in read_split(TASK, "test")[: options.rows]]
    few, end = texts[:EXACT_ROWS], END
    llm = LLM(
        record.model, adapter=record.adapter, template=record.template,
        corpus=data_file(TASK, "train"),
    )  # fmt: skip
    plain = load_plain(MODEL, torch.float32, ADAPTERS / TASK)
    brute = BruteForce(plain, llm.tokenizer, massive.labels, END)
    ids = prompt_ids(llm.tokenizer, massive, len(few))
    batch = _fastest_batch(brute, ids[:8])
    exact = partial(llm.classify, few, massive.labels, end=END, exact=True, progress=False)
    runs = _in_turn(
        "the shipped model",
        {
            **_calls(llm, massive.labels, texts, end),
            "exact": partial(_timed, llm, exact),
            f"brute force, batches of {batch}": partial(_by_brute_force, brute, ids, batch),
        },
        gold,
        options.repeats,
    )
    default, tolerant, guided, every, forced = runs
    figures = [
        _ratio("labels-speed", runs, default, guided, OVER_GUIDED),
        _ratio("labels-speed", runs, tolerant, guided),
        _ratio("labels-speed", runs, every, forced, OVER_BRUTE_FORCE),
        _points("labels-speed", runs, gold),
    ]
    found = {"rows": len(texts), "shipped": _record(runs, gold)}
    if options.data and (options.data / CLINC / "test.jsonl.gz").is_file():
        own, found[CLINC] = _clinc(options, options.data)
        figures += own
    if options.data and model_of(TASK).is_dir():
        few = texts[:SMOLLM2_ROWS]
        tuned = LLM(model_of(TASK), corpus=train_file(TASK, options.data), chat_template="auto")
        runs = _in_turn("SmolLM2", _calls(tuned, massive.labels, few, end), gold, options.repeats)
        figures += [_ratio("labels-speed: SmolLM2", runs, default, guided)]
        found["smollm2"] = _record(runs, gold)
    return figures, found


def _clinc(options: Options, data: Path) -> tuple[list[Figure], dict[str, Any]]:
    """Compare the rate and the accuracy for CLINC150, whose labels end with a sequence."""
    folder, template = ADAPTER / CLINC, TEMPLATES[CLINC]
    if not (folder / "adapter").is_dir():
        to_stderr(f"  {CLINC}: training an adapter")
        given = {"--model": MODEL, "--train": train_file(CLINC, data), "--output": folder}
        with TemporaryDirectory(prefix="clinc-") as store:
            made: dict[str, Any] = {
                **TRAINING,
                **given,
                "--template": template,
                "--data-dir": store,
            }
            tasc = Path(sys.executable).with_name("tasc")
            words = [str(word) for option in made.items() for word in option]
            subprocess.run([tasc, "finetune", CLINC, *words], check=True)
    (task,) = (each for each in label_sets(data) if each.name == CLINC)
    rows = list(read_rows(data / CLINC / "test.jsonl.gz"))[: options.rows]
    texts, gold = [row["input"] for row in rows], [row["output"] for row in rows]
    llm = LLM(MODEL, adapter=folder / "adapter", template=template, corpus=train_file(CLINC, data))
    runs = _in_turn(CLINC, _calls(llm, task.labels, texts, None), gold, options.repeats)
    part = f"labels-speed: {CLINC}"
    return [
        _ratio(part, runs, "default", "guided"),
        _ratio(part, runs, "tolerance 0.01", "guided"),
        _points(part, runs, gold),
    ], _record(runs, gold)


def _points(part: str, runs: _Runs, gold: Sequence[str]) -> Figure:
    """Rows that only probabilities have right, minus those that only guided answers have."""
    right = [
        sum(a == b for a, b in zip(runs[side][-1].answers, gold, strict=True))
        for side in ("default", "guided")
    ]
    points = 100 * (right[0] - right[1]) / len(gold)
    return Figure(f"{part}: accuracy above guided answers", points, "points", POINTS)


def _calls(llm: LLM, names: Sequence[str], texts: Sequence[str], end: str | None) -> _Calls:
    """Probabilities and guided answers of the same rows, warmed up."""
    score = partial(llm.classify, labels=names, end=end, progress=False)
    choices = [name + (end or "") for name in names]
    calls: dict[str, Any] = {
        "default": score,
        "tolerance 0.01": partial(score, tolerance=0.01),
        "guided": partial(llm.generate, guided_choice=choices, max_tokens=64, progress=False),
    }
    for call in calls.values():
        call(texts[:8])
    return {name: partial(_timed, llm, partial(call, texts)) for name, call in calls.items()}


def _timed(llm: LLM, call: Callable[[], Sequence[Classification | Completion]]) -> _Run:
    llm.draft_from(llm.index)  # forgets the answers of earlier runs
    with _label_tokens() as counted:
        began = time.perf_counter()
        found = call()
        seconds = time.perf_counter() - began
    rows = len(found)
    answers = tuple(
        own.text.removesuffix(END) if isinstance(own, Completion) else own.label for own in found
    )
    return _Run(
        rows / seconds, sum(own.steps for own in found) / rows, sum(counted) / rows, answers
    )


def _by_brute_force(brute: BruteForce, ids: Sequence[Sequence[int]], batch: int) -> _Run:
    began = time.perf_counter()
    shares = [brute.cached(prompt, batch) for prompt in ids]
    seconds = time.perf_counter() - began
    answers = tuple(brute.labels[int(own.argmax())] for own in shares)
    forwards = 1 + -(-len(brute.labels) // batch)
    return _Run(len(ids) / seconds, forwards, brute.forwarded_tokens(batch), answers)


def _fastest_batch(brute: BruteForce, ids: Sequence[Sequence[int]]) -> int:
    """The number of labels in a batch with which brute force is fastest."""
    rates = {n: _by_brute_force(brute, ids, n).rows_per_second for n in BATCHES for _ in range(2)}
    return max(rates, key=rates.__getitem__)


@contextmanager
def _label_tokens() -> Iterator[list[int]]:
    """A list of the numbers of tokens behind prompts that each step forwards."""
    counted, batch = list[int](), Plan.batch
    patched: Any = Plan

    def counting(plan: Plan, drafts: Any, *rest: Any) -> Any:
        counted.append(len(plan.tokens) - plan.prompt_tokens + len(drafts.tokens))
        return batch(plan, drafts, *rest)

    patched.batch = counting
    try:
        yield counted
    finally:
        patched.batch = batch


def _in_turn(title: str, calls: _Calls, gold: Sequence[str], repeats: int) -> _Runs:
    """Run all sides in turn, and show their table."""
    to_stderr(f"  {title}: {', '.join(calls)}; {repeats} repeats")
    runs = in_turn(calls, repeats, partial(to_stderr, "    ."))
    rows = []
    for name, own in _record(runs, gold).items():
        rates = own["rows_per_second"]
        spread = map(digits, (median_of(rates), min(rates), max(rates)))
        work = digits(own["forwards"]), digits(own["label_tokens"])
        rows.append([name, *spread, *work, f"{own['right']} of {own['rows']}"])
    headings = ["", "rows/s", "least", "greatest", "forwards/row", "label tokens/row", "right"]
    show_table(title, headings, rows)
    return runs


def _record(runs: _Runs, gold: Sequence[str]) -> dict[str, dict[str, Any]]:
    return {
        name: {
            "rows_per_second": [run.rows_per_second for run in own],
            "forwards": own[-1].forwards,
            "label_tokens": own[-1].tokens,
            "rows": len(own[-1].answers),
            "right": sum(a == b for a, b in zip(own[-1].answers, gold, strict=False)),
        }
        for name, own in runs.items()
    }


def _ratio(part: str, runs: _Runs, side: str, other: str, bar: float | None = None) -> Figure:
    """The ratio of two sides' rates in each repeat."""
    pairs = zip(runs[side], runs[other], strict=True)
    ratios = [a.rows_per_second / b.rows_per_second for a, b in pairs]
    return Figure.of_runs(f"{part}: {side} / {other}", ratios, "x", bar)
