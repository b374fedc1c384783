"""Verifies drafts by one forward pass of the target: `accept` follows it through each draft tree.

The target's token at a visited node is the token that plain decoding would have emitted there. The
path goes on while the node has that token as a child (speculative verification with deterministic
choice: Leviathan et al. 2023, arXiv 2211.17192; of trees: Miao et al. 2024, arXiv 2305.09781).
Accepted nodes move from the slots of the draft to their own in the cache before the next forward.
"""

import time
from dataclasses import dataclass, replace
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tasc_draft import SOURCES, Drafts
from tasc_draft.drafts import FORCED
from tasc_engine.errors import OutOfMemory, out_of_memory_is
from tasc_engine.model.target import Target
from tasc_engine.sampling.row_parameters import Allowed
from tasc_engine.sampling.sampler import Sampler, token_logprobs
from tasc_engine.stats import Counts, StepRecord
from tasc_engine.step.plan import Plan
from tasc_protocol import TokenLogprob

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


@dataclass(frozen=True)
class Accepted:
    """The accepted path and the tokens of each row.

    Attributes:
        tokens: ``int32[rows, W]``; the first ``emitted`` of a row are its accepted draft tokens and
            the bonus token.
        emitted: ``int32[rows]``, at least 1; 0 if the target gives no token.
        path: ``int32[rows, W]``; the first ``followed`` of a row are its accepted nodes.
        followed: ``int32[rows]``, the number of accepted nodes.
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
        target_tokens: ``int64[M]``, the target's token after each current and each draft token;
            below 0 if its logits are not numbers.
        drafts: The drafts of the same rows, in the same order.
        room: ``int32[rows]``, the maximum number of tokens a row may emit, at least 1.
        ends: ``bool[rows]``, whether a row's answer ends after the first end-of-sequence token.
        is_eos: By id, whether it is an end-of-sequence token.
    """
    rows = len(drafts.offsets) - 1
    widest = int(drafts.sizes.max(initial=0)) + 1
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
    """Returns the cache slots of accepted nodes, from and to, ``int64[2, k]``.

    Args:
        firsts: ``int64[n]``, the cache slot of each row's first token; -1 for a row that ended.
        behind: ``int32[n]``, the number of the row's tokens up to its current one.
    """
    found = np.empty((2, accepted.path.size), np.int64)
    n = _moves(accepted.path, accepted.followed, firsts, behind, found)
    return np.ascontiguousarray(found[:, :n])


def count(
    drafts: Drafts, accepted: Accepted, used: Int32, sources: int, positions: int
) -> tuple[Counts, Counts, Counts, int]:
    """Counts drafted tokens, drafts that reach a position, kept tokens, and kept forced tokens.

    Each array is ``[sources, max(positions, 1)]``. Forced tokens count in none of them, and not in
    positions either. A draft that reaches a position counts for the source of its most likely
    token there.

    Args:
        used: ``int32[rows]``, tokens that entered the answer, at most those emitted.
    """
    shape = (sources, max(positions, 1))
    drafted, reached, kept = (np.zeros(shape, np.int64) for _ in range(3))
    forced = _count(
        drafts.source, drafts.parents, drafts.offsets, accepted.path, accepted.followed, used,
        np.empty(len(drafts.tokens), np.int32), drafted, reached, kept,
    )  # fmt: skip
    return drafted, reached, kept, forced


class OwnTokens:
    """Counts the tokens of a step's drafts that were drafted, without those that guides forced.

    Attributes:
        drafted: For each row, the number of its drafted tokens.
    """

    def __init__(self, drafts: Drafts) -> None:
        own = drafts.source != FORCED
        self._offsets, self._own = drafts.offsets, None if own.all() else own
        if self._own is None:
            self.drafted: list[int] = drafts.sizes.tolist()
        else:
            before = np.concatenate(([0], np.cumsum(own)))
            self.drafted = np.diff(before[drafts.offsets]).tolist()

    def on_path(self, row: int, path: Int32) -> int:
        """The number of drafted tokens among some nodes of a row."""
        if self._own is None:
            return len(path)
        return int(np.count_nonzero(self._own[self._offsets[row] + path]))


def warm_up() -> None:
    """Compiles or loads the compiled code, so that the first request does not wait for it."""
    drafts, one = Drafts.empty(1), np.ones(1, np.int32)
    found = accept(np.zeros(1, np.int64), drafts, one, np.ones(1, bool), np.zeros(1, bool))
    moves(found, np.zeros(1, np.int64), one)
    count(drafts, found, one, 1, 1)


@numba.njit(cache=True, nogil=True)
def _child(tokens: Any, parents: Any, node: int, token: int) -> int:
    """Returns the child of a node that has this token, or the number of nodes if none has."""
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
    source: Any, parents: Any, offsets: Any, path: Any, followed: Any, used: Any,
    position: Any, drafted: Any, reached: Any, kept: Any,
) -> int:  # fmt: skip
    forced = 0
    for i in range(len(offsets) - 1):
        deepest, begin = 0, offsets[i]
        for x in range(begin, offsets[i + 1]):
            position[x] = position[begin + parents[x]] if parents[x] >= 0 else 0
            if source[x] < 0:
                continue
            position[x] += 1
            drafted[source[x], position[x] - 1] += 1
            if position[x] > deepest:
                deepest = position[x]
                reached[source[x], deepest - 1] += 1
        for k in range(min(followed[i], used[i])):
            x = begin + path[i, k]
            if source[x] < 0:
                forced += 1
            else:
                kept[source[x], position[x] - 1] += 1
    return forced


@dataclass(frozen=True)
class Verified:
    """The result of verifying a step.

    Attributes:
        drafts: The verified drafts; empty if they did not fit the memory.
        accepted: The accepted tokens of each row.
        logprobs: For each row, log-probabilities of its tokens if they are requested.
        prompt_logprobs: For each row of the plan, those of its scored prompt tokens.
        seconds: Time of the target's forward pass, until its tokens were read.
    """

    drafts: Drafts
    accepted: Accepted
    logprobs: list[list[TokenLogprob]]
    prompt_logprobs: list[list[TokenLogprob]]
    seconds: float

    def record(
        self, plan: Plan, used: Int32, positions: int, forced_tokens: int, **others: Any
    ) -> StepRecord:
        """Returns the step's record.

        Args:
            used: ``int32[m]``, tokens that each answer took.
            positions: Maximum depth of a draft.
            forced_tokens: Tokens that guides forced behind these.
            others: The remaining fields of the record.
        """
        drafted, reached, kept, forced = count(
            self.drafts, self.accepted, used, len(SOURCES), positions
        )
        return StepRecord(
            row_steps=len(plan.emitting),
            drafts=int(np.count_nonzero(self.drafts.sizes)),
            drafted=drafted,
            reached=reached,
            accepted=kept,
            bonus_tokens=int(used.sum()) - int(kept.sum()) - forced,
            forced_tokens=forced_tokens + forced,
            carried_tokens=len(self.drafts.tokens) - int(drafted.sum()),
            carried_kept=forced,
            prompt_tokens=plan.prompt_tokens,
            shared_tokens=plan.shared_tokens,
            verify_seconds=self.seconds,
            requests=tuple(sequence.request.id for sequence in plan.sequences),
            **others,
        )


@dataclass(frozen=True)
class _Forward:
    """The result of a forward pass.

    Attributes:
        tokens: ``int64[M]``, the token after each current and each draft token, at least where
            visited; below 0 if logits are not numbers or nothing is allowed.
        logits: ``[M, vocab]``, valid until the next step; None if they are not needed.
    """

    tokens: Int64
    drafts: Drafts
    logits: Tensor | None = None


class Verifier:
    """The target, and the sampling rules of its rows.

    Args:
        is_eos: ``bool[vocab]``, whether an id is an end-of-sequence token.

    Attributes:
        moves: ``int64[2, k]``, cache slots to copy from and to in the next forward pass.
    """

    def __init__(self, target: Target, sampler: Sampler, is_eos: NDArray[np.bool_]) -> None:
        self._target, self._sampler, self._is_eos = target, sampler, is_eos
        self.moves = _none()

    def verify(self, plan: Plan, drafts: Drafts, allowed: Allowed | None) -> Verified:
        """Runs a step. If it does not fit the memory, it is run without drafts and hidden states.

        Args:
            allowed: The tokens that guides allow at each place; None without guides.

        Raises:
            OutOfMemory: The step does not fit without drafts either; it can be run again.
        """
        began = time.perf_counter()
        try:
            forward = self._fitting(plan, drafts, allowed)
            seconds = time.perf_counter() - began
            accepted = accept(
                forward.tokens, forward.drafts, plan.room(), plan.ends(), self._is_eos
            )
            logprobs = _logprobs(plan, forward, accepted)
            scored = _prompt_logprobs(plan, forward)
        except OutOfMemory as error:
            self._forget_made(error)
            raise
        return Verified(forward.drafts, accepted, logprobs, scored, seconds)

    def keep(self, plan: Plan, accepted: Accepted) -> None:
        """Notes the moves of accepted draft tokens to their slots, except of rows that ended."""
        firsts = np.array([sequence.first for sequence in plan.emitting], np.int64)
        self.moves = moves(accepted, firsts, plan.behind)

    def forget(self, first: int, end: int) -> None:
        """Drops moves from these slots, which another request may use before the next step."""
        source = self.moves[0]
        self.moves = self.moves[:, (source < first) | (source >= end)]

    def _fitting(self, plan: Plan, drafts: Drafts, allowed: Allowed | None) -> _Forward:
        target = self._target
        try:
            return self._run(plan, drafts, allowed)
        except OutOfMemory as error:
            self._forget_made(error)
            if not len(drafts.tokens) and not target.keeps_hidden_states:
                raise
        none = Drafts.empty(len(plan.emitting))
        roots = drafts.offsets[:-1] + np.arange(len(plan.emitting))
        at_roots = allowed and allowed.at(roots)
        if len(drafts.tokens):
            try:
                return self._run(plan, none, at_roots)
            except OutOfMemory as error:
                self._forget_made(error)
                if not target.keeps_hidden_states:
                    raise
        with target.without_hidden_states():
            return self._run(plan, none, at_roots)

    def _run(self, plan: Plan, drafts: Drafts, allowed: Allowed | None) -> _Forward:
        rows = plan.emitting_rows
        needs_logits = any(s.request.logprobs is not None for s in plan.emitting)
        needs_logits |= plan.scored is not None
        if allowed is None and not needs_logits and self._sampler.plain(rows):
            return _Forward(self._target.next_tokens(plan.feed(drafts, self.moves)), drafts)
        if allowed and (needs_logits or self._target.device.type != "cpu"):
            allowed = replace(allowed, only=None)  # a GPU's graphs compute all logits anyway
        known = allowed.known if allowed else None
        logits = self._target.logits(plan.feed(drafts, self.moves, known))
        with out_of_memory_is("choosing tokens", moved=True):
            visited = logits[: len(rows) + len(drafts.tokens)]  # scored ones follow
            tokens = self._sampler.choose(visited, rows, drafts, allowed)
        return _Forward(tokens, drafts, logits)

    def _forget_made(self, error: OutOfMemory) -> None:
        """Drops the moves if the failed forward pass has already made them."""
        if error.moved:
            self.moves = _none()


def _logprobs(plan: Plan, forward: _Forward, accepted: Accepted) -> list[list[TokenLogprob]]:
    """Log-probabilities of the tokens that each row of ``plan.emitting`` takes, if requested.

    Raises:
        OutOfMemory: They did not fit.
    """
    asked = [s.request.logprobs for s in plan.emitting]
    if forward.logits is None or all(n is None for n in asked):
        return [[] for _ in asked]
    counts = [0 if n is None else k for n, k in zip(asked, accepted.emitted, strict=True)]
    places, tokens, most = [], [], []
    for i, taken in enumerate(counts):
        root = int(forward.drafts.offsets[i]) + i
        places += [root, *(root + 1 + accepted.path[i, : taken - 1])][:taken]
        tokens += accepted.tokens[i, :taken].tolist()
        most += [asked[i] or 0] * taken
    with out_of_memory_is("log-probabilities", moved=True):
        found = iter(token_logprobs(forward.logits, np.array(places), np.array(tokens), most))
    return [[next(found) for _ in range(taken)] for taken in counts]


def _prompt_logprobs(plan: Plan, forward: _Forward) -> list[list[TokenLogprob]]:
    """Log-probabilities of the scored tokens of each row, before they enter the cache.

    Raises:
        OutOfMemory: They did not fit.
    """
    if plan.scored is None or forward.logits is None:
        return []
    counts = plan.scored.tolist()
    pairs = list(zip(plan.sequences, counts, strict=True))
    tokens = np.concatenate([s.prompt[s.cached + 1 : s.cached + 1 + n] for s, n in pairs])
    most = [s.request.logprobs or 0 for s, n in pairs for _ in range(n)]
    places = np.arange(len(tokens)) + len(forward.drafts.tokens) + len(plan.emitting)
    with out_of_memory_is("log-probabilities", moved=True):
        found = iter(token_logprobs(forward.logits, places, tokens.astype(np.int64), most))
    return [[next(found) for _ in range(n)] for n in counts]


def _none() -> Int64:
    return np.zeros((2, 0), np.int64)
