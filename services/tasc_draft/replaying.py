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
from numpy.typing import NDArray

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
    tokens, nodes, start_us, draft_us = 0, 0, list[float](), list[float]()
    deepest, accepted = list[int](), list[int]()  # of each step
    batch, limit = np.zeros(1, np.int32), np.array([budget], np.int32)
    least = np.zeros(budget, np.float32)
    for prompt, answer in rows:
        began = time.perf_counter()
        proposer.start(0, prompt)
        start_us.append((time.perf_counter() - began) * 1e6)
        at = 0
        while at < len(answer):
            began = time.perf_counter()
            drafts = proposer.propose(batch, limit, least)
            drafted = time.perf_counter()
            kept = _longest_path(drafts.tokens, drafts.parents, answer, at)
            nodes += len(drafts.tokens)
            deepest.append(int(drafts.depths.max(initial=0)))
            accepted.append(kept)
            end = min(at + kept + 1, len(answer))
            verified = time.perf_counter()
            proposer.observe(0, answer[at:end])
            seconds = drafted - began + time.perf_counter() - verified
            draft_us.append(seconds * 1e6)
            tokens += end - at
            at = end
        proposer.finish(0)
        progress()
    positions = min(max(deepest, default=0), POSITIONS)
    return Replay(
        rows=len(start_us),
        steps=len(draft_us),
        tokens=tokens,
        nodes=nodes,
        drafted_steps=int(np.count_nonzero(deepest)),
        reached=_beyond(np.array(deepest), positions),
        accepted=_beyond(np.array(accepted), positions),
        draft_us=draft_us,
        start_us=start_us,
    )


def _beyond(steps: NDArray[Any], positions: int) -> list[int]:
    """How many are above 0, above 1, and so on."""
    return [int(np.count_nonzero(steps > at)) for at in range(positions)]


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
