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

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tasc_draft import SOURCES, Drafts, Proposer
from tasc_engine.batch_engine import BatchEngine
from tasc_engine.config import EngineConfig
from tasc_engine.drafting.safe_proposer import SafeProposer, max_draft_tokens
from tasc_engine.errors import OutOfMemory, RequestTooLong
from tasc_engine.guided import Guidance, Guides, LabelScorer, LabelSet, following
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
from tasc_protocol import GuideSpec, Output, Request, Scoring
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


class Engine(BatchEngine):
    """Answers requests with one target in ``config.rows`` rows.

    Args:
        on_step: Called with each step's record, on the engine's thread.
        costs: Costs of steps on this machine, so that drafts are made only if they pay. None makes
            drafts in every step.
        on_costs: Called on the engine's thread with costs that many real steps have corrected.

    Attributes:
        scheduler: Holds the waiting requests and the requests that have a row.
    """

    guides: Guides

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
        return self._target.device.type != "cpu"

    @property
    def has_outputs(self) -> bool:
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
        return self.scheduler.longest

    def submit(self, request: Request, guide: Guidance | None = None) -> None:
        self.require_fit(request)
        scorer = None
        if request.scoring is not None and request.guide:
            labels = guide if isinstance(guide, LabelSet) else self.guides.labels(request.guide)
            scorer, guide = self._scorer(request, request.scoring, labels), None
        elif isinstance(guide, LabelSet):
            raise ValueError(f"request {request.id}: labels guide no answer; set scoring")
        elif guide is None and request.guide:
            guide = self.guides.of(request.guide)
        elif guide is None and request.min_tokens:
            eos_ids = () if request.ignore_eos else tuple(self._tokenizer.eos_ids)
            ends = request.stop_token_ids + eos_ids
            guide = LeastTokens(ends, self.vocab_size, request.min_tokens)
        adapter = self._target.adapter_number(request.adapter)
        self.scheduler.submit(Sequence(request, self._tokenizer, guide, adapter, scorer))

    def _scorer(self, request: Request, how: Scoring, labels: LabelSet) -> LabelScorer:
        needed = len(request.prompt_ids) + labels.slots(self.config.max_draft_tokens)
        if needed > self.longest:
            raise RequestTooLong(
                f"scoring the labels behind this prompt takes {needed} tokens; a row holds at most "
                f"{self.longest} (max_model_len, kv_cache_bytes); shorten the prompt or the labels"
            )
        if how.biases and len(how.biases) != len(labels.texts):
            raise ValueError(f"{len(how.biases)} biases are given for {len(labels.texts)} labels")
        return LabelScorer(labels, how, self.config.max_draft_tokens)

    @property
    def rules_compiled(self) -> bool:
        return sampler.is_warm(self._target.dtype, self._target.device)

    def compile_rules(self) -> None:
        following.warm_up()  # first, since `rules_compiled` checks only the sampler
        target = self._target
        sampler.warm_up(target.dtype, target.device, target.vocab_size)

    def scoring_tokens(self, guide: GuideSpec) -> int:
        return self.guides.labels(guide).slots(self.config.max_draft_tokens) + 1

    def require_adapter(self, name: str | None) -> None:
        self._target.adapter_number(name)

    def cancel(self, request_id: str) -> bool:
        self.collect()
        sequence = self.scheduler.find(request_id)
        if sequence:
            self._drop(sequence)
        return sequence is not None

    def holds(self, request_id: str) -> bool:
        return self.scheduler.find(request_id) is not None

    def cancel_all(self) -> None:
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
                answer = sequence.known_ids
                self._proposer.start(sequence.row, sequence.prompt, sequence.labels, answer)

    def launch(self) -> None:
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
        self._build_outputs()
        outputs, self._outputs = self._outputs, []
        return outputs

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
            row, prompt, begun = sequence.row, sequence.prompt, sequence.known_ids
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
        price = _price(min_probs, len(drafts.tokens))
        drafts, allowed = plan.guided(plan.with_labels(drafts), price)
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
        # A forward that only scores labels has no output yet.
        self._outputs += [each for each in outputs if each.tokens or each.result]
        self._record(collected, counts, outputs)

    def _record(self, collected: _Collected, counts: DraftCounts, outputs: list[Output]) -> None:
        """Publishes the step's record; updates the costs of steps and the value of drafts."""
        plan, decision, clock = collected.plan, collected.decision, collected.clock
        drafts, used = collected.drafts, collected.committed.used.tolist()
        pairs = zip(plan.emitting, drafts.sizes.tolist(), strict=True)
        drafts_of_answers = [size for sequence, size in pairs if sequence.scorer is None]
        emitted = {output.id: len(output.tokens) for output in outputs}
        # Tokens that guides forced before or after the step's own tokens.
        forced = sum(n - k for n, k in zip(emitted.values(), used, strict=True) if k)
        record = StepRecord(
            row_steps=len(drafts_of_answers),
            drafts=sum(size > 0 for size in drafts_of_answers),
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
        # The trees of labels are no drafts, and say nothing about the gain of drafts.
        if self._draft_budget.learns and len(drafts_of_answers) == len(plan.emitting):
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
    if min_probs is None or not len(min_probs) or not drafted:
        return 0.0
    return float(min_probs[min(drafted, len(min_probs)) - 1])
