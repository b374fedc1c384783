"""Verifying drafts: one forward of the target, and which draft tokens it agrees with.

The target's token at each visited node is what plain decoding would have emitted there; the path is
followed while the draft has that child (speculative verification with deterministic choice;
Leviathan et al. 2023, arXiv 2211.17192; over trees: Miao et al. 2024, arXiv 2305.09781). Accepted
nodes stand where their draft had them; they move to their slots in the cache with the next forward.
"""

from collections.abc import Sequence as Row
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tasc_draft import SOURCES, Drafts
from tasc_engine.errors import OutOfMemory, out_of_memory_is
from tasc_engine.model.target import Target
from tasc_engine.sampling.parameters import TokenLogprob
from tasc_engine.sampling.row_parameters import Allowed
from tasc_engine.sampling.sampler import Sampler, token_logprobs
from tasc_engine.stats import Counts, StepRecord
from tasc_engine.step.plan import Plan

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


@dataclass(frozen=True)
class Accepted:
    """What each row takes from a step.

    Attributes:
        tokens: ``int32[rows, W]`` tokens it emits, the first ``emitted``: accepted draft tokens and
            the bonus token.
        emitted: ``int32[rows]``, at least one; 0 where the target said nothing that can be read.
        path: ``int32[rows, W]`` accepted nodes of its draft, the first ``followed``.
        followed: ``int32[rows]``.
    """

    tokens: Int32
    emitted: Int32
    path: Int32
    followed: Int32


def accept(
    target_tokens: Int64,
    drafts: Drafts,
    room: Int32,
    ends: NDArray[np.bool_],
    is_eos: NDArray[np.bool_],
) -> Accepted:
    """Follow the target through each row's tree.

    Args:
        target_tokens: ``int64[M]`` the target's token behind each current and each draft token;
            below 0 where its logits are no numbers.
        drafts: The drafts of the same rows, in the same order.
        room: ``int32[rows]`` most tokens a row may emit, at least one.
        ends: ``bool[rows]`` whether a row's answer ends behind the first end of sequence.
        is_eos: Whether an id is one.
    """
    rows = len(drafts.offsets) - 1
    widest = int(np.diff(drafts.offsets).max(initial=0)) + 1
    found = Accepted(
        np.zeros((rows, widest), np.int32), np.zeros(rows, np.int32),
        np.zeros((rows, widest), np.int32), np.zeros(rows, np.int32),
    )  # fmt: skip
    _accept(
        target_tokens, drafts.tokens, drafts.parents, drafts.offsets, room, ends, is_eos,
        found.tokens, found.emitted, found.path, found.followed,
    )  # fmt: skip
    return found


def moves(accepted: Accepted, firsts: Int64, behind: Int32) -> Int64:
    """``int64[2, k]`` cache places of accepted nodes, and where they belong.

    Args:
        firsts: ``int64[n]`` the cache place of each row's first token; -1 for one that ended.
        behind: ``int32[n]`` tokens of the row up to its current one.
    """
    found = np.empty((2, accepted.path.size), np.int64)
    n = _moves(accepted.path, accepted.followed, firsts, behind, found)
    return np.ascontiguousarray(found[:, :n])


def count(
    drafts: Drafts, accepted: Accepted, used: Int32, sources: int, positions: int
) -> tuple[Counts, Counts, Counts]:
    """Tokens drafted, drafts that reach a position, tokens kept: ``[sources, max(positions, 1)]``.

    A draft that reaches a position counts for the source of its likeliest token there.

    Args:
        used: ``int32[rows]`` tokens that entered the answer, at most those emitted.
    """
    shape = (sources, max(positions, 1))
    drafted, reached, kept = (np.zeros(shape, np.int64) for _ in range(3))
    _count(
        drafts.source, drafts.depths, drafts.offsets, accepted.path, accepted.followed, used,
        drafted, reached, kept,
    )  # fmt: skip
    return drafted, reached, kept


def warm_up() -> None:
    """Compile, or load what is compiled, before the first request waits for it."""
    drafts, one = Drafts.empty(1), np.ones(1, np.int32)
    found = accept(np.zeros(1, np.int64), drafts, one, np.ones(1, bool), np.zeros(1, bool))
    moves(found, np.zeros(1, np.int64), one)
    count(drafts, found, one, 1, 1)


@numba.njit(cache=True, nogil=True)
def _child(tokens: Any, parents: Any, node: int, token: int) -> int:
    """The child of a node with this token; as many as there are nodes when it has none."""
    for child in range(node + 1, len(tokens)):
        if parents[child] == node and tokens[child] == token:
            return child
    return len(tokens)


@numba.njit(cache=True, nogil=True)
def _accept(
    target_tokens: Any, tokens: Any, parents: Any, offsets: Any, room: Any, ends: Any, is_eos: Any,
    out: Any, emitted: Any, path: Any, followed: Any,
) -> None:  # fmt: skip
    current = 0
    for i in range(len(offsets) - 1):
        begin, size = offsets[i], offsets[i + 1] - offsets[i]
        node, n, k = -1, 0, 0
        while True:
            token = target_tokens[current + 1 + node]
            if token < 0:
                break
            out[i, n] = token
            n += 1
            child = _child(tokens[begin : begin + size], parents[begin : begin + size], node, token)
            if child < size:
                path[i, k] = node = child
                k += 1
            if child == size or (ends[i] and is_eos[token]) or n == room[i]:
                break
        emitted[i], followed[i] = n, k
        current += size + 1


@numba.njit(cache=True, nogil=True)
def _moves(path: Any, followed: Any, firsts: Any, behind: Any, found: Any) -> int:
    n = 0
    for i in range(len(firsts)):
        if firsts[i] >= 0:
            first = firsts[i] + behind[i]
            for k in range(followed[i]):
                if path[i, k] != k:
                    found[0, n], found[1, n] = first + path[i, k], first + k
                    n += 1
    return n


@numba.njit(cache=True, nogil=True)
def _count(
    source: Any, depths: Any, offsets: Any, path: Any, followed: Any, used: Any,
    drafted: Any, reached: Any, kept: Any,
) -> None:  # fmt: skip
    for i in range(len(offsets) - 1):
        deepest = 0
        for x in range(offsets[i], offsets[i + 1]):
            drafted[source[x], depths[x] - 1] += 1
            if depths[x] > deepest:
                deepest = depths[x]
                reached[source[x], deepest - 1] += 1
        for k in range(min(followed[i], used[i])):
            kept[source[offsets[i] + path[i, k]], k] += 1


def record_of(
    plan: Plan,
    drafts: Drafts,
    accepted: Accepted,
    used: NDArray[np.int32],
    forced: int,
    seconds: tuple[float, float, float],
    *,
    positions: int,
    cached_tokens: int,
    paused: bool,
    draft_failures: int,
) -> StepRecord:
    """A step's record.

    Args:
        used: ``int32[m]`` tokens that each answer took.
        forced: Tokens that guides forced besides.
        seconds: Spent proposing, asking guides, and in the target's forward.
        positions: The deepest a draft may be.
    """
    drafted, reached, kept = count(drafts, accepted, used, len(SOURCES), positions)
    return StepRecord(
        row_steps=len(plan.emitting),
        drafts=int((np.diff(drafts.offsets) > 0).sum()),
        drafted=drafted,
        reached=reached,
        accepted=kept,
        bonus_tokens=int(used.sum()) - int(kept.sum()),
        prompt_tokens=plan.prompt_tokens,
        shared_tokens=plan.shared_tokens,
        cached_tokens=cached_tokens,
        draft_seconds=seconds[0],
        guide_seconds=seconds[1],
        verify_seconds=seconds[2],
        paused=paused,
        draft_failures=draft_failures,
        forced_tokens=forced,
        requests=tuple(sequence.request.id for sequence in plan.sequences),
    )


@dataclass(frozen=True)
class Verified:
    """What the target says to a step.

    Attributes:
        target_tokens: ``int64[M]`` the token behind each current and each draft token, at least
            where it is visited; below 0 where logits are not numbers or nothing is allowed.
        drafts: What was verified: none where drafts did not fit the memory.
        logits: ``[M, vocab]`` until the next step, where somebody needs them.
    """

    target_tokens: Int64
    drafts: Drafts
    logits: Tensor | None = None

    def logprobs(self, plan: Plan, accepted: Accepted) -> list[list[TokenLogprob]]:
        """Of the tokens each row of ``plan.emitting`` emits; none for rows that do not ask.

        Raises:
            OutOfMemory: They did not fit; nothing has changed.
        """
        asked = [s.request.logprobs for s in plan.emitting]
        if self.logits is None or all(n is None for n in asked):
            return [[] for _ in asked]
        counts = [0 if n is None else k for n, k in zip(asked, accepted.emitted, strict=True)]
        places, tokens, most = [], [], []
        for i, count in enumerate(counts):
            root = int(self.drafts.offsets[i]) + i
            places += [root, *(root + 1 + accepted.path[i, : count - 1])][:count]
            tokens += accepted.tokens[i, :count].tolist()
            most += [asked[i] or 0] * count
        with out_of_memory_is("log-probabilities", moved=True):
            found = token_logprobs(self.logits, np.array(places), np.array(tokens), most)
        told = iter(found)
        return [[next(told) for _ in range(count)] for count in counts]


class Verifier:
    """Targets and the rules of their rows.

    Attributes:
        moves: ``int64[2, k]`` cache places to copy from and to with the next forward.
    """

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self.moves = _none()

    def verify(
        self, target: Target, plan: Plan, drafts: Drafts, allowed: Allowed | None
    ) -> Verified:
        """Run a step; without its drafts, and what drafts are made of, where they do not fit.

        Args:
            allowed: What guides allow at each place; None where there are no guides.

        Raises:
            OutOfMemory: The step does not fit without drafts either.
        """
        try:
            return self._run(target, plan, drafts, allowed)
        except OutOfMemory:
            if not len(drafts.tokens) and not target.keeps_hidden_states:
                raise
        return self._in_less_memory(target, plan, drafts, allowed)

    def keep(self, plan: Plan, accepted: Accepted, firsts: Row[int]) -> None:
        """Accepted draft tokens go where they belong.

        Args:
            firsts: The first cache place of each row that could emit; -1 where its answer ended.
        """
        self.moves = moves(accepted, np.array(firsts, np.int64), plan.behind)

    def forget_moves_if(self, made: bool) -> None:
        if made:
            self.moves = _none()

    def forget(self, first: int, end: int) -> None:
        """Nothing moves from these places: another's tokens may be there before it would."""
        source = self.moves[0]
        self.moves = self.moves[:, (source < first) | (source >= end)]

    def _in_less_memory(
        self, target: Target, plan: Plan, drafts: Drafts, allowed: Allowed | None
    ) -> Verified:
        none = Drafts.empty(len(plan.emitting))
        roots = drafts.offsets[:-1] + np.arange(len(plan.emitting))
        at_roots = allowed and Allowed(allowed.masks, allowed.mask_of[roots])
        if len(drafts.tokens):
            try:
                return self._run(target, plan, none, at_roots)
            except OutOfMemory:
                if not target.keeps_hidden_states:
                    raise
        with target.without_hidden_states():
            return self._run(target, plan, none, at_roots)

    def _run(self, target: Target, plan: Plan, drafts: Drafts, allowed: Allowed | None) -> Verified:
        feed, rows = plan.feed(drafts, self.moves), plan.emitting_rows
        told = any(s.request.logprobs is not None for s in plan.emitting)
        try:
            if allowed is None and not told and self._sampler.plain(rows):
                return Verified(target.next_tokens(feed), drafts)
            logits = target.logits(feed)
            with out_of_memory_is("choosing tokens", moved=True):
                chosen = self._sampler.choose(logits, rows, drafts, allowed)
        except OutOfMemory as error:
            self.forget_moves_if(error.moved)
            raise
        return Verified(chosen, drafts, logits)


def _none() -> Int64:
    return np.zeros((2, 0), np.int64)
