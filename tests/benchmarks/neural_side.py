"""One proposer's answers to a task's test rows, and what it drafted for them. It trains nothing."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from neural_watch import WatchedVocabulary

from tasc_draft import SOURCES, Proposer
from tasc_engine import Engine, EngineConfig, EngineTotals, GenerationRequest, Target
from tasc_engine.neural.vocabulary import Vocabulary
from tasc_text import TaskTokenizer

Wrap = Callable[[Vocabulary], Vocabulary]
Make = Callable[[Wrap], Proposer]


@dataclass(frozen=True)
class Side:
    """What one proposer did.

    Attributes:
        block_efficiency: Emitted tokens, the bonus counted, a forward and row.
        draft_ms, verify_ms: Of a step, means.
        vocabulary: Tokens that could be drafted, mean over drafts; 0: no neural drafter.
        coverage: Share of the emitted tokens that were among those.
    """

    name: str
    answers: tuple[tuple[int, ...], ...]
    block_efficiency: float
    tokens_per_second: float
    draft_ms: float
    verify_ms: float
    by_position: tuple[float, ...]
    vocabulary: float
    coverage: float

    @property
    def record(self) -> dict[str, Any]:
        found = asdict(self)
        del found["answers"]
        return found


def answer(
    name: str, target: Target, tokenizer: TaskTokenizer, config: EngineConfig, make: Make,
    requests: Sequence[GenerationRequest],
) -> Side:  # fmt: skip
    """Answer all requests once some of them have warmed things up; once more to watch."""
    proposer = make(lambda vocabulary: vocabulary)
    totals = EngineTotals(len(SOURCES), proposer.max_depth)
    engine = Engine(target, tokenizer, proposer, config, totals.add)
    list(engine.generate(requests[: config.rows]))
    totals.clear()
    began = time.perf_counter()
    results = {result.id: result.tokens for result in engine.generate(requests)}
    seconds = time.perf_counter() - began
    watched = _watched(target, tokenizer, config, make, requests)
    return Side(
        name,
        tuple(results[request.id] for request in requests),
        totals.block_efficiency,
        totals.emitted_tokens / seconds,
        1000 * totals.draft_seconds / max(totals.steps, 1),
        1000 * totals.verify_seconds / max(totals.steps, 1),
        tuple(totals.acceptance_by_position()),
        sum(each.sizes_of() for each in watched),
        sum(each.inside / max(each.tokens, 1) for each in watched),
    )


def _watched(
    target: Target, tokenizer: TaskTokenizer, config: EngineConfig, make: Make,
    requests: Sequence[GenerationRequest],
) -> list[WatchedVocabulary]:  # fmt: skip
    """The vocabulary of a run that nobody times; none where nothing neural drafts."""
    found: list[WatchedVocabulary] = []

    def wrap(vocabulary: Vocabulary) -> Any:
        found.append(WatchedVocabulary(vocabulary))
        return found[-1]

    proposer = make(wrap)
    if found:
        list(Engine(target, tokenizer, proposer, config).generate(requests))
    return found
