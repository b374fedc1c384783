"""Verifies drafts by one forward pass of the target; repeats the step if memory runs out."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tasc_draft import Drafts
from tasc_engine.errors import OutOfMemory, out_of_memory_is
from tasc_engine.model.target import Target
from tasc_engine.sampling.accept import Accepted, accept
from tasc_engine.sampling.row_parameters import Allowed
from tasc_engine.sampling.sampler import Sampler, token_logprobs
from tasc_engine.stats import StepClock
from tasc_engine.step.plan import Plan
from tasc_protocol import TokenLogprob


@dataclass(frozen=True)
class Verified:
    """The result of verifying a step.

    Attributes:
        drafts: The verified drafts; empty if they did not fit the memory.
        accepted: The accepted tokens of each row.
        logprobs: For each row, the requested log-probabilities of its tokens.
        prompt_logprobs: For each row of the plan, log-probabilities of its scored prompt tokens.
    """

    drafts: Drafts
    accepted: Accepted
    logprobs: list[list[TokenLogprob]]
    prompt_logprobs: list[list[TokenLogprob]]


@dataclass(frozen=True)
class _Forward:
    """The result of a forward pass.

    Attributes:
        logits: ``[M, vocab]``, valid until the next step; None if they are not needed.
    """

    accepted: Accepted
    drafts: Drafts
    logits: Tensor | None = None


class Verifier:
    """Runs steps of the target, and chooses tokens by the sampling rules of the rows.

    Args:
        is_eos: ``bool[vocab]``, whether an id is an end-of-sequence token.
    """

    def __init__(self, target: Target, sampler: Sampler, is_eos: NDArray[np.bool_]) -> None:
        self._target, self._sampler, self._is_eos = target, sampler, is_eos

    def verify(
        self, plan: Plan, drafts: Drafts, allowed: Allowed | None, clock: StepClock
    ) -> Verified:
        """Runs a step; if memory runs out, again without drafts, then without hidden states too.

        Args:
            allowed: The tokens that guides allow at each place; None without guides.
            clock: Receives the time of the forward pass, until its tokens were read.

        Raises:
            OutOfMemory: The step does not fit the memory even then; it can be run again.
        """
        clock.lap()
        forward = None
        try:
            forward = self._run(plan, drafts, allowed)
        except OutOfMemory:
            if not len(drafts.tokens) and not self._target.keeps_hidden_states:
                raise
        if forward is None:  # not in the except block: the exception holds the forward's memory
            forward = self._run_smaller(plan, drafts, allowed)
        clock.verify = clock.lap()
        logprobs, scored = _logprobs(plan, forward), _prompt_logprobs(plan, forward)
        return Verified(forward.drafts, forward.accepted, logprobs, scored)

    def _run_smaller(self, plan: Plan, drafts: Drafts, allowed: Allowed | None) -> _Forward:
        """Runs a step without drafts; if it still does not fit, also without hidden states."""
        target, none = self._target, Drafts.empty(len(plan.emitting))
        roots = drafts.offsets[:-1] + np.arange(len(plan.emitting))
        at_roots = allowed and allowed.at(roots)
        if len(drafts.tokens):
            try:
                return self._run(plan, none, at_roots)
            except OutOfMemory:
                if not target.keeps_hidden_states:
                    raise
        with target.without_hidden_states():
            return self._run(plan, none, at_roots)

    def _run(self, plan: Plan, drafts: Drafts, allowed: Allowed | None) -> _Forward:
        rows, limits = plan.emitting_rows, plan.limits(self._is_eos)
        needs_logits = any(s.request.logprobs is not None for s in plan.emitting)
        needs_logits |= plan.scored is not None
        if allowed is None and not needs_logits and self._sampler.plain(rows):
            tokens = self._target.next_tokens(plan.batch(drafts))
            return _Forward(accept(tokens, drafts, limits), drafts)
        if allowed and (needs_logits or self._target.device.type != "cpu"):
            allowed = replace(allowed, only=None)  # a GPU's graphs compute all logits anyway
        known = allowed.known if allowed else None
        logits = self._target.logits(plan.batch(drafts, known))
        with out_of_memory_is("choosing tokens"):
            visited = logits[: len(rows) + len(drafts.tokens)]  # logits of scored tokens follow
            accepted = self._sampler.choose(visited, rows, drafts, allowed, limits)
        return _Forward(accepted, drafts, logits)


def _logprobs(plan: Plan, forward: _Forward) -> list[list[TokenLogprob]]:
    """Log-probabilities of the tokens that each row of ``plan.emitting`` takes, if requested.

    Raises:
        OutOfMemory: The log-probabilities did not fit the memory.
    """
    asked, accepted = [s.request.logprobs for s in plan.emitting], forward.accepted
    if forward.logits is None or all(n is None for n in asked):
        return [[] for _ in asked]
    counts = [0 if n is None else k for n, k in zip(asked, accepted.emitted, strict=True)]
    places, tokens, num_top = [], [], []
    for i, taken in enumerate(counts):
        root = int(forward.drafts.offsets[i]) + i
        places += [root, *(root + 1 + accepted.path[i, : taken - 1])][:taken]
        tokens += accepted.tokens[i, :taken].tolist()
        num_top += [asked[i] or 0] * taken
    with out_of_memory_is("log-probabilities"):
        found = iter(token_logprobs(forward.logits, np.array(places), np.array(tokens), num_top))
    return [[next(found) for _ in range(taken)] for taken in counts]


def _prompt_logprobs(plan: Plan, forward: _Forward) -> list[list[TokenLogprob]]:
    """Log-probabilities of the scored tokens of each row, before they enter the cache.

    Raises:
        OutOfMemory: The log-probabilities did not fit the memory.
    """
    if plan.scored is None or forward.logits is None:
        return []
    counts = plan.scored.tolist()
    pairs = list(zip(plan.sequences, counts, strict=True))
    tokens = np.concatenate([s.prompt[s.cached + 1 : s.cached + 1 + n] for s, n in pairs])
    num_top = [s.request.logprobs or 0 for s, n in pairs for _ in range(n)]
    places = np.arange(len(tokens)) + len(forward.drafts.tokens) + len(plan.emitting)
    with out_of_memory_is("log-probabilities"):
        found = iter(token_logprobs(forward.logits, places, tokens.astype(np.int64), num_top))
    return [[next(found) for _ in range(n)] for n in counts]
