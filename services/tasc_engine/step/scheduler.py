"""Schedules requests: the queue, admission in order of arrival, and slots of the KV cache.

An admitted request gets a row and the slots of its longest answer, and keeps them until it ends. No
request is admitted before the first one in the queue.
"""

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
from msgspec.structs import replace

from tasc_engine.config import EngineConfig
from tasc_engine.errors import QueueFull
from tasc_engine.kv.allocator import KVAllocator
from tasc_engine.kv.cache import RowCache
from tasc_engine.kv.prefix_cache import PrefixCache
from tasc_engine.layout import Int32
from tasc_engine.sampling.accept import DraftCounts, moves
from tasc_engine.stats import StepClock
from tasc_engine.step.plan import Plan
from tasc_engine.step.sequence import Sequence
from tasc_engine.step.verify import Verified
from tasc_protocol import FinishReason, Output

NOT_NUMBERS = (
    "the target's logits are not numbers (NaN), or make all that is allowed impossible; load it in "
    "another dtype, and check its weights"
)
_SCORED_LOGITS = 1 << 24  # maximum number of prompt logits in one step: 64 MB in float32


@dataclass(frozen=True)
class Committed:
    """The tokens that a step added to the rows that may emit.

    Attributes:
        sequences: Sequences that could emit; ``row`` is -1 if the answer has ended.
        new: New tokens of each answer, including tokens that its guide forces after them.
        used: ``int32[m]``, number of tokens that each answer took from the step.
        reasons: Reason of each answer's end; None for an answer that goes on.
    """

    sequences: list[Sequence]
    new: list[list[int]]
    used: Int32
    reasons: list[FinishReason | None]

    def outputs(self, counts: DraftCounts) -> list[Output]:
        """Builds the output of each answer, with its text; see `AnswerBuilder.output`."""
        drafted, kept = counts.row_drafted.tolist(), counts.row_kept.tolist()
        rows = zip(self.sequences, self.reasons, drafted, kept, strict=True)
        return [_output(sequence, reason, d, k) for sequence, reason, d, k in rows]


def _output(sequence: Sequence, reason: FinishReason | None, drafted: int, kept: int) -> Output:
    if reason == "error":
        return sequence.answer.failed(sequence.guide_error or NOT_NUMBERS)
    sequence.answer.count_draft(drafted, kept)
    output, scorer = sequence.answer.output(reason), sequence.scorer
    if scorer is None or output.result is None:
        return output
    scores = scorer.scores()
    text = scorer.answer(scores)
    return replace(output, text=text, result=replace(output.result, text=text, scores=scores))


class Scheduler:
    """Requests that wait and requests that have a row.

    Args:
        vocab_size: Number of logits per token.

    Attributes:
        prefixes: Prefixes of prompts that are kept for later prompts.
    """

    def __init__(self, config: EngineConfig, cache: RowCache, vocab_size: int) -> None:
        self._config = config
        self._most_scored = _SCORED_LOGITS // vocab_size
        self._waiting: deque[Sequence] = deque()
        self._active: dict[int, Sequence] = {}
        self._by_id: dict[str, Sequence] = {}  # all requests that wait or have a row
        self._free = list(range(config.rows - 1, -1, -1))
        self._cache, self._slots = cache, KVAllocator(cache)
        self.prefixes = PrefixCache(cache, config.prefix_cache_bytes)

    @property
    def running(self) -> int:
        return len(self._active)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def free_rows(self) -> int:
        return len(self._free)

    @property
    def active(self) -> list[Sequence]:
        """Requests that have a row, by row."""
        return [self._active[row] for row in sorted(self._active)]

    @property
    def held(self) -> tuple[Sequence, ...]:
        """All requests, the waiting requests first."""
        return (*self._waiting, *self._active.values())

    @property
    def upcoming(self) -> list[Sequence]:
        """The next requests that get a row, at most one for each row."""
        return list(islice(self._waiting, self._config.rows))

    @property
    def cached_tokens(self) -> int:
        return sum(sequence.cached for sequence in self._active.values())

    @property
    def kv_usage(self) -> float:
        """Share of the KV cache's slots that requests hold."""
        return 1 - self._slots.free / self._slots.total

    @property
    def longest(self) -> int:
        """Maximum number of tokens of one request, prompt and answer together."""
        return min(self._config.max_model_len, self._slots.total)

    def submit(self, sequence: Sequence) -> None:
        """Queues a request.

        Raises:
            QueueFull: The maximum number of requests is waiting.
            ValueError: The request's id is in use.
        """
        if self.find(request_id := sequence.request.id):
            raise ValueError(f"request {request_id} is being answered; ids must differ")
        if self.waiting >= self._config.max_waiting + self.free_rows:
            raise QueueFull(f"{self.waiting} requests are already waiting; try again later")
        self._waiting.append(sequence)
        self._by_id[request_id] = sequence

    def find(self, request_id: str) -> Sequence | None:
        return self._by_id.get(request_id)

    def plan(self) -> Plan:
        """Admits requests that fit, and plans the tokens of each row for the next step."""
        admitted = list(self._admit())
        return Plan.of(self.active, self._config.prefill_chunk, admitted, self._most_scored)

    def commit(self, plan: Plan, verified: Verified, clock: StepClock) -> Committed:
        """Appends each row's tokens, and frees the rows of answers that have ended."""
        accepted = verified.accepted
        for sequence, size in zip(plan.sequences, plan.sizes.tolist(), strict=True):
            sequence.cached += size
        for sequence, scored in zip(plan.sequences, verified.prompt_logprobs, strict=False):
            sequence.answer.logprobs += scored
        known = [len(sequence.answer.tokens) for sequence in plan.emitting]
        used = self._emit(plan, verified)
        clock.lap()
        for sequence, taken in zip(plan.emitting, used.tolist(), strict=True):
            if taken and sequence.guide is not None:
                sequence.follow_guide(taken)
        clock.guide += clock.lap()
        answers = [sequence.answer for sequence in plan.emitting]
        new = [answer.tokens[n:] for answer, n in zip(answers, known, strict=True)]
        labels = iter(verified.label_logprobs)
        reasons = list[FinishReason | None]()
        for sequence, tokens in zip(plan.emitting, new, strict=True):
            if sequence.scorer is not None:
                reasons.append(sequence.read_labels(next(labels)))
            else:
                reasons.append(sequence.answer.finish_reason() if tokens else "error")
        for sequence, reason in zip(plan.emitting, reasons, strict=True):
            if reason is not None:
                self.release(sequence)
        # The nodes of label trees do not stay in the cache.
        starts = [-1 if sequence.scorer else sequence.kv_start for sequence in plan.emitting]
        kv_starts = np.array(starts, np.int64)
        self._cache.pending_moves = moves(accepted, kv_starts, plan.next_slots)
        return Committed(plan.emitting, new, used, reasons)

    def release(self, sequence: Sequence) -> None:
        """Removes a request, and frees its row and its slots."""
        del self._by_id[sequence.request.id]
        if sequence.row < 0:
            self._waiting.remove(sequence)
            return
        self._slots.leave(sequence)
        del self._active[sequence.row]
        self._free.append(sequence.row)
        sequence.row = sequence.kv_start = -1

    def check_integrity(self) -> None:
        """Raises AssertionError unless each row is free or held by one request that fits it."""
        active, longest = self._active, self._config.max_model_len
        rows = sorted([*self._free, *active])
        assert rows == list(range(self._config.rows)), f"rows {rows} are not each owned once"
        assert all(s.row == row for row, s in active.items())
        assert all(s.cached <= longest for s in active.values())
        assert all(s.num_prefix_cached <= s.cached for s in active.values())
        assert all(s.num_uncached_tokens > 0 for s in active.values())
        assert self._by_id == {s.request.id: s for s in self.held}
        self._slots.check_integrity()
        self.prefixes.check_integrity()

    def _emit(self, plan: Plan, verified: Verified) -> Int32:
        """Appends the accepted tokens of each row; returns the number that each answer took."""
        accepted = verified.accepted
        used = np.zeros(len(plan.emitting), np.int32)
        emitted = accepted.emitted.tolist()
        for i, (sequence, size) in enumerate(zip(plan.emitting, emitted, strict=True)):
            if not size:
                continue
            if sequence.scorer is not None:
                if not sequence.scorer.steps:  # keep the shared prefix
                    self._leave_prefix(sequence)
                continue
            if not sequence.answer.first_token:  # keep the shared prefix
                self._leave_prefix(sequence)
            tokens = accepted.tokens[i, :size].tolist()
            used[i] = sequence.emit(tokens, verified.logprobs[i])
        return used

    def _leave_prefix(self, sequence: Sequence) -> None:
        start, kept = sequence.kv_start, sequence.num_prefix_cached
        self.prefixes.leave(start, sequence.prompt, kept, sequence.adapter)

    def _admit(self) -> Iterator[Sequence]:
        while self._waiting and self._free:
            sequence = self._waiting[0]
            if not self._slots.enter(sequence):
                return
            self._waiting.popleft()
            sequence.row = row = self._free.pop()
            sequence.answer.admitted = time.monotonic()
            self._active[row] = sequence
            if not sequence.request.wants_prompt_logprobs:  # these need every token's forward
                start = sequence.kv_start
                copied = self.prefixes.enter(start, sequence.prompt, sequence.adapter)
                sequence.num_prefix_cached = sequence.cached = copied
            yield sequence
