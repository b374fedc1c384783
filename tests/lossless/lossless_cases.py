"""Tiny random models, their answers by plain one-by-one decoding, and neural proposers."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from math import inf
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from neural_drafters import drafter_of, proposer_of, ranked_by, vocabulary_of
from support import index_of, load_target, make_proposer
from tasc_draft import SOURCES, DraftIndex, DraftSettings, Proposer
from tasc_engine import (
    Engine,
    EngineConfig,
    EngineTotals,
    GenerationResult,
    Request,
    Target,
)
from tasc_engine.drafting.neural.proposer import NeuralProposer
from tasc_engine.drafting.neural.tree import NeuralSettings
from tasc_engine.step.cost import StepCosts
from tasc_text import TaskTokenizer
from tiny import make_folder, plain

LONGEST, CAPACITY = 48, 160
# The smallest margin of all answers so far (best logit minus second best), and its model, by dtype.
CLOSEST: dict[str, tuple[float, str]] = {}
PAPER = DraftSettings(mixture="tasc", min_prob=0.0)
TREE = NeuralSettings(depth=4, width=4, nodes=16)


@dataclass(frozen=True)
class Case:
    """A model, requests of mixed lengths, and the only right answer to each."""

    folder: Path
    tokenizer: TaskTokenizer
    prompts: list[tuple[int, ...]]
    max_tokens: list[int]
    answers: list[list[int]]
    corpus: list[list[int]]
    dtype: str

    def requests(self, draft: bool = True) -> list[Request]:
        pairs = zip(self.prompts, self.max_tokens, strict=True)
        return [Request(str(i), p, m, draft=draft) for i, (p, m) in enumerate(pairs)]

    def index(self) -> DraftIndex:
        return index_of(self.tokenizer, self.corpus, self.prompts[: len(self.corpus)])


@dataclass(frozen=True)
class Answered:
    results: dict[str, GenerationResult]
    totals: EngineTotals

    def tokens(self) -> list[list[int]]:
        return [list(self.results[str(i)].tokens) for i in range(len(self.results))]


@cache
def reference(folder: Path, dtype: str = "float64") -> PreTrainedModel:
    """Loads the model in transformers with eager attention; other kinds omit soft caps."""
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), attn_implementation="eager"
    ).eval()


def answered_alone(model: PreTrainedModel, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """Returns the answer of transformers' ``generate``, and updates the margin in ``CLOSEST``."""
    answer = plain(model, prompt, max_tokens)
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *answer[:-1]]])).logits[0, len(prompt) - 1 :]
    best, second = logits.topk(2).values.T
    margin = float((best - second).min())
    dtype = str(logits.dtype).removeprefix("torch.")
    CLOSEST[dtype] = min(CLOSEST.get(dtype, (inf, "")), (margin, model.config.model_type))
    return answer


def make_case(folder: Path, architecture: str, dtype: str = "float64") -> Case:
    make_folder(folder, architecture)
    tokenizer = TaskTokenizer.from_folder(folder)
    model = reference(folder, dtype)
    rng = random.Random(0)
    lengths = [1, 2, 5, 17, 33, 60, 3, 90, 1, 8, 21, 49]
    prompts = [tuple(rng.randrange(1, tokenizer.vocab_size) for _ in range(n)) for n in lengths]
    max_tokens = [LONGEST, 1, 2, 30, LONGEST, 7, 30, 12, 3, LONGEST, 20, 25]
    whole = [answered_alone(model, p, LONGEST) for p in prompts]
    answers = [answer[:most] for answer, most in zip(whole, max_tokens, strict=True)]
    # Two thirds of the model's answers, so that drafts are sometimes right and sometimes wrong.
    corpus = [[t for t in w if t not in tokenizer.eos_ids] for w in whole[:8]]
    return Case(folder, tokenizer, prompts, max_tokens, answers, corpus, dtype)


def make_engine(
    case: Case,
    config: EngineConfig,
    settings: DraftSettings = PAPER,
    *,
    target: Target | None = None,
    index: DraftIndex | None = None,
    branching: bool = True,
    spare: int = 0,
    wrap: Callable[[Proposer], Proposer] = lambda proposer: proposer,
    costs: StepCosts | None = None,
) -> tuple[Engine, EngineTotals]:
    """Makes an engine, and the totals of its work; ``wrap`` may replace the proposer."""
    target, index = target or load_target(case.folder, config, case.dtype), index or case.index()
    options = {"index": index, "branching": branching, "spare": spare}
    ngrams = make_proposer(case.tokenizer, settings, config, **options)
    proposer = wrap(ngrams)
    totals = EngineTotals(len(SOURCES), proposer.max_depth)
    return Engine(target, case.tokenizer, proposer, config, totals.add, costs), totals


def answer(
    case: Case,
    *,
    rows: int = 4,
    settings: DraftSettings = PAPER,
    draft: bool = True,
    prefill_chunk: int = 16,
    prefix_cache_bytes: int = 1 << 20,
    requests: Sequence[Request] | None = None,
    **how: Any,
) -> Answered:
    config = EngineConfig(
        rows=rows,
        max_model_len=CAPACITY,
        prefill_chunk=prefill_chunk,
        prefix_cache_bytes=prefix_cache_bytes,
    )
    engine, totals = make_engine(case, config, settings, **how)
    results = {r.id: r for r in engine.generate(requests or case.requests(draft))}
    engine.check_integrity()
    assert not engine.running
    assert not engine.waiting
    return Answered(results, totals)


def neural(
    case: Case, kind: str, policy: str = "full", settings: NeuralSettings = TREE, rows: int = 4
) -> NeuralProposer:
    drafter, head = drafter_of(kind, case.folder, rows, CAPACITY)
    vocabulary = vocabulary_of(policy, head, rows, ranked_by(case.answers, len(head)))
    return proposer_of(
        drafter, vocabulary, settings, rows=rows, capacity=CAPACITY, eos_ids=case.tokenizer.eos_ids
    )


def by(proposer: NeuralProposer) -> Callable[[Proposer], Proposer]:
    """Returns a function that replaces the n-gram proposer by this one."""
    return lambda ngram: proposer


def assert_some_accepted_and_some_rejected(found: Answered, least: int = 20) -> None:
    accepted = int(found.totals.accepted[SOURCES.index("neural")].sum())
    assert accepted == found.totals.accepted.sum()
    assert accepted > least
    assert found.totals.drafted.sum() - accepted > 20
