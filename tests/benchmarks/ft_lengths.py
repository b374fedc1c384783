"""How much shorter outputs get with new tokens, and how evenly tokens are used (Tables 1 and 9).

Outputs alone decide it: no model is needed. The spread is of 200 draws of test rows.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from bench_command import to_stderr
from bench_ft import Asked
from draft_bars import Figure
from draft_tables import table_of
from draft_tasks import open_tokenizer
from ft_runs import PCS
from ft_tasks import TASKS
from numpy.typing import NDArray
from rich.console import Console
from tokenizers import Tokenizer

from tasc_jobs.demo.tasks import MODEL
from tasc_jobs.enrich.algorithm import Enriched, EnrichSettings, enrich
from tasc_jobs.enrich.refine import refined
from tasc_jobs.forecast_ft.forecast import lengths_by_budget
from tasc_jobs.statistics.distribution import distribution
from tasc_text import TaskTokenizer

BUDGETS = (0, 60, 125, 250, 500, 1000)
BARS = {("eurlex_labels", "gpt2"): 1.85, ("massive_en", "gpt2"): 5.5}
_DRAWS = 200


def measure(asked: Asked, console: Console) -> tuple[list[Figure], dict[str, Any]]:
    figures, found = list[Figure](), dict[str, Any]()
    for folder in asked.tokenizers or (MODEL,):
        tokenizer = open_tokenizer(folder)
        shorter = table_of(
            f"{folder.name}, n_max 4: test outputs shorter by, with so many new tokens",
            ["task", *map(str, BUDGETS), "200 draws", "refined", "bytes a token", "ratio"],
        )
        even = table_of(
            f"{folder.name}: entropy of tokens over its greatest, before and with 1,000 new ones",
            ["task", "outputs", "inputs"],
        )
        for task in asked.tasks or TASKS:
            to_stderr(f"{folder.name} {task}")
            own = found[f"{folder.name} {task}"] = _measure(asked.data, task, tokenizer)
            curve, draws = own["reduction"], own["draws"]
            before, after = own["bytes_per_token"]
            shorter.add_row(
                task, *(f"{x:.2f}" for x in curve), f"{draws[0]:.2f}-{draws[1]:.2f}",
                f"{own['refined']:.2f}", f"{before:.2f} > {after:.2f}", f"{after / before:.2f}",
            )  # fmt: skip
            sides = [f"{own[s][0]:.3f} > {own[s][1]:.3f}" for s in ("outputs", "inputs")]
            even.add_row(task, *sides)
            figures += _figures(task, folder.name, own)
        console.print(shorter)
        console.print(even)
    return figures, found


def _figures(task: str, tokenizer: str, own: dict[str, Any]) -> list[Figure]:
    bar = BARS.get((task, tokenizer))
    before, after = own["outputs"]
    return [
        Figure(f"{task}, {tokenizer}: test outputs shorter", own["reduction"][-1], "x", bar,
               least=own["draws"][0], greatest=own["draws"][1]),
        Figure(f"{task}, {tokenizer}: refined over greedy", own["refined"] / own["reduction"][-1],
               "x", 1.0),
        Figure(f"{task}, {tokenizer}: normalised entropy rises by", after - before, "", 0.0),
    ]  # fmt: skip


def _measure(data: Path, task: str, tokenizer: TaskTokenizer) -> dict[str, Any]:
    train, test = (TASKS[task].read(data, split) for split in ("train", "test"))
    outputs, judged = [r.output for r in train], [r.output for r in test]
    settings = EnrichSettings(BUDGETS[-1], 4, PCS)
    found = enrich(tokenizer, outputs, settings)
    better = refined(tokenizer, outputs, settings.refining)
    before, *after = lengths_by_budget(tokenizer, found, judged, BUDGETS)
    size = sum(len(text.encode()) for text in judged)
    bits = {
        name: _normalised(tokenizer, found, texts)
        for name, texts in (("outputs", outputs), ("inputs", [r.input for r in train]))
    }
    return {
        "new_tokens": len(found.tokens),
        "reduction": [before / length for length in after],
        "refined": before / int(_lengths(better.tokenizer, judged).sum()),
        "draws": _draws(tokenizer, found, judged),
        "bytes_per_token": (size / before, size / after[-1]),
        **bits,
    }


def _draws(tokenizer: TaskTokenizer, found: Enriched, texts: Sequence[str]) -> tuple[float, float]:
    """The middle 95 % of the reduction, rows drawn with replacement."""
    lengths = [_lengths(backend, texts) for backend in (tokenizer.backend, found.tokenizer)]
    drawn = np.random.default_rng(0).integers(len(texts), size=(_DRAWS, len(texts)))
    ratios = lengths[0][drawn].sum(1) / lengths[1][drawn].sum(1)
    low, high = np.quantile(ratios, (0.025, 0.975))
    return float(low), float(high)


def _lengths(backend: Tokenizer, texts: Sequence[str]) -> NDArray[np.int64]:
    encoded = backend.encode_batch_fast(list(texts), add_special_tokens=False)
    return np.array([len(each.ids) for each in encoded])


def _normalised(
    tokenizer: TaskTokenizer, found: Enriched, texts: Sequence[str]
) -> tuple[float, float]:
    """Entropy over that of all tokens of the vocabulary being as frequent, before and after."""
    sides = ((tokenizer.backend, 0), (found.tokenizer, len(found.tokens)))
    figures = []
    for backend, new in sides:
        encoded = backend.encode_batch_fast(list(texts), add_special_tokens=False)
        counts = Counter(id_ for each in encoded for id_ in each.ids)
        figures.append(distribution(Counter(counts.values()), 1, tokenizer.vocab_size + new))
    return figures[0].normalised_entropy, figures[1].normalised_entropy
