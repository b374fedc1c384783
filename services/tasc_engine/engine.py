"""The decoding engine: continuous batching with drafts, verified losslessly by the target.

The emitted tokens of a request equal the tokens of plain one-by-one decoding with the same model
and the request's sampling rule. They depend neither on drafts nor on other requests in the batch,
except where rounding decides between tokens of almost equal scores (docs/concepts/lossless.md).
The engine does not depend on HTTP, Ray or a store. It must be used by one thread.

`Engine.step` advances all rows by one forward. It has three parts, which may also be called one by
one, so that a GPU works while the host builds outputs::

    engine.launch()              # plans the next step, and starts its forward
    hand_over(engine.outputs())  # the outputs of the step before, while the forward runs
    engine.collect()             # waits for the forward, and commits its tokens
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tasc_draft import SOURCES, Drafts, Proposer
from tasc_engine.config import EngineConfig
from tasc_engine.drafting.safe_proposer import SafeProposer, max_draft_tokens
from tasc_engine.errors import OutOfMemory, RequestTooLong
from tasc_engine.guided import Guide, Guides, following
from tasc_engine.guided.following import LeastTokens
from tasc_engine.model.target import Target
from tasc_engine.sampling import accept, sampler
from tasc_engine.sampling.accept import Accepted, DraftCounts, count
from tasc_engine.sampling.row_parameters import Allowed
from tasc_engine.sampling.sampler import Sampler
from tasc_engine.stats import StepClock, StepRecord
from tasc_engine.step.cost import StepCosts
from tasc_engine.step.draft_budget import Decision, DraftBudget, Spent
from tasc_engine.step.live_costs import LiveCosts
from tasc_engine.step.plan import Plan
from tasc_engine.step.scheduler import Committed, Scheduler
from tasc_engine.step.sequence import Sequence
from tasc_engine.step.verify import Verification, Verified, Verifier
from tasc_protocol import FieldError, GenerationResult, Output, Request
from tasc_protocol.request import MOST_LOGPROBS
from tasc_text import TaskTokenizer

Float32 = NDArray[np.float32]


@dataclass(frozen=True)
class Proposed:
    """A step's drafts, and the tokens that guides allow.

    Attributes:
        decision: The decision of the draft budget; None if no request allows drafts, has room for
            drafts and may gain from them.
    """

    drafts: Drafts
    allowed: Allowed | None
    decision: Decision | None


@dataclass(frozen=True)
class _Step:
    """A step whose forward has been started."""

    plan: Plan
    proposed: Proposed
    verification: Verification
    clock: StepClock


@dataclass(frozen=True)
class _Collected:
    """A step whose tokens are committed, and whose outputs are not built yet.

    Attributes:
        drafts: A copy, since the proposer makes the next drafts in the same arrays.
    """

    plan: Plan
    decision: Decision | None
    clock: StepClock
    committed: Committed
    drafts: Drafts
    accepted: Accepted
    cached_tokens: int


class Engine:
    """Answers requests with one target in ``config.rows`` rows.

    Args:
        on_step: Called with each step's record, on the engine's thread.
        costs: Costs of steps on this machine, so that drafts are made only if they pay. None makes
            drafts in every step.
        on_costs: Called on the engine's thread with costs that many real steps have corrected.

    Attributes:
        guides: Makes the guides of requests, on any thread.
        scheduler: Holds the waiting requests and the requests that have a row.
    """

    def __init__(
        self,
        target: Target,
        tokenizer: TaskTokenizer,
        proposer: Proposer,
        config: EngineConfig,
        on_step: Callable[[StepRecord], None] = lambda record: None,
        costs: StepCosts | None = None,
        on_costs: Callable[[StepCosts], None] | None = None,
    ) -> None:
        self.config = config
        self.guides = Guides(tokenizer, target.vocab_size)
        self._target, self._tokenizer, self._on_step = target, tokenizer, on_step
        is_eos = np.zeros(target.vocab_size, bool)
        is_eos[[e for e in tokenizer.eos_ids if e < target.vocab_size]] = True
        self.scheduler = Scheduler(config, target.cache, target.vocab_size)
        self._proposer = SafeProposer(proposer, target.vocab_size, target.keep_hidden_states)
        live = LiveCosts(costs, on_costs) if costs else None
        self._draft_budget = DraftBudget(live, self._max_step_drafts(proposer))
        self._sampler = Sampler(config.rows, config.max_model_len, target.vocab_size)
        self._verifier = Verifier(target, self._sampler, is_eos)
        self._step: _Step | None = None
        self._collected: _Collected | None = None
        self._outputs: list[Output] = []
        target.warm_up()
        accept.warm_up()

    @property
    def running(self) -> int:
        return self.scheduler.running

    @property
    def waiting(self) -> int:
        return self.scheduler.waiting

    @property
    def overlaps(self) -> bool:
        """Whether a forward runs from `launch` on; otherwise, `collect` runs it."""
        return self._target.device.type != "cpu"

    @property
    def has_outputs(self) -> bool:
        """Whether `outputs` has something to return."""
        return bool(self._outputs) or self._collected is not None

    @property
    def cached_tokens(self) -> int:
        return self.scheduler.cached_tokens

    @property
    def kv_usage(self) -> float:
        """Share of the KV cache's slots that requests hold; other slots are free."""
        return self.scheduler.kv_usage

    @property
    def vocab_size(self) -> int:
        return self._target.vocab_size

    @property
    def lean(self) -> bool:
        """Whether this project's own forward runs the model, rather than transformers' code."""
        return self._target.decoder is not None

    @property
    def longest(self) -> int:
        """Maximum number of tokens of one request, prompt and answer together."""
        return self.scheduler.longest

    def submit(self, request: Request, guide: Guide | None = None) -> None:
        """Queues a request.

        Args:
            guide: The guide that `guides` made on another thread; None to make it here.

        Raises:
            RequestTooLong: Prompt and ``max_tokens`` do not fit ``max_model_len``.
            GuideError: The request's guide cannot be followed.
            QueueFull: The maximum number of requests is waiting.
            ValueError: The engine holds a request with this id, a token id is outside the
                vocabulary, or the adapter does not exist.
        """
        self.require_fit(request)
        if guide is None and request.guide:
            guide = self.guides.of(request.guide)
        elif guide is None and request.min_tokens:
            eos_ids = () if request.ignore_eos else tuple(self._tokenizer.eos_ids)
            ends = request.stop_token_ids + eos_ids
            guide = LeastTokens(ends, self.vocab_size, request.min_tokens)
        adapter = self._target.adapter_number(request.adapter)
        self.scheduler.submit(Sequence(request, self._tokenizer, guide, adapter))

    def require_fit(self, request: Request) -> None:
        """Checks a request whose values are filled in.

        Raises:
            RequestTooLong: Prompt and ``max_tokens`` do not fit a row.
            FieldError: A token id or an adapter does not exist, or a field is out of range.
            ValueError: The prompt has no tokens, nothing is left to generate, or a sampling
                parameter is out of range.
        """
        prompt, most = request.prompt_ids, request.answer_limit
        if not prompt:
            raise ValueError(f"request {request.id}: the prompt has no tokens; send at least one")
        if most < 1:
            raise FieldError("max_tokens", f"max_tokens is {most}; it is 1 or more")
        if (begun := len(request.committed_ids)) >= most:
            message = f"{begun} tokens are committed and max_tokens is {most}"
            raise ValueError(f"request {request.id}: {message}; nothing is left to generate")
        if not all(request.stop):
            raise FieldError("stop", "stop has an empty string; leave it out")
        if not 0 <= (request.logprobs or 0) <= MOST_LOGPROBS:
            message = f"logprobs is {request.logprobs}; it goes from 0 to {MOST_LOGPROBS}"
            raise FieldError("logprobs", message)
        if len(prompt) + most > self.longest:
            raise RequestTooLong(
                f"prompt ({len(prompt)} tokens) plus max_tokens ({most}) is {len(prompt) + most} "
                f"tokens; a row holds at most {self.longest} (max_model_len, kv_cache_bytes); "
                "shorten the prompt or lower max_tokens"
            )
        biased = tuple(token for token, _ in request.sampling.logit_bias)
        for field, ids in (
            (request.prompt_field, prompt),
            ("committed_ids", request.committed_ids),
            ("stop_token_ids", request.stop_token_ids),
            ("logit_bias", biased),
        ):
            if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
                wrong = max(ids) if min(ids) >= 0 else min(ids)
                way_out = f"ids of the task's model go from 0 to {self.vocab_size - 1}"
                raise FieldError(field, f"{field} has token id {wrong}; {way_out}")
        self._target.adapter_number(request.adapter)

    @property
    def rules_compiled(self) -> bool:
        """Whether `compile_rules` has ended; requests with any rule but the plain rule need it."""
        return sampler.is_warm(self._target.dtype, self._target.device)

    def compile_rules(self) -> None:
        """Compiles all sampling rules except the plain rule. May run on any thread.

        This takes seconds once per machine. Without the call, the first request with such a rule
        waits for the compilation, and so does its whole batch.
        """
        following.warm_up()  # first, since `rules_compiled` checks only the sampler
        target = self._target
        sampler.warm_up(target.dtype, target.device, target.vocab_size)

    def cancel(self, request_id: str) -> bool:
        """Drops a waiting or running request; its row is free for the next step.

        The request has no further output. False if the engine does not hold it, for example because
        it has ended; then its last output may not have been returned yet.
        """
        self.collect()
        sequence = self.scheduler.find(request_id)
        if sequence:
            self._drop(sequence)
        return sequence is not None

    def holds(self, request_id: str) -> bool:
        """Whether a request waits or has a row."""
        return self.scheduler.find(request_id) is not None

    def cancel_all(self) -> None:
        """Drops every request."""
        self.collect()
        for sequence in self.scheduler.held:
            self._drop(sequence)
        self._build_outputs()
        self._outputs.clear()  # also of answers that have just ended

    def draft_by(self, proposer: Proposer) -> None:
        """Replaces the proposer by another that has no rows yet; answers do not change."""
        self.collect()
        self._build_outputs()  # the last step counts for the proposer that made its drafts
        self._proposer.use(proposer)
        self._draft_budget.begin_again(self._max_step_drafts(proposer))
        for sequence in self.scheduler.active:
            if sequence.request.draft:
                answer = sequence.answer_ids
                self._proposer.start(sequence.row, sequence.prompt, sequence.labels, answer)

    def step(self) -> list[Output]:
        """Advances all rows by one verify forward; does nothing without requests."""
        self.launch()
        self.collect()
        return self.outputs()

    def launch(self) -> None:
        """Plans the next step, makes its drafts, and starts its forward; see `collect`.

        Until `collect`, requests may be submitted, and join the step after this one. A CPU runs the
        forward in `collect`.
        """
        self.collect()
        clock = StepClock()
        plan = self._plan()
        if not plan.sequences:
            return
        proposed = self._propose(plan, clock)
        verification = self._verifier.start(plan, proposed.drafts, proposed.allowed)
        clock.verify = clock.lap()
        self._step = _Step(plan, proposed, verification, clock)

    def collect(self) -> None:
        """Waits for the forward that `launch` has started, if any, and commits its tokens.

        Rows of ended answers are free for the next step, and the proposer knows the new tokens.
        `outputs` then returns them.
        """
        if self._step is None:
            return
        self._build_outputs()
        step, self._step = self._step, None
        if self.overlaps:
            self._prepare(step)
        else:
            step.clock.lap()  # the forward begins now
        try:
            verified = self._verifier.finish(step.verification, step.clock)
        except OutOfMemory as error:
            self._outputs.append(self._give_up(step.plan.largest, str(error)))
            return
        committed = self.scheduler.commit(step.plan, verified, step.clock)
        self._observe(step.plan, verified, committed)
        self._collected = _Collected(
            step.plan,
            step.proposed.decision,
            step.clock,
            committed,
            verified.drafts.copy(),
            verified.accepted,
            self.cached_tokens,
        )

    def outputs(self) -> list[Output]:
        """Returns the outputs of collected steps that were not returned yet."""
        self._build_outputs()
        outputs, self._outputs = self._outputs, []
        return outputs

    def generate(
        self, requests: Iterable[Request], stopped: Callable[[], bool] = lambda: False
    ) -> Iterator[GenerationResult]:
        """Answers requests, refilling rows as they end, and yields results as they finish.

        On a GPU, results are yielded while the next forward runs, so ``requests`` is asked for more
        requests before the results of the last step are yielded. Up to one more request for each
        row is taken while a forward runs, and waits.

        Args:
            stopped: Called before each step; True ends the loop, and running requests remain.
        """
        source = iter(requests)
        exhausted = False

        def submit(most_waiting: int) -> None:
            nonlocal exhausted
            while not exhausted and self.waiting < most_waiting:
                request = next(source, None)
                if request is None:
                    exhausted = True
                else:
                    self.submit(request)

        while (not exhausted or self.waiting or self.running) and not stopped():
            submit(self.scheduler.free_rows)
            self.launch()
            if self.overlaps:
                yield from (output.result for output in self.outputs() if output.result)
                submit(min(self.config.rows, self.config.max_waiting))
            self.collect()
            if not self.overlaps:
                yield from (output.result for output in self.outputs() if output.result)
        yield from (output.result for output in self.outputs() if output.result)

    def check_integrity(self) -> None:
        """Raises AssertionError unless each row is free or held by one request that fits it."""
        self.scheduler.check_integrity()

    def _max_step_drafts(self, proposer: Proposer) -> int:
        """Maximum number of draft tokens of one step."""
        return self.config.rows * min(self.config.max_draft_tokens, max_draft_tokens(proposer))

    def _plan(self) -> Plan:
        """Admits waiting requests, and plans the tokens of all rows for the step."""
        plan = self.scheduler.plan()
        for sequence in plan.admitted:
            row, prompt, begun = sequence.row, sequence.prompt, sequence.answer_ids
            if sequence.request.draft:
                self._proposer.start(row, prompt, sequence.labels, begun)
            self._sampler.start(row, prompt, sequence.request.sampling, begun)
        return plan

    def _propose(self, plan: Plan, clock: StepClock) -> Proposed:
        """Makes drafts that are worth their time, without tokens that guides forbid."""
        budget, min_probs = plan.budget(self.config.max_draft_tokens), None
        decision = None
        if budget.any():
            shape = len(plan.emitting), len(plan.tokens), plan.context
            min_probs = self._draft_budget.min_probs(*shape, plan.reads)
            decision = self._draft_budget.decision
        clock.lap()
        drafts = self._proposer.propose(plan.emitting_rows, budget, min_probs)
        clock.draft = clock.lap()
        drafts, allowed = plan.guided(drafts, _price(min_probs, len(drafts.tokens)))
        clock.guide = clock.lap()
        return Proposed(drafts, allowed, decision)

    def _prepare(self, step: _Step) -> None:
        """Lets the proposer work ahead while the forward of a step runs."""
        waiting = self.scheduler.upcoming
        upcoming = [(each.prompt, each.labels) for each in waiting if each.request.draft]
        # While drafts do not pay, rows need no analysis of their prompts.
        drafts = len(step.proposed.drafts.tokens) > 0
        self._proposer.prepare(upcoming, lambda: drafts and self._target.is_busy())

    def _observe(self, plan: Plan, verified: Verified, committed: Committed) -> None:
        """Passes new tokens on to proposer and sampler, and frees the rows of ended answers."""
        hidden_states = self._target.hidden_states
        self._proposer.keep(plan, verified.drafts, verified.accepted, hidden_states)
        rows = plan.emitting_rows
        self._proposer.observe_rows(rows, committed.new)
        for row, sequence, new in zip(rows.tolist(), plan.emitting, committed.new, strict=True):
            self._sampler.observe(row, new)
            if sequence.row < 0:
                self._free(row)

    def _build_outputs(self) -> None:
        """Builds the outputs of the last collected step, and publishes its record."""
        collected, self._collected = self._collected, None
        if collected is None:
            return
        committed, drafts, depth = collected.committed, collected.drafts, self._proposer.max_depth
        counts = count(drafts, collected.accepted, committed.used, len(SOURCES), depth)
        outputs = committed.outputs(counts)
        self._outputs += outputs
        self._record(collected, counts, outputs)

    def _record(self, collected: _Collected, counts: DraftCounts, outputs: list[Output]) -> None:
        """Publishes the step's record; updates the costs of steps and the value of drafts."""
        plan, decision, clock = collected.plan, collected.decision, collected.clock
        drafts, used = collected.drafts, collected.committed.used.tolist()
        emitted = {output.id: len(output.tokens) for output in outputs}
        # Tokens that guides forced before or after the step's own tokens.
        forced = sum(n - k for n, k in zip(emitted.values(), used, strict=True) if k)
        record = StepRecord(
            row_steps=len(plan.emitting),
            drafts=int(np.count_nonzero(drafts.sizes)),
            drafted=counts.drafted,
            reached=counts.reached,
            accepted=counts.kept,
            bonus_tokens=sum(used) - int(counts.kept.sum()) - counts.forced,
            prompt_tokens=plan.prompt_tokens,
            cached_tokens=collected.cached_tokens,
            draft_seconds=clock.draft,
            verify_seconds=clock.verify,
            paused=decision is not None and decision.paused,
            cost_error=self._draft_budget.cost_error,
            shared_tokens=plan.shared_tokens,
            draft_failures=self._proposer.new_failures(),
            forced_tokens=forced + counts.forced,
            carried_tokens=len(drafts.tokens) - int(counts.drafted.sum()),
            carried_kept=counts.forced,
            guide_seconds=clock.guide,
            requests=tuple(sequence.request.id for sequence in plan.sequences),
            emitted=emitted,
        )
        self._on_step(record)
        if self._draft_budget.learns:
            spent = Spent.of(plan, record, decision or Decision())
            self._draft_budget.time(spent, clock.late)
            if decision:
                self._draft_budget.learn(spent)

    def _give_up(self, sequence: Sequence, error: str) -> Output:
        """Ends a request after a forward did not fit the memory; keeps the other requests."""
        row = sequence.row
        output = sequence.answer.failed(error)
        self.scheduler.release(sequence)
        self._free(row)
        return output

    def _drop(self, sequence: Sequence) -> None:
        self._build_outputs()
        self._outputs = [output for output in self._outputs if output.id != sequence.request.id]
        if sequence.row >= 0:
            self._free(sequence.row)
        self.scheduler.release(sequence)

    def _free(self, row: int) -> None:
        self._proposer.finish(row)
        self._sampler.finish(row)


def _price(min_probs: Float32 | None, drafted: int) -> float:
    """The minimum probability at which a step's last draft token is worth its cost."""
    if min_probs is None or not drafted:
        return 0.0
    return float(min_probs[min(drafted, len(min_probs)) - 1])
