"""Probabilities of labels, compared with brute force by transformers.

Tiny random models are compared in float64, the shipped model and SmolLM2 in float32. By default,
labels may be left out, and each probability is within the bound that its answer tells.
"""

import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import Figure, median_of, read_rows, to_stderr
from benchmarks.engine.smollm2 import labelled, model_of
from benchmarks.requests.brute_force import BruteForce, Float64, load_plain
from benchmarks.requests.engines import Options
from benchmarks.requests.guides import Labelled, label_sets
from tasc_jobs.demo.tasks import ADAPTERS, MODEL
from tasc_runtime.llm import LLM, Classification
from tasc_text import TaskTokenizer

TASK = "massive_en"
ARCHITECTURES = ("qwen2", "llama", "mistral")  # the last one attends to a window
END = ","  # it follows the label in answers of MASSIVE
MANY = 1000  # labels; fewer rows have so many, because brute force takes seconds for each
PROMPT_TOKENS, ALL_STEPS, ZERO_SHOT_ROWS = 96, 1000, 4
EXACT_64, EXACT_32, GAP = 1e-9, 1e-4, 2e-4
UNIT_64, UNIT_32 = 1e-12, 1e-6  # of the differences
SYSTEM = "Name the intent of the user's message in one or a few words."


def labels(options: Options) -> tuple[list[Figure], dict[str, Any]]:
    """Compare probabilities and bounds with brute force."""
    sets = label_sets(options.data)
    figures, found = list[Figure](), dict[str, Any]()
    parts = [partial(_tiny, task) for task in sets]
    parts += [partial(_shipped, task) for task in sets if len(task.labels) < MANY]
    if options.data and model_of("clinc150").is_dir():
        parts += [partial(_zero_shot, sets)]
    for part in parts:
        own, record = part(options)
        figures += own
        found |= record
    return figures, found


def _tiny(task: Labelled, options: Options) -> tuple[list[Figure], dict[str, Any]]:
    """Compare tiny random models in float64: exact values, and bounds with and without a limit."""
    from tiny import make_folder

    rows = max(options.rows // 64, 1) if len(task.labels) > MANY else options.rows
    end = _end(task)
    worst, worst_log, unlike, told = 0.0, 0.0, 0, list[float]()
    for architecture in ARCHITECTURES:
        to_stderr(f"  {task.name}: tiny {architecture}, {rows} rows")
        with tempfile.TemporaryDirectory(prefix="labels-") as name:
            folder = make_folder(Path(name) / architecture, architecture)
            llm = LLM(folder, dtype="float64", max_model_len=512, cost_aware=False)
            plain = load_plain(folder, torch.float64)
        ids = prompt_ids(llm.tokenizer, task, rows)
        brute = BruteForce(plain, llm.tokenizer, task.labels, end)
        truth = [brute.alone(prompt) for prompt in ids]
        ask = partial(llm.classify, ids, task.labels, end=end, progress=False)
        for own, true in zip(ask(exact=True), truth, strict=True):
            values = _values(own, task.labels)
            worst = max(worst, float(np.abs(values - true).max()))
            worst_log = max(worst_log, float(np.abs(np.log(values) - np.log(true)).max()))
        for found in (ask(), ask(max_steps=ALL_STEPS)):
            told += [own.unseen_mass for own in found]
            for own, true in zip(found, truth, strict=True):
                off = np.abs(_values(own, task.labels) - true)
                unlike += int((off > own.unseen_mass + EXACT_64).sum())
    name, bar = f"labels: {task.name}, tiny", EXACT_64 / UNIT_64
    return [
        Figure(
            f"{name}: exact, greatest difference", worst / UNIT_64, "x 1e-12", bar, upwards=False
        ),
        Figure(f"{name}: exact, of logarithms", worst_log / UNIT_64, "x 1e-12"),
        Figure(f"{name}: probabilities outside their bound", unlike, "", 0, upwards=False),
    ], {
        f"{task.name} tiny": {
            "labels": len(task.labels),
            "rows": rows * len(ARCHITECTURES),
            "bound_median": median_of(told),
            "bound_greatest": max(told),
        }
    }


def _shipped(task: Labelled, options: Options) -> tuple[list[Figure], dict[str, Any]]:
    """Compare the shipped model in float32."""
    rows, end = max(options.rows // 8, 1), _end(task)
    to_stderr(f"  {task.name}: the shipped model, {rows} rows")
    adapter = ADAPTERS / task.adapter if task.adapter else None
    llm = LLM(MODEL, adapter=adapter, cost_aware=False)
    brute = BruteForce(load_plain(MODEL, torch.float32, adapter), llm.tokenizer, task.labels, end)
    ids = prompt_ids(llm.tokenizer, task, rows)
    exact = llm.classify(ids, task.labels, end=end, exact=True, progress=False)
    differences = [
        float(np.abs(_values(own, task.labels) - brute.cached(prompt)).max())
        for own, prompt in zip(exact, ids, strict=True)
    ]
    return [_figure_32(f"labels: {task.name}, shipped", differences)], {
        f"{task.name} shipped": {"rows": len(ids)}
    }


def _zero_shot(sets: Sequence[Labelled], options: Options) -> tuple[list[Figure], dict[str, Any]]:
    """Compare SmolLM2 in float32, which is asked by its chat template."""
    from transformers import AutoTokenizer

    folder, figures = model_of("clinc150"), list[Figure]()
    llm = LLM(folder, chat_template="auto", system_prompt=SYSTEM, cost_aware=False)
    chat: Any = AutoTokenizer.from_pretrained(folder)
    plain = load_plain(folder, torch.float32)
    rows = min(ZERO_SHOT_ROWS, options.rows)
    for name, texts, names in _asked(sets, options):
        to_stderr(f"  {name}: SmolLM2, {rows} rows")
        exact = llm.classify(texts[:rows], names, exact=True, progress=False)
        brute, differences, unlike = BruteForce(plain, llm.tokenizer, names, None), [], 0
        for own, text in zip(exact, texts, strict=False):
            talk = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]
            told = chat.apply_chat_template(talk, add_generation_prompt=True, return_dict=True)
            values, true = _values(own, names), brute.cached(told["input_ids"])
            differences.append(float(np.abs(values - true).max()))
            gaps = true[:, None] - true[None]
            unlike += int(((gaps > GAP) & (values[:, None] <= values[None])).sum())
        figures += [
            _figure_32(f"labels: {name}, SmolLM2 zero-shot", differences),
            Figure(f"labels: {name}, SmolLM2: pairs out of order", unlike, "", 0, upwards=False),
        ]
    return figures, {"zero-shot": {"rows": rows}}


def _asked(
    sets: Sequence[Labelled], options: Options
) -> Iterator[tuple[str, list[str], tuple[str, ...]]]:
    """Bare inputs and labels, for a model that was not fine-tuned for them."""
    assert options.data
    for task in sets:
        file = options.data / task.name / "test.jsonl.gz"
        if len(task.labels) < MANY and file.is_file():
            texts = [row["input"] for row in read_rows(file)]
            yield task.name, texts, tuple(map(labelled, task.labels))


def _end(task: Labelled) -> str | None:
    return END if task.name == TASK else None


def prompt_ids(known: TaskTokenizer, task: Labelled, rows: int) -> list[list[int]]:
    return [known.encode_prompt(prompt)[-PROMPT_TOKENS:] for prompt, _ in task.test[:rows]]


def _values(found: Classification, names: Sequence[str]) -> Float64:
    """The probability of each label; 0 for labels that were not scored."""
    assert found.error is None, found.error
    return np.array([found.probabilities.get(name, 0.0) for name in names])


def _figure_32(name: str, differences: Sequence[float]) -> Figure:
    """The greatest difference of all rows."""
    greatest, bar = max(differences) / UNIT_32, EXACT_32 / UNIT_32
    return Figure(f"{name}: exact, greatest difference", greatest, "x 1e-6", bar, upwards=False)
