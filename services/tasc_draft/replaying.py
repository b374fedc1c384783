"""Replays known answers to measure what a proposer would have drafted, without a model.

Lossless verification makes the output independent of the drafts, so (prompt, answer) pairs measure
a proposer exactly: each step keeps the longest correct path of the draft and one bonus token of the
answer. End-of-sequence counts as a token. The first step has a draft, too.

Tokens that a guide forces need no forward, with drafts or without. They follow the token in front
of them in the same step, and are neither drafted nor accepted tokens.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasc_draft.compiled import borrowing, compiled
from tasc_draft.drafts import Drafts
from tasc_draft.labels import LabelTrie, child
from tasc_draft.mixture.proposer import NgramProposer
from tasc_draft.tokens import Int32

POSITIONS = 64  # depths counted separately; deeper ones count with the last


@dataclass(frozen=True)
class Replay:
    """Counts of one replay.

    Attributes:
        rows, steps, tokens: Number of answers, target forwards, and emitted tokens.
        plain_steps: Number of target forwards without drafts: of tokens that no guide forces.
        nodes: Number of verified draft tokens, those that are forced within drafts included.
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
    plain_steps: int

    @property
    def forwards_saved(self) -> float:
        """Forwards without drafts / forwards with drafts."""
        return self.plain_steps / self.steps if self.steps else 0.0

    @property
    def tokens_per_step(self) -> float:
        """The block efficiency: total tokens / total steps."""
        return self.tokens / self.steps if self.steps else 0.0


def replay(
    proposer: NgramProposer,
    rows: Iterable[tuple[Int32, Int32]],
    budget: int,
    progress: Callable[[], None] = lambda: None,
    *,
    labels: LabelTrie | None = None,
    forced: Sequence[NDArray[np.bool_]] | None = None,
) -> Replay:
    """Replay rows on the proposer's row 0, in order.

    Args:
        rows: Prompt and answer ids, ``int32``, the answer with its end-of-sequence.
        budget: Most draft tokens of a step.
        progress: Called after each row.
        labels: The answers are limited to these. An answer that is none of them is not limited.
        forced: For each answer, ``bool[n]`` which of its tokens its guide forces; by default those
            that ``labels`` force.
    """
    tokens, nodes, start_us, draft_us = 0, 0, list[float](), list[float]()
    plain_steps = 0
    deepest, accepted = list[int](), list[int]()  # of each step
    batch, limit = np.zeros(1, np.int32), np.array([budget], np.int32)
    least = np.zeros(budget, np.float32)
    for n, (prompt, answer) in enumerate(rows):
        own = labels if labels and labels.behind(0, answer) >= 0 else None
        if forced is not None:
            needless = forced[n]
        else:
            needless = np.zeros(len(answer), bool) if own is None else own.forced_in(answer)
        plain_steps += max(len(answer) - int(np.count_nonzero(needless)), 1)
        began = time.perf_counter()
        proposer.start(0, prompt, own)
        start_us.append((time.perf_counter() - began) * 1e6)
        at = min(_forced_end(needless, 0), len(answer) - 1)
        proposer.observe(0, answer[:at])
        tokens += at
        while at < len(answer):
            began = time.perf_counter()
            drafts = proposer.propose(batch, limit, least)
            drafted = time.perf_counter()
            kept = _longest_path(drafts.tokens, drafts.parents, answer, at)
            nodes += len(drafts.tokens)
            state = 0 if own is None else own.behind(0, answer[:at])
            deepest.append(_deepest(drafts, own, state))
            accepted.append(kept - int(np.count_nonzero(needless[at : at + kept])))
            end = min(at + kept + 1, len(answer))
            end = _forced_end(needless, end)
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
        plain_steps=plain_steps,
    )


def _beyond(steps: NDArray[Any], positions: int) -> list[int]:
    """How many are above 0, above 1, and so on."""
    return [int(np.count_nonzero(steps > at)) for at in range(positions)]


def _deepest(drafts: Drafts, labels: LabelTrie | None, state: int) -> int:
    """Most drafted tokens on a path of a draft, without forced ones."""
    if labels is None:
        return int(drafts.depths.max(initial=0))
    states, positions = np.empty((2, len(drafts.tokens)), np.int32)
    return int(
        _fill_positions(
            labels.token, labels.first, state, drafts.tokens, drafts.parents, states, positions
        )
    )


@borrowing
def _fill_positions(
    token: Any, first: Any, root: int, tokens: Any, parents: Any, states: Any, positions: Any
) -> int:
    deepest = 0
    for x in range(len(tokens)):
        above, at = parents[x], root
        positions[x] = 0
        if above >= 0:
            at, positions[x] = states[above], positions[above]
        positions[x] += first[at + 1] - first[at] > 1
        states[x] = child(token, first, at, tokens[x])
        deepest = max(deepest, positions[x])
    return deepest


@borrowing
def _forced_end(forced: Any, at: int) -> int:
    """The end of the forced tokens that begin at a place of an answer."""
    while at < len(forced) and forced[at]:
        at += 1
    return at


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
