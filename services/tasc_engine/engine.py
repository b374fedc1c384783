"""The decoding engine: continuous batching with drafts, verified losslessly by the target.

For the same request the emitted tokens equal those of plain one-by-one decoding by the request's
own rule with the same model, whatever is drafted and whoever shares the batch. It knows no HTTP, no
Ray, no store. One thread owns an engine.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tasc_draft import Drafts, Proposer
from tasc_engine.config import EngineConfig
from tasc_engine.drafting.safe_proposer import SafeProposer, most_tokens
from tasc_engine.errors import OutOfMemory, RequestTooLong
from tasc_engine.guided import Guide, Guides, following
from tasc_engine.layout import Int32
from tasc_engine.model.hidden_states import HiddenStateRequest
from tasc_engine.model.target import Target
from tasc_engine.request import GenerationRequest
from tasc_engine.sampling import sampler
from tasc_engine.sampling.row_parameters import Allowed
from tasc_engine.sampling.sampler import Sampler
from tasc_engine.stats import StepRecord
from tasc_engine.step.cost import StepCosts
from tasc_engine.step.draft_budget import DraftBudget, Spent
from tasc_engine.step.live_costs import LiveCosts
from tasc_engine.step.plan import Plan, Sequence
from tasc_engine.step.scheduler import Scheduler
from tasc_engine.step.verify import OwnTokens, Verified, Verifier, warm_up
from tasc_protocol import GenerationResult, Output
from tasc_text import TaskTokenizer

Float32 = NDArray[np.float32]

NOT_NUMBERS = (
    "the target's logits are not numbers (NaN), or make all that is allowed impossible; load it in "
    "another dtype, and check its weights"
)


@dataclass(frozen=True)
class Proposed:
    """A step's drafts, what guides allow of them, and whether and how long drafts were made.

    Attributes:
        may_draft: Whether a request allows drafts, has room for them and may gain by them.
    """

    drafts: Drafts
    allowed: Allowed | None
    may_draft: bool
    draft_seconds: float
    guide_seconds: float


@dataclass(frozen=True)
class Committed:
    """What a step gave to requests.

    Attributes:
        used: ``int32[m]`` tokens that each answer took.
        forced: Tokens that guides forced in front of these or behind them.
        guide_seconds: Time that guides took to follow the answers.
    """

    outputs: list[Output]
    used: Int32
    forced: int
    guide_seconds: float


class Engine:
    """One target, ``config.rows`` rows, requests in, outputs out.

    Args:
        on_step: Called with each step's record, on the engine's thread.
        costs: What steps cost here, so that drafts are made where they pay; without, always.
        on_costs: Called with costs that real steps have corrected for long, on the engine's thread.

    Attributes:
        guides: Makes guides of what requests ask for; of any thread.
        scheduler: Knows which requests wait and which have a row.
        verifier: Runs the target's forwards, and knows what moves in the cache with the next one.
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
        target.keep_hidden_states(HiddenStateRequest.of(proposer))
        is_eos = np.zeros(target.vocab_size, bool)
        is_eos[[e for e in tokenizer.eos_ids if e < target.vocab_size]] = True
        self.scheduler = Scheduler(config, target.cache, target.vocab_size)
        self._proposer = SafeProposer(proposer, target.vocab_size)
        live = LiveCosts(costs, on_costs) if costs else None
        self._draft_budget = DraftBudget(live, self._most_of_step(proposer))
        self._sampler = Sampler(config.rows, config.max_model_len, target.vocab_size)
        self.verifier = Verifier(target, self._sampler, is_eos)
        target.warm_up()
        warm_up()

    @property
    def running(self) -> int:
        return self.scheduler.running

    @property
    def waiting(self) -> int:
        return self.scheduler.waiting

    @property
    def cached_tokens(self) -> int:
        return self.scheduler.cached_tokens

    @property
    def kv_usage(self) -> float:
        """Part of the KV cache that is given away; the rest is what waiting requests need."""
        return self.scheduler.kv_usage

    @property
    def vocab_size(self) -> int:
        return self._target.vocab_size

    @property
    def lean(self) -> bool:
        """Whether this project's own forward runs the model, not the code of transformers."""
        return self._target.decoder is not None

    @property
    def longest(self) -> int:
        """Most tokens of one request, prompt and answer together."""
        return self.scheduler.longest

    def submit(self, request: GenerationRequest, guide: Guide | None = None) -> None:
        """Queue a request.

        Args:
            guide: What `guides` made of the request's guide on another thread; else made here.

        Raises:
            RequestTooLong: Prompt and ``max_tokens`` do not fit ``max_model_len``.
            GuideError: Its guide cannot be followed.
            QueueFull: As many requests wait as may.
            ValueError: The engine holds a request of this id, an id is outside the vocabulary, or
                there is no such adapter.
        """
        self.require_fit(request)
        self.scheduler.require_free(request.id)
        if guide is None:
            guide = self.guides.for_request(request)
        adapter = self._target.adapter_number(request.adapter)
        self.scheduler.submit(Sequence.of(request, self._tokenizer, guide, adapter))

    def require_fit(self, request: GenerationRequest) -> None:
        """Raise RequestTooLong, or ValueError for a token id or an adapter that does not exist."""
        needed = len(request.prompt) + request.max_tokens
        if needed > self.longest:
            raise RequestTooLong(
                f"prompt ({len(request.prompt)} tokens) and max_tokens ({request.max_tokens}) "
                f"make {needed}, a row holds {self.longest} (max_model_len, kv_cache_bytes); "
                "shorten the prompt or lower max_tokens"
            )
        request.require_ids(self.vocab_size)
        self._target.adapter_number(request.adapter)

    def waits_to_compile(self, request: GenerationRequest) -> bool:
        """Whether a request needs what `compile_rules` compiles, and nobody has called it yet."""
        guided = request.guide is not None or request.min_tokens > 0
        plain = request.sampling.plain and not guided and request.logprobs is None
        return not (plain or sampler.is_warm(self._target.dtype, self._target.device))

    def compile_rules(self) -> None:
        """Compile all rules but the plain one, on any thread: seconds, once on a machine.

        Else the first request that has one waits for it, and all that share the batch.
        """
        following.warm_up()  # first, since `waits_to_compile` looks at the other
        sampler.warm_up(self._target.dtype, self._target.device)

    def cancel(self, request_id: str) -> bool:
        """Drop a request wherever it is; its row is free for the next step."""
        sequence = self.scheduler.find(request_id)
        if sequence:
            self._release(sequence)
        return sequence is not None

    def cancel_all(self) -> None:
        """Drop every request."""
        for sequence in self.scheduler.held:
            self._release(sequence)

    def draft_by(self, proposer: Proposer) -> None:
        """Draft by another proposer, which has no rows yet; answers go on as they would."""
        self._target.keep_hidden_states(HiddenStateRequest.of(proposer))
        self._proposer.use(proposer)
        self._draft_budget.begin_again(self._most_of_step(proposer))
        for sequence in self.scheduler.active:
            if sequence.request.draft:
                answer = sequence.answer_ids
                self._proposer.start(sequence.row, sequence.prompt, sequence.labels, answer)

    def step(self) -> list[Output]:
        """Advance all rows by one verify forward; does nothing when there is no request."""
        plan = self._plan()
        if not plan.sequences:
            return []
        proposed = self._propose(plan)
        try:
            verified = self.verifier.verify(plan, proposed.drafts, proposed.allowed)
        except OutOfMemory as error:
            return self._give_up_on_largest(plan, error)
        committed = self._commit(plan, verified)
        self._record(plan, proposed, verified, committed)
        return committed.outputs

    def generate(
        self, requests: Iterable[GenerationRequest], stopped: Callable[[], bool] = lambda: False
    ) -> Iterator[GenerationResult]:
        """Answer requests, refilling rows as they end; results come as they finish.

        Args:
            stopped: Asked before each step whether to end; what runs then stays in the engine.
        """
        source = iter(requests)
        exhausted = False
        while (not exhausted or self.waiting or self.running) and not stopped():
            while not exhausted and self.waiting < self.scheduler.free_rows:
                request = next(source, None)
                if request is None:
                    exhausted = True
                else:
                    self.submit(request)
            yield from (output.result for output in self.step() if output.result)

    def check_integrity(self) -> None:
        """Raise AssertionError unless each row is free or held by one request that fits it."""
        self.scheduler.check_integrity(self.verifier.moves)

    def _most_of_step(self, proposer: Proposer) -> int:
        """Most draft tokens of one step."""
        return self.config.rows * min(self.config.max_draft_tokens, most_tokens(proposer))

    def _plan(self) -> Plan:
        """Admit waiting requests, and plan what all rows bring to the step."""
        self._target.keep_hidden_states(self._proposer.hidden_state_request)
        plan = self.scheduler.plan(self.verifier.moves)
        for sequence in plan.admitted:
            row, prompt, begun = sequence.row, sequence.prompt, sequence.answer_ids
            if sequence.request.draft:
                self._proposer.start(row, prompt, sequence.labels, begun)
            self._sampler.start(row, prompt, sequence.request.sampling, begun)
        return plan

    def _propose(self, plan: Plan) -> Proposed:
        """Drafts that are worth their time, without what guides forbid."""
        budget, least = plan.budget(self.config.max_draft_tokens), None
        if may_draft := bool(budget.any()):
            shape = len(plan.emitting), len(plan.tokens), plan.context
            least = self._draft_budget.min_probs(*shape, plan.reads)
        began = time.perf_counter()
        drafts = self._proposer.propose(plan.emitting_rows, budget, least)
        drafted = time.perf_counter()
        drafts, allowed = plan.guided(drafts, _price(least, len(drafts.tokens)))
        guided = time.perf_counter()
        return Proposed(drafts, allowed, may_draft, drafted - began, guided - drafted)

    def _commit(self, plan: Plan, verified: Verified) -> Committed:
        """Give each row its tokens, and end answers that are complete."""
        accepted = verified.accepted
        self._proposer.keep(plan, verified.drafts, accepted, self._target.hidden_states)
        for sequence, size in zip(plan.sequences, plan.sizes.tolist(), strict=True):
            sequence.cached += size
        for sequence, logprobs in zip(plan.sequences, verified.prompt_logprobs, strict=False):
            sequence.logprobs += logprobs
        own = OwnTokens(verified.drafts)
        used = np.zeros(len(plan.emitting), np.int32)
        outputs, all_forced, guide_seconds = [], 0, 0.0
        for i, sequence in enumerate(plan.emitting):
            new, followed = accepted.tokens[i, : accepted.emitted[i]], int(accepted.followed[i])
            if not len(new):
                outputs.append(self._fail(sequence, sequence.stuck or NOT_NUMBERS))
                continue
            if not sequence.first_token:
                self.scheduler.keep_prompt(sequence)
            known = len(sequence.answer)
            used[i] = sequence.emit(new.tolist(), verified.logprobs[i])
            path = accepted.path[i, : min(followed, int(used[i]))]
            sequence.count_draft(own.drafted[i], own.on_path(i, path))
            if sequence.guide is not None:
                began = time.perf_counter()
                sequence.follow_guide(int(used[i]))
                guide_seconds += time.perf_counter() - began
            all_forced += len(sequence.answer) - sequence.sent - int(used[i])
            outputs.append(self._advance(sequence, known))
        self.verifier.keep(plan, accepted)
        return Committed(outputs, used, all_forced, guide_seconds)

    def _record(
        self, plan: Plan, proposed: Proposed, verified: Verified, committed: Committed
    ) -> None:
        """Publish what the step did, and learn from it what steps cost and drafts are worth."""
        record = verified.record(
            plan,
            committed.used,
            self._proposer.max_depth,
            cached_tokens=self.cached_tokens,
            forced_tokens=committed.forced,
            draft_seconds=proposed.draft_seconds,
            guide_seconds=proposed.guide_seconds + committed.guide_seconds,
            draft_failures=self._proposer.new_failures(),
            paused=proposed.may_draft and self._draft_budget.paused,
            cost_error=self._draft_budget.cost_error,
        )
        self._on_step(record)
        if self._draft_budget.learns:
            spent = Spent.of(plan, record)
            self._draft_budget.time(spent)
            if proposed.may_draft:
                self._draft_budget.learn(spent)

    def _advance(self, sequence: Sequence, known: int) -> Output:
        """Give the answer's tokens from ``known`` on to proposer and sampler; return its output."""
        reason = sequence.finish_reason(self._tokenizer.eos_ids)
        new = np.array(sequence.answer[known:], np.int32)
        self._proposer.observe(sequence.row, new)
        self._sampler.observe(sequence.row, new)
        if reason is not None:
            self._release(sequence)
        return sequence.output(reason, self._tokenizer)

    def _give_up_on_largest(self, plan: Plan, error: OutOfMemory) -> list[Output]:
        """A forward did not fit: end the request that brought most tokens, keep the others."""
        sizes = plan.sizes + plan.starts / self.config.max_model_len
        return [self._fail(plan.sequences[int(sizes.argmax())], str(error))]

    def _fail(self, sequence: Sequence, error: str) -> Output:
        delta = sequence.failed(error, self._tokenizer)
        self._release(sequence)
        return delta

    def _release(self, sequence: Sequence) -> None:
        if (row := sequence.row) >= 0:
            self.verifier.forget(sequence.first, sequence.first + sequence.needs)
            self._proposer.finish(row)
            self._sampler.finish(row)
        self.scheduler.release(sequence)


def _price(least: Float32 | None, drafted: int) -> float:
    """The probability at which the last of a step's draft tokens is worth its cost."""
    return 0.0 if least is None or not drafted else float(least[min(drafted, len(least)) - 1])
