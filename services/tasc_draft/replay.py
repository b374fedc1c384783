"""Replays known answers to measure what a proposer would have drafted, without a model.

Lossless verification makes the output independent of the drafts, so (prompt, answer) pairs measure
a proposer exactly: each step keeps the longest correct path of the draft and one bonus token of the
answer. End-of-sequence counts as a token. The first step has a draft, too.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tasc_draft.compiled import compiled
from tasc_draft.mixture.proposer import NgramProposer
from tasc_draft.tokens import Int32

POSITIONS = 64  # depths counted separately; deeper ones count with the last


@dataclass(frozen=True)
class Replay:
    """Counts of one replay.

    Attributes:
        rows, steps, tokens: Number of answers, target forwards, and emitted tokens.
        nodes: Number of draft tokens.
        drafted_steps: Number of steps with a draft.
        reached: ``[positions]`` number of steps whose draft reaches depth i + 1.
        accepted: ``[positions]`` number of steps that accept a token at depth i + 1.
        draft_us: ``[steps]`` microseconds of ``propose`` and ``observe``, called from Python.
        start_us: ``[rows]`` microseconds of ``start``.
    """

    rows: int
    steps: int
    tokens: int
    nodes: int
    drafted_steps: int
    reached: list[int]
    accepted: list[int]
    draft_us: list[float]
    start_us: list[float]

    @property
    def tokens_per_step(self) -> float:
        """The block efficiency: total tokens / total steps."""
        return self.tokens / self.steps if self.steps else 0.0


def replay(
    proposer: NgramProposer,
    rows: Iterable[tuple[Int32, Int32]],
    budget: int,
    progress: Callable[[], None] = lambda: None,
) -> Replay:
    """Replay rows on the proposer's row 0, in order.

    Args:
        rows: Prompt and answer ids, ``int32``, the answer with its end-of-sequence.
        budget: Most draft tokens of a step.
        progress: Called after each row.
    """
    tally = _Tally()
    batch, limit = np.zeros(1, np.int32), np.array([budget], np.int32)
    least = np.zeros(budget, np.float32)
    for prompt, answer in rows:
        began = time.perf_counter()
        proposer.start(0, prompt)
        tally.start_us.append((time.perf_counter() - began) * 1e6)
        at = 0
        while at < len(answer):
            began = time.perf_counter()
            drafts = proposer.propose(batch, limit, least)
            drafted = time.perf_counter()
            kept = _longest_path(drafts.tokens, drafts.parents, answer, at)
            tally.count(drafts.depths, kept)
            end = min(at + kept + 1, len(answer))
            verified = time.perf_counter()
            proposer.observe(0, answer[at:end])
            seconds = drafted - began + time.perf_counter() - verified
            tally.draft_us.append(seconds * 1e6)
            tally.tokens += end - at
            at = end
        proposer.finish(0)
        progress()
    return tally.result()


class _Tally:
    def __init__(self) -> None:
        self.tokens = self.nodes = self.drafted_steps = 0
        self.reached, self.accepted = (np.zeros(POSITIONS, np.int64) for _ in range(2))
        self.draft_us: list[float] = []
        self.start_us: list[float] = []

    def count(self, depths: Any, kept: int) -> None:
        if len(depths):
            self.nodes += len(depths)
            self.drafted_steps += 1
            self.reached[: min(int(depths.max()), POSITIONS)] += 1
            self.accepted[: min(kept, POSITIONS)] += 1

    def result(self) -> Replay:
        deepest = int(np.count_nonzero(self.reached))
        return Replay(
            rows=len(self.start_us),
            steps=len(self.draft_us),
            tokens=self.tokens,
            nodes=self.nodes,
            drafted_steps=self.drafted_steps,
            reached=self.reached[:deepest].tolist(),
            accepted=self.accepted[:deepest].tolist(),
            draft_us=self.draft_us,
            start_us=self.start_us,
        )


@compiled
def _longest_path(tokens: Any, parents: Any, answer: Any, at: int) -> int:
    """Number of draft tokens on the path that the answer takes from ``at`` on."""
    node, kept = -1, 0
    for i in range(len(tokens)):
        if at + kept == len(answer):
            break
        if parents[i] == node and tokens[i] == answer[at + kept]:
            node = i
            kept += 1
    return kept
