"""N-grams and a drafter in one tree, against each alone with as many nodes. No paper has it."""

from dataclasses import asdict
from functools import cache
from typing import Any

from bench_neural import KINDS, Asked
from draft_bars import Figure
from draft_tables import table_of
from neural_bench import FULL, Bench
from neural_side import Measured
from rich.console import Console

from tasc_draft import DraftIndex, DraftSettings, Proposer, build_learnt_index
from tasc_engine.neural.arms import Always
from tasc_engine.neural.card import Kind
from tasc_engine.neural.hybrid import HybridProposer
from tasc_engine.neural.settings import NeuralSettings
from tasc_jobs.tuning.task_rows import encode

NODES, SURE = 24, 0.9
TEST_ROWS = 256  # how much each of the two is trusted is learnt on the way
TREE = NeuralSettings(5, 8, NODES)
NGRAMS = DraftSettings(num_speculative_tokens=NODES, min_prob=0.0)
BETTER, BETTER_ON = 1.1, 4


def measure(asked: Asked, console: Console) -> tuple[list[Figure], dict[str, Any]]:
    figures, found = list[Figure](), dict[str, Any]()
    benches = [
        Bench(bench.models, bench.case, max(bench.rows, TEST_ROWS), bench.repeats, NODES)
        for bench in asked.benches
        if not bench.case.wide
    ]
    for kind in KINDS:
        if not (own := [bench for bench in benches if kind in bench.case.kinds]):
            continue
        table = table_of(
            f"{NODES} nodes a row, {kind} drafter with its full head, n-grams of the rows that it "
            f"learnt, {TEST_ROWS} test rows where there are as many: tokens a step (tokens/s)",
            ["task", "n-grams", "drafter", "hybrid, always asked",
             f"asked if n-grams are under {SURE} sure", "over the better"],
        )  # fmt: skip
        better = 0
        for bench in own:
            sides = _measure(bench, kind)
            steps = {name: side.efficiency for name, side in sides.items()}
            over = steps["always"] / max(steps["ngrams"], steps["neural"])
            better += over >= BETTER
            cells = (f"{side.efficiency:.2f} ({side.tokens_s:.0f})" for side in sides.values())
            table.add_row(bench.case.name, *cells, f"{over:.2f}")
            found[f"{bench.case.name}, {kind}"] = {n: asdict(side) for n, side in sides.items()}
        console.print(table)
        name = f"tasks where the hybrid has {BETTER} x the better part's tokens a step, {kind}"
        bar = BETTER_ON if len(own) >= BETTER_ON else None
        figures.append(Figure(name, better, "tasks", bar))
    return figures, found


def _measure(bench: Bench, kind: Kind) -> dict[str, Measured]:
    index = cache(lambda: _index(bench))

    def ngrams() -> Proposer:
        return bench.side.ngrams(index(), NGRAMS)

    def neural() -> Proposer:
        return bench.proposer(kind, FULL, TREE)

    sides = {
        "ngrams": ngrams,
        "neural": neural,
        "always": lambda: HybridProposer(ngrams(), neural(), 1.0, Always()),
        "unsure": lambda: HybridProposer(ngrams(), neural(), SURE, Always()),
    }
    return {
        name: bench.measured(
            f"{name}, {kind if name != 'ngrams' else 'none'}, {NODES} nodes", bench.repeats,
            lambda watch, make=make: make(),
        )
        for name, make in sides.items()
    }  # fmt: skip


def _index(bench: Bench) -> DraftIndex:
    """Of the rows that the drafter learnt, with their outputs, as a task's corpus has them."""
    side = bench.side
    found = encode(bench.models.learnt(bench.case), side.tokenizer, bench.case.of.prompt)
    return build_learnt_index(
        found.outputs, found.prompts, fingerprint=side.tokenizer.fingerprint,
        vocab_size=side.tokenizer.vocab_size, eos_id=side.tokenizer.eos_id, settings=NGRAMS,
        word_starts=side.tokenizer.word_starts, canonical=side.tokenizer.canonical,
    )  # fmt: skip
