"""N-grams and a drafter in one tree, against each alone at as many nodes. No paper has it."""

from dataclasses import asdict
from typing import Any

from bench_neural import Asked
from draft_bars import Figure
from draft_tables import table_of
from neural_bench import FULL, Bench
from neural_models import KINDS
from neural_side import Measured
from rich.console import Console

from tasc_draft import DraftIndex, DraftSettings, Proposer, build_learnt_index
from tasc_engine.neural.arms import Always, Arms
from tasc_engine.neural.card import Kind
from tasc_engine.neural.hybrid import HybridProposer
from tasc_engine.neural.settings import NeuralSettings
from tasc_jobs.tuning.task_rows import encode

NODES = 24
TREE = NeuralSettings(5, 8, NODES)
# Answers of an earlier run must not be drafted from.
NGRAMS = DraftSettings(num_speculative_tokens=NODES, min_prob=0.0, recent_tokens=0)
BETTER, BETTER_ON, SURE = 1.1, 4, 0.9


def measure(asked: Asked, console: Console) -> tuple[list[Figure], dict[str, Any]]:
    figures, found = list[Figure](), dict[str, Any]()
    benches = [bench for bench in asked.benches if not bench.case.wide]
    for kind in KINDS:
        table = table_of(
            f"{NODES} nodes a row, {kind} drafter, full vocabulary: tokens a step (tokens/s)",
            [
                "task",
                "n-grams",
                "drafter",
                "hybrid, always asked",
                "hybrid, as served",
                "over best",
            ],
        )
        better = 0
        for bench in benches:
            sides = _measure(bench, kind)
            assert all(side.equal for side in sides.values()), "answers changed"
            steps = {name: side.efficiency for name, side in sides.items()}
            over = steps["always"] / max(steps["ngrams"], steps["neural"])
            better += over >= BETTER
            cells = (f"{side.efficiency:.2f} ({side.tokens_s:.0f})" for side in sides.values())
            table.add_row(bench.case.name, *cells, f"{over:.2f}")
            found[f"{bench.case.name}, {kind}"] = {n: asdict(side) for n, side in sides.items()}
        console.print(table)
        name = f"tasks where the hybrid has {BETTER} x the better part's tokens a step, {kind}"
        bar = BETTER_ON if len(benches) >= BETTER_ON else None
        figures.append(Figure(name, better, "tasks", bar))
    return figures, found


def _measure(bench: Bench, kind: Kind) -> dict[str, Measured]:
    index: list[DraftIndex] = []

    def ngrams() -> Proposer:
        if not index:
            index.append(_index(bench))
        return bench.side.ngrams(index[0], NGRAMS)

    def neural() -> Proposer:
        return bench.proposer(kind, FULL, TREE)

    sides = {
        "ngrams": ngrams,
        "neural": neural,
        "always": lambda: HybridProposer(ngrams(), neural(), 1.0, Always()),
        "served": lambda: HybridProposer(ngrams(), neural(), SURE, Arms()),
    }
    return {
        name: bench.measured(
            f"{name}, {kind if name != 'ngrams' else ''}, {NODES} nodes", bench.repeats,
            lambda watch, make=make: make(),
        )
        for name, make in sides.items()
    }  # fmt: skip


def _index(bench: Bench) -> DraftIndex:
    """Of all train rows, as a task's corpus has them."""
    side = bench.side
    found = encode(bench.case.of.read(bench.models.data, "train"), side.tokenizer,
                   bench.case.of.prompt)  # fmt: skip
    return build_learnt_index(
        found.outputs, found.prompts, fingerprint=side.tokenizer.fingerprint,
        vocab_size=side.tokenizer.vocab_size, eos_id=side.tokenizer.eos_id, settings=NGRAMS,
        word_starts=side.tokenizer.word_starts, canonical=side.tokenizer.canonical,
    )  # fmt: skip
