"""One step's forward, and the token that each row's own rule takes at each place looked at.

It also keeps which accepted draft tokens must still move in the cache: they do with the next
forward. It knows no requests but by their rows, and emits nothing.
"""

from collections.abc import Sequence as Row
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tasc_draft import Drafts
from tasc_engine.errors import OutOfMemory, out_of_memory_is
from tasc_engine.model.target import Target
from tasc_engine.sampling.logprobs import token_logprobs
from tasc_engine.sampling.parameters import TokenLogprob
from tasc_engine.sampling.row_parameters import Allowed
from tasc_engine.sampling.sampler import Sampler
from tasc_engine.step.accept import Accepted, moves
from tasc_engine.step.plan import Plan

Int64 = NDArray[np.int64]


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
