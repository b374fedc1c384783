"""Engines of the shipped model for the requests benchmark, and the results of their runs."""

import time
from collections.abc import Iterator
from collections.abc import Sequence as Row
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec import structs

from tasc_draft import SOURCES, DraftSettings, NgramProposer, Tokens, build_learnt_index
from tasc_engine import (
    Engine,
    EngineConfig,
    EngineTotals,
    GenerationResult,
    ModelSource,
    Request,
    Target,
)
from tasc_engine.step.plan import Plan
from tasc_engine.step.sequence import Sequence
from tasc_jobs.demo.tasks import MODEL
from tasc_text import TaskTokenizer

SETTINGS = DraftSettings(recent_tokens=0)
LENGTH = 1024
Examples = Row[tuple[str, str]]  # prompts and outputs


@dataclass(frozen=True)
class Options:
    """The command line."""

    parts: tuple[str, ...]
    data: Path | None
    rows: int
    requests: int
    schemas: int
    repeats: int
    json: Path | None


@dataclass(frozen=True)
class Run:
    """One run over requests, with the results in the order of the requests."""

    results: list[GenerationResult]
    totals: EngineTotals
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return sum(len(r.tokens) for r in self.results) / self.seconds

    @property
    def texts(self) -> list[str]:
        return [r.text for r in self.results]


def tokenizer() -> TaskTokenizer:
    return TaskTokenizer.from_folder(MODEL)


def load(rows: int = 8, **source: Any) -> Target:
    """Load the shipped model; ``source`` are further arguments of `ModelSource`."""
    return Target.load(ModelSource(MODEL, **source), EngineConfig(rows=rows, max_model_len=LENGTH))


def prompts(texts: Row[str], most: int = 512) -> list[tuple[int, ...]]:
    """The last ``most`` tokens of each text."""
    known = tokenizer()
    return [tuple(known.encode_prompt(text)[-most:]) for text in texts]


class Drafted:
    """A target with an index of examples; each run has its own proposer."""

    def __init__(self, target: Target, examples: Examples) -> None:
        self.target, self.known = target, tokenizer()
        self.index = build_learnt_index(
            Tokens.of(self.known.encode_outputs([output for _, output in examples])),
            Tokens.of(prompts([prompt for prompt, _ in examples])),
            settings=SETTINGS,
            **self.known.index_facts,
        )

    def run(self, requests: Row[Request], draft: bool = True) -> Run:
        config = self.target.config
        proposer = NgramProposer(
            SETTINGS, rows=config.rows, capacity=LENGTH, vocab_size=self.target.vocab_size,
            eos_ids=self.known.eos_ids, index=self.index,
        )  # fmt: skip
        totals = EngineTotals(len(SOURCES), proposer.max_depth)
        engine = Engine(self.target, self.known, proposer, config, totals.add)
        changed = [structs.replace(r, draft=draft) for r in requests]
        began = time.perf_counter()
        found = {r.id: r for r in engine.generate(changed)}
        seconds = time.perf_counter() - began
        return Run([found[r.id] for r in requests], totals, seconds)


@contextmanager
def guides_timed() -> Iterator[list[float]]:
    """A list of the seconds spent in guides: masks, pruned drafts, forced tokens."""
    spent: list[float] = []

    def timed(call: Any) -> Any:
        def run(*args: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*args)
            finally:
                spent.append(time.perf_counter() - began)

        return run

    untimed = Plan.guided, Sequence.follow_guide
    Plan.guided, Sequence.follow_guide = timed(untimed[0]), timed(untimed[1])
    try:
        yield spent
    finally:
        Plan.guided, Sequence.follow_guide = untimed
