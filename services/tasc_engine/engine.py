"""The decoding engine: continuous batching with drafts, verified losslessly by the target.

For the same request the emitted tokens equal those of plain one-by-one decoding by the request's
own rule with the same model, whatever is drafted and whoever shares the batch. It knows no HTTP, no
Ray, no store. One thread owns an engine.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from tasc_draft import Drafts, Proposer
from tasc_engine.config import EngineConfig
from tasc_engine.drafting.safe_proposer import SafeProposer, most_tokens
from tasc_engine.errors import OutOfMemory, QueueFull, RequestTooLong
from tasc_engine.guided import Guide, Guides
from tasc_engine.kv.allocator import KVAllocator
from tasc_engine.kv.prefix_cache import PrefixCache
from tasc_engine.model.hidden_states import HiddenStateRequest
from tasc_engine.model.target import Target
from tasc_engine.request import Delta, GenerationRequest, GenerationResult
from tasc_engine.sampling import sampler
from tasc_engine.sampling.parameters import TokenLogprob
from tasc_engine.sampling.sampler import Sampler
from tasc_engine.stats import StepRecord
from tasc_engine.step.cost import StepCosts
from tasc_engine.step.draft_budget import DraftBudget, Spent
from tasc_engine.step.plan import Plan, Sequence
from tasc_engine.step.verify import Accepted, Verifier, accept, record_of, warm_up
from tasc_text import TaskTokenizer

NOT_NUMBERS = (
    "the target's logits are not numbers (NaN), or make all that is allowed impossible; load it in "
    "another dtype, and check its weights"
)


class Engine:
    """One target, ``config.rows`` rows, requests in, deltas out.

    Args:
        on_step: Called with each step's record, on the engine's thread.
        costs: What steps cost here, so that drafts are made where they pay; without, always.

    Attributes:
        guides: Makes guides of what requests ask for; of any thread.
    """

    def __init__(
        self,
        target: Target,
        tokenizer: TaskTokenizer,
        proposer: Proposer,
        config: EngineConfig,
        on_step: Callable[[StepRecord], None] = lambda record: None,
        costs: StepCosts | None = None,
    ) -> None:
        self.config = config
        self._target = target
        target.keep_hidden_states(HiddenStateRequest.of(proposer))
        self._tokenizer = tokenizer
        self._proposer = SafeProposer(proposer, target.vocab_size)
        self._on_step = on_step
        self._waiting: deque[Sequence] = deque()
        self._active: dict[int, Sequence] = {}
        self._free = list(range(config.rows - 1, -1, -1))
        self._is_eos = np.zeros(target.vocab_size, bool)
        self._is_eos[[e for e in tokenizer.eos_ids if e < target.vocab_size]] = True
        self._places = KVAllocator(target.cache)
        self._prefixes = PrefixCache(target.cache, config.prefix_cache_bytes)
        self._chunk, self._most_drafts = config.prefill_chunk, config.max_draft_tokens
        self.guides = Guides(tokenizer, target.vocab_size)
        self._sampler = Sampler(config.rows, config.max_model_len, target.vocab_size)
        self._verifier = Verifier(self._sampler)
        self._draft_budget = DraftBudget(costs, self._most_of_step(proposer))
        target.warm_up()
        warm_up()

    @property
    def running(self) -> int:
        return len(self._active)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def cached_tokens(self) -> int:
        return sum(s.cached for s in self._active.values())

    @property
    def kv_usage(self) -> float:
        """Part of the KV cache that is given away; the rest is what waiting requests need."""
        return 1 - self._places.free / self._places.total

    @property
    def vocab_size(self) -> int:
        return self._target.vocab_size

    @property
    def longest(self) -> int:
        """Most tokens of one request, prompt and answer together."""
        return min(self.config.max_model_len, self._places.total)

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
        if any(s.request.id == request.id for s in self._held()):
            raise ValueError(f"request {request.id} is being answered; ids must differ")
        if self.waiting >= self.config.max_waiting + len(self._free):
            raise QueueFull(f"{self.waiting} requests wait already; try again later")
        if request.guide and guide is None:
            guide = self.guides.of(request.guide, request.max_tokens)
        adapter = self._target.adapter_number(request.adapter)
        self._waiting.append(Sequence.of(request, self._tokenizer, guide, adapter))

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
        plain = request.sampling.plain and request.guide is None and request.logprobs is None
        return not (plain or sampler.is_warm(self._target.dtype, self._target.device))

    def compile_rules(self) -> None:
        """Compile all rules but the plain one, on any thread: seconds, once on a machine.

        Else the first request that has one waits for it, and all that share the batch.
        """
        sampler.warm_up(self._target.dtype, self._target.device)

    def cancel(self, request_id: str) -> bool:
        """Drop a request wherever it is; its row is free for the next step."""
        for sequence in self._held():
            if sequence.request.id == request_id:
                if sequence.row < 0:
                    self._waiting.remove(sequence)
                else:
                    self._release(sequence)
                return True
        return False

    def cancel_all(self) -> None:
        """Drop every request."""
        for sequence in tuple(self._held()):
            self.cancel(sequence.request.id)

    def draft_by(self, proposer: Proposer) -> None:
        """Draft by another proposer, which has no rows yet; answers go on as they would."""
        self._target.keep_hidden_states(HiddenStateRequest.of(proposer))
        self._proposer.use(proposer)
        self._draft_budget.begin_again(self._most_of_step(proposer))
        for row, sequence in self._active.items():
            self._proposer.start(row, sequence.prompt, np.array(sequence.answer, np.int32))

    def step(self) -> list[Delta]:
        """Advance all rows by one verify forward; does nothing when there is no request."""
        self._target.keep_hidden_states(self._proposer.hidden_state_request)
        self._admit()
        plan = Plan.of([self._active[row] for row in sorted(self._active)], self._chunk)
        if not plan.sequences:
            return []
        budget = plan.budget(self._most_drafts)
        wanted, least = bool(budget.any()), None
        if wanted:
            least = self._draft_budget.least(len(plan.emitting), len(plan.tokens), plan.context)
        began = time.perf_counter()
        drafts = self._proposer.propose(plan.emitting_rows, budget, least)
        drafted = time.perf_counter()
        drafts, allowed = plan.guided(drafts)
        guided = time.perf_counter()
        try:
            verified = self._verifier.verify(self._target, plan, drafts, allowed)
            chosen, ended = verified.target_tokens, time.perf_counter()
            accepted = accept(chosen, verified.drafts, plan.room(), plan.ends(), self._is_eos)
            self._proposer.keep(plan, verified.drafts, accepted, self._target.hidden_states)
            told = verified.logprobs(plan, accepted)
        except OutOfMemory as error:
            self._verifier.forget_moves_if(error.moved)
            return self._give_up_on_largest(plan, error)
        deltas, used, forced = self._commit(plan, accepted, verified.drafts, told)
        self._verifier.keep(plan, accepted, [s.first for s in plan.emitting])
        seconds = drafted - began, guided - drafted, ended - guided
        record = record_of(
            plan, verified.drafts, accepted, used, forced, seconds,
            positions=self._proposer.max_depth, cached_tokens=self.cached_tokens,
            paused=wanted and self._draft_budget.paused,
            draft_failures=self._proposer.new_failures(),
        )  # fmt: skip
        self._on_step(record)
        if wanted:
            self._draft_budget.learn(Spent.of(plan, record))
        return deltas

    def generate(
        self, requests: Iterable[GenerationRequest], stopped: Callable[[], bool] = lambda: False
    ) -> Iterator[GenerationResult]:
        """Answer requests, refilling rows as they end; results come as they finish.

        Args:
            stopped: Asked before each step whether to end; what runs then stays in the engine.
        """
        source = iter(requests)
        exhausted = False
        while (not exhausted or self._waiting or self._active) and not stopped():
            while not exhausted and self.waiting < len(self._free):
                request = next(source, None)
                if request is None:
                    exhausted = True
                else:
                    self.submit(request)
            yield from (d.result for d in self.step() if d.result)

    def check_integrity(self) -> None:
        """Raise AssertionError unless each row is free or held by one request that fits it."""
        active, longest = self._active, self.config.max_model_len
        rows = sorted([*self._free, *active])
        assert rows == list(range(self.config.rows)), f"rows {rows} are not each owned once"
        assert all(s.row == row for row, s in active.items())
        assert all(s.cached <= longest for s in active.values())
        assert all(s.entered <= s.cached and s.behind > 0 for s in active.values())
        held = [range(s.first, s.first + s.needs) for s in active.values()]
        moved = self._verifier.moves.ravel().tolist()
        assert all(any(p in own for own in held) for p in moved), f"{moved} move, {held} are held"
        self._places.check_integrity()
        self._prefixes.check_integrity()

    def _most_of_step(self, proposer: Proposer) -> int:
        """Most draft tokens of one step."""
        return self.config.rows * min(self._most_drafts, most_tokens(proposer))

    def _held(self) -> Iterator[Sequence]:
        yield from (*self._waiting, *self._active.values())

    def _admit(self) -> None:
        while self._waiting and self._free:
            sequence = self._waiting[0]
            if not self._places.enter(sequence, self._verifier.moves):
                return
            self._waiting.popleft()
            sequence.row = row = self._free.pop()
            sequence.admitted = time.monotonic()
            self._active[row] = sequence
            entered = self._prefixes.enter(sequence.first, sequence.prompt, sequence.adapter)
            sequence.entered = sequence.cached = entered
            self._proposer.start(row, sequence.prompt, sequence.committed_ids)
            self._sampler.start(
                row, sequence.prompt, sequence.request.sampling, sequence.committed_ids
            )

    def _commit(
        self, plan: Plan, accepted: Accepted, drafts: Drafts, told: list[list[TokenLogprob]]
    ) -> tuple[list[Delta], NDArray[np.int32], int]:
        """Give each row its tokens, and what is told of them.

        Returns:
            Deltas, how many tokens each answer took, and how many guides forced besides.
        """
        for sequence, size in zip(plan.sequences, np.diff(plan.offsets).tolist(), strict=True):
            sequence.cached += size
        sizes = np.diff(drafts.offsets).tolist()
        used = np.zeros(len(plan.emitting), np.int32)
        deltas, all_forced = [], 0
        for i, sequence in enumerate(plan.emitting):
            new = accepted.tokens[i, : accepted.emitted[i]]
            if not len(new):
                deltas.append(self._fail(sequence, sequence.stuck or NOT_NUMBERS))
                continue
            if not sequence.answer:
                self._prefixes.leave(
                    sequence.first, sequence.prompt, sequence.entered, sequence.adapter
                )
            used[i] = sequence.emit(new.tolist(), sizes[i], int(accepted.followed[i]), told[i])
            forced = sequence.follow_guide(int(used[i]))
            all_forced += forced
            deltas.append(self._advance(sequence, int(used[i]) + forced))
        return deltas, used, all_forced

    def _advance(self, sequence: Sequence, n: int) -> Delta:
        """Tell who follows an answer of its newest tokens, and what they make of it."""
        reason = sequence.finish_reason(self._tokenizer.eos_ids)
        new = np.array(sequence.answer[-n:], np.int32)
        self._proposer.observe(sequence.row, new)
        self._sampler.observe(sequence.row, new)
        if reason is not None:
            self._release(sequence)
        return sequence.delta(n, reason, self._tokenizer)

    def _give_up_on_largest(self, plan: Plan, error: OutOfMemory) -> list[Delta]:
        """A forward did not fit: end the request that brought most tokens, keep the others."""
        sizes = np.diff(plan.offsets) + plan.starts / self.config.max_model_len
        return [self._fail(plan.sequences[int(sizes.argmax())], str(error))]

    def _fail(self, sequence: Sequence, error: str) -> Delta:
        delta = sequence.failed(error, self._tokenizer)
        self._release(sequence)
        return delta

    def _release(self, sequence: Sequence) -> None:
        self._verifier.forget(sequence.first, sequence.first + sequence.needs)
        self._places.leave(sequence)
        del self._active[sequence.row]
        self._free.append(sequence.row)
        self._proposer.finish(sequence.row)
        self._sampler.finish(sequence.row)
        sequence.row = sequence.first = -1
