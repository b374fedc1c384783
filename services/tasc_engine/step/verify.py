"""Verifies drafts by one forward pass of the target; repeats the step if memory runs out.

A step is started and finished by two calls. On a GPU, the host is free between them.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tasc_draft import Drafts
from tasc_engine.errors import OutOfMemory, out_of_memory_is
from tasc_engine.layout import Int64
from tasc_engine.model.target import Target
from tasc_engine.sampling.accept import Accepted, EmitLimits, accept
from tasc_engine.sampling.row_parameters import Allowed
from tasc_engine.sampling.sampler import Sampler, continuation_logprobs, token_logprobs
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
        label_logprobs: For each row that may emit and scores labels, in order, what
            `LabelScorer.wanted` lists.
    """

    drafts: Drafts
    accepted: Accepted
    logprobs: list[list[TokenLogprob]]
    prompt_logprobs: list[list[TokenLogprob]]
    label_logprobs: list[NDArray[np.float64]]


@dataclass(frozen=True)
class _Forward:
    """The result of a forward pass.

    Attributes:
        logits: ``[M, vocab]``, valid until the next step; None if they are not needed.
    """

    accepted: Accepted
    drafts: Drafts
    logits: Tensor | None = None


@dataclass
class Verification:
    """A step whose forward has been started.

    Attributes:
        allowed: The tokens that guides allow at each place; None without guides.
        forward: Waits for the forward, and returns its result; raises OutOfMemory. None once
            `Verifier.finish` has begun, so that nothing holds the forward's memory.
    """

    plan: Plan
    drafts: Drafts
    allowed: Allowed | None
    forward: Callable[[], _Forward] | None


class Verifier:
    """Runs steps of the target, and chooses tokens by the sampling rules of the rows.

    Args:
        is_eos: ``bool[vocab]``, whether an id is an end-of-sequence token.
    """

    def __init__(self, target: Target, sampler: Sampler, is_eos: NDArray[np.bool_]) -> None:
        self._target, self._sampler, self._is_eos = target, sampler, is_eos

    def start(self, plan: Plan, drafts: Drafts, allowed: Allowed | None) -> Verification:
        """Starts the forward of a step; see `Target.start_tokens`."""
        try:
            forward = self._start(plan, drafts, allowed)
        except OutOfMemory as error:
            # `finish` raises it; a new exception does not hold the forward's memory.
            forward = partial(_raise, OutOfMemory(*error.args))
        return Verification(plan, drafts, allowed, forward)

    def finish(self, step: Verification, clock: StepClock) -> Verified:
        """Waits for a step; if memory ran out, runs it without drafts, then without hidden states.

        Args:
            clock: Receives the time until the step's tokens were read, and whether the host was
                late to wait for them.

        Raises:
            OutOfMemory: The step does not fit the memory even then; it can be run again.
        """
        wait, step.forward = step.forward, None
        assert wait is not None, "a step is finished once"
        clock.late = not self._target.is_busy()
        forward = None
        try:
            forward = wait()
        except OutOfMemory:
            if not len(step.drafts.tokens) and not self._target.keeps_hidden_states:
                raise
        del wait
        if forward is None:  # not in the except block: the exception holds the forward's memory
            forward = self._run_smaller(step)
        clock.verify += clock.lap()
        logprobs, scored = _logprobs(step.plan, forward), _prompt_logprobs(step.plan, forward)
        labels = _label_logprobs(step.plan, forward)
        return Verified(forward.drafts, forward.accepted, logprobs, scored, labels)

    def _run_smaller(self, step: Verification) -> _Forward:
        """Runs a step without drafts; if it still does not fit, also without hidden states."""
        target, plan, drafts = self._target, step.plan, step.drafts
        none = Drafts.empty(len(plan.emitting))
        roots = drafts.offsets[:-1] + np.arange(len(plan.emitting))
        at_roots = step.allowed and step.allowed.at(roots)
        if len(drafts.tokens):
            try:
                return self._start(plan, none, at_roots)()
            except OutOfMemory:
                if not target.keeps_hidden_states:
                    raise
        with target.without_hidden_states():
            return self._start(plan, none, at_roots)()

    def _start(self, plan: Plan, drafts: Drafts, allowed: Allowed | None) -> Callable[[], _Forward]:
        rows = plan.emitting_rows
        needs_logits = any(s.request.logprobs is not None or s.scorer for s in plan.emitting)
        needs_logits |= plan.scored is not None
        if allowed is None and not needs_logits and self._sampler.plain(rows):
            tokens = self._target.start_tokens(plan.batch(drafts))

            def accepted() -> _Forward:
                limits = plan.limits(self._is_eos)  # while the device works
                return _Forward(accept(tokens(), drafts, limits), drafts)

            return accepted
        if allowed and (needs_logits or self._target.device.type != "cpu"):
            allowed = replace(allowed, only=None)  # a GPU's graphs compute all logits anyway
        known = allowed.known if allowed else None
        logits = self._target.start_logits(plan.batch(drafts, known))

        def choose() -> tuple[Tensor, Callable[[EmitLimits], Accepted]]:
            found = logits()
            with out_of_memory_is("choosing tokens"):
                visited = found[: len(rows) + len(drafts.tokens)]  # logits of scored tokens follow
                return found, self._sampler.start_choice(visited, rows, drafts, allowed)

        # A GPU chooses right behind the forward.
        begun = None if self._target.device.type == "cpu" else choose()

        def chosen() -> _Forward:
            limits = plan.limits(self._is_eos)
            found, choice = begun or choose()
            with out_of_memory_is("choosing tokens"):
                return _Forward(choice(limits), drafts, found)

        return chosen


def _raise(error: OutOfMemory) -> NoReturn:
    raise error


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


def _label_logprobs(plan: Plan, forward: _Forward) -> list[NDArray[np.float64]]:
    """Log-probabilities that the rows that score labels want.

    Raises:
        OutOfMemory: The log-probabilities did not fit the memory.
    """
    wanted, sizes = list[tuple[Int64, Int64]](), forward.drafts.sizes.tolist()
    for i, (sequence, size) in enumerate(zip(plan.emitting, sizes, strict=True)):
        if sequence.scorer is not None:
            places, tokens = sequence.scorer.wanted(size)
            wanted.append((places + forward.drafts.offsets[i] + i, tokens))
    if not wanted or forward.logits is None:
        return []
    places, tokens = (np.concatenate(parts) for parts in zip(*wanted, strict=True))
    with out_of_memory_is("log-probabilities of labels"):
        found = continuation_logprobs(forward.logits, places, tokens)
    return np.split(found, np.cumsum([len(part) for part, _ in wanted])[:-1])


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
