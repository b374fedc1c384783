"""The decoding engine: continuous batching with drafts, verified losslessly by the target.

For the same request the emitted tokens equal those of plain one-by-one greedy decoding with the
same model, whatever is drafted and whoever shares the batch. It knows no HTTP, no Ray, no store.
One thread owns an engine.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tasc_draft import SOURCES, Drafts, Proposer
from tasc_engine.accept import accept, count
from tasc_engine.config import EngineConfig
from tasc_engine.errors import QueueFull, RequestTooLong
from tasc_engine.layout import pack
from tasc_engine.request import Delta, GenerationRequest, GenerationResult
from tasc_engine.sequence import Sequence
from tasc_engine.stats import StepRecord
from tasc_engine.target import Target
from tasc_text import TaskTokenizer


@dataclass(frozen=True)
class _Plan:
    """Who takes part in a step and what each brings; those that emit may carry a draft."""

    sequences: list[Sequence]
    tokens: list[NDArray[np.int32]]
    emits: list[bool]
    prompt_tokens: int


class Engine:
    """One target, ``config.rows`` rows, requests in, deltas out.

    Args:
        on_step: Called with each step's record, on the engine's thread.
    """

    def __init__(
        self,
        target: Target,
        tokenizer: TaskTokenizer,
        proposer: Proposer,
        config: EngineConfig,
        on_step: Callable[[StepRecord], None] = lambda record: None,
    ) -> None:
        self.config = config
        self._target = target
        self._tokenizer = tokenizer
        self._proposer = proposer
        self._on_step = on_step
        self._waiting: deque[Sequence] = deque()
        self._active: dict[int, Sequence] = {}
        self._free = list(range(config.rows - 1, -1, -1))
        self._is_eos = np.zeros(target.vocab_size, bool)
        self._is_eos[[e for e in tokenizer.eos_ids if e < target.vocab_size]] = True

    @property
    def running(self) -> int:
        return len(self._active)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def cached_tokens(self) -> int:
        return sum(s.cached for s in self._active.values())

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request.

        Raises:
            RequestTooLong: Prompt and ``max_tokens`` do not fit ``max_model_len``.
            QueueFull: As many requests wait as may.
            ValueError: The engine holds a request of this id, or an id is outside the vocabulary.
        """
        self.require_fit(request)
        if any(s.request.id == request.id for s in self._held()):
            raise ValueError(f"request {request.id} is being answered; ids must differ")
        if self.waiting >= self.config.max_waiting + len(self._free):
            raise QueueFull(f"{self.waiting} requests wait already; try again later")
        self._waiting.append(Sequence.of(request, self._tokenizer))

    def require_fit(self, request: GenerationRequest) -> None:
        """Raise RequestTooLong, or ValueError for an id outside the vocabulary."""
        needed, limit = len(request.prompt) + request.max_tokens, self.config.max_model_len
        if needed > limit:
            raise RequestTooLong(
                f"prompt ({len(request.prompt)} tokens) and max_tokens ({request.max_tokens}) make "
                f"{needed}, a row holds {limit}; shorten the prompt or lower max_tokens"
            )
        if max(request.prompt) >= self._target.vocab_size or min(request.prompt) < 0:
            raise ValueError(f"request {request.id}: a prompt id is outside the vocabulary")

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

    def step(self) -> list[Delta]:
        """Advance every row by one verify forward; nothing happens when there is no request."""
        self._admit()
        plan = self._plan()
        if not plan.sequences:
            return []
        began = time.perf_counter()
        drafts = self._propose(plan)
        drafted = time.perf_counter()
        chosen = self._verify(plan, drafts)
        verified = time.perf_counter()
        deltas, kept, bonus = self._commit(plan, drafts, chosen)
        self._record(plan, drafts, kept, bonus, (began, drafted, verified))
        return deltas

    def generate(self, requests: Iterable[GenerationRequest]) -> Iterator[GenerationResult]:
        """Answer requests, refilling rows as they end; results come as they finish."""
        source = iter(requests)
        exhausted = False
        while not exhausted or self._waiting or self._active:
            while not exhausted and self.waiting < len(self._free):
                request = next(source, None)
                if request is None:
                    exhausted = True
                else:
                    self.submit(request)
            yield from (d.result for d in self.step() if d.result)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every row is either free or held by one request."""
        rows = sorted([*self._free, *self._active])
        assert rows == list(range(self.config.rows)), f"rows {rows} are not each owned once"
        assert all(s.row == row for row, s in self._active.items())
        assert all(s.cached <= self.config.max_model_len for s in self._active.values())

    def _held(self) -> Iterator[Sequence]:
        yield from (*self._waiting, *self._active.values())

    def _admit(self) -> None:
        while self._waiting and self._free:
            sequence = self._waiting.popleft()
            sequence.row = self._free.pop()
            sequence.admitted = time.monotonic()
            self._active[sequence.row] = sequence
            self._proposer.start(sequence.row, sequence.prompt)

    def _plan(self) -> _Plan:
        sequences = [self._active[row] for row in sorted(self._active)]
        tokens = [s.next_tokens(self.config.prefill_chunk) for s in sequences]
        emits = [
            s.prefilled + len(t) >= len(s.prompt) for s, t in zip(sequences, tokens, strict=True)
        ]
        prompt_tokens = sum(len(t) for s, t in zip(sequences, tokens, strict=True) if s.prefilling)
        return _Plan(sequences, tokens, emits, prompt_tokens)

    def _propose(self, plan: _Plan) -> Drafts:
        """Draft for the rows that emit, leaving room for the bonus token."""
        emitting = [s for s, emits in zip(plan.sequences, plan.emits, strict=True) if emits]
        rows = np.array([s.row for s in emitting], np.int32)
        budget = np.array([s.remaining - 1 if s.request.draft else 0 for s in emitting], np.int32)
        return self._proposer.propose(rows, budget)

    def _verify(self, plan: _Plan, drafts: Drafts) -> NDArray[np.int64]:
        """One forward over all tokens; the target's token behind each place that is looked at."""
        tokens, looked_at, place = list(plan.tokens), [0] * len(plan.tokens), 0
        for i, emits in enumerate(plan.emits):
            if emits:
                draft = drafts.tokens[drafts.offsets[place] : drafts.offsets[place + 1]]
                tokens[i] = np.concatenate([plan.tokens[i], draft])
                looked_at[i] = len(draft) + 1
                place += 1
        rows = [s.row for s in plan.sequences]
        starts = [s.cached for s in plan.sequences]
        return self._target.next_tokens(pack(rows, starts, tokens, looked_at, self._target.device))

    def _commit(
        self, plan: _Plan, drafts: Drafts, chosen: NDArray[np.int64]
    ) -> tuple[list[Delta], NDArray[np.int64], int]:
        """Give each row its tokens; returns deltas, kept draft tokens a row, bonus tokens."""
        starts, agreed, emitted = accept(chosen, drafts, self._is_eos)
        deltas: list[Delta] = []
        kept, bonus, place = agreed.copy(), 0, 0
        for sequence, tokens, emits in zip(plan.sequences, plan.tokens, plan.emits, strict=True):
            if sequence.prefilling:
                sequence.prefilled += len(tokens)
            if not emits:
                continue
            new = chosen[starts[place] : starts[place] + emitted[place]]
            size = int(drafts.offsets[place + 1] - drafts.offsets[place])
            used = sequence.emit(new.tolist(), size, int(agreed[place]))
            kept[place] = min(int(agreed[place]), used)
            bonus += used - int(kept[place])
            deltas.append(self._advance(sequence, new[:used]))
            place += 1
        return deltas, kept, bonus

    def _advance(self, sequence: Sequence, new: NDArray[np.int64]) -> Delta:
        reason = sequence.finish_reason(self._tokenizer.eos_ids)
        self._proposer.observe(sequence.row, new.astype(np.int32))
        if reason is not None:
            self._release(sequence)
        return sequence.delta(len(new), reason, self._tokenizer)

    def _release(self, sequence: Sequence) -> None:
        del self._active[sequence.row]
        self._free.append(sequence.row)
        self._proposer.finish(sequence.row)
        sequence.row = -1

    def _record(
        self, plan: _Plan, drafts: Drafts, kept: NDArray[np.int64], bonus: int, at: Seq[float]
    ) -> None:
        drafted, accepted = count(drafts, kept, len(SOURCES), self._proposer.max_depth)
        self._on_step(
            StepRecord(
                row_steps=sum(plan.emits),
                drafts=int((np.diff(drafts.offsets) > 0).sum()),
                drafted=drafted,
                accepted=accepted,
                bonus_tokens=bonus,
                prompt_tokens=plan.prompt_tokens,
                cached_tokens=self.cached_tokens,
                draft_seconds=at[1] - at[0],
                verify_seconds=at[2] - at[1],
            )
        )
