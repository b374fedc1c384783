"""Schedules requests: the queue, admission in order of arrival, and slots of the KV cache.

An admitted request gets a row and the slots of its longest answer, and keeps them until it ends. No
request is admitted before the first one in the queue.
"""

import time
from collections import deque
from collections.abc import Iterator

from tasc_engine.config import EngineConfig
from tasc_engine.errors import QueueFull
from tasc_engine.kv.allocator import KVAllocator
from tasc_engine.kv.cache import RowCache
from tasc_engine.kv.prefix_cache import PrefixCache
from tasc_engine.layout import Int64
from tasc_engine.step.plan import Plan, Sequence

_SCORED_LOGITS = 1 << 24  # maximum logits of prompts in one step: 64 MB in float32


class Scheduler:
    """Requests that wait and requests that have a row.

    Args:
        vocab_size: Number of logits of a place.

    Attributes:
        prefixes: Prefixes of prompts that are kept for later ones.
    """

    def __init__(self, config: EngineConfig, cache: RowCache, vocab_size: int) -> None:
        self._config = config
        self._most_scored = _SCORED_LOGITS // vocab_size
        self._waiting: deque[Sequence] = deque()
        self._active: dict[int, Sequence] = {}
        self._free = list(range(config.rows - 1, -1, -1))
        self._slots = KVAllocator(cache)
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
        """All requests, the waiting ones first."""
        return (*self._waiting, *self._active.values())

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

    def require_free(self, request_id: str) -> None:
        """Raises QueueFull if the queue is full, ValueError if the id is in use."""
        if self.find(request_id):
            raise ValueError(f"request {request_id} is being answered; ids must differ")
        if self.waiting >= self._config.max_waiting + self.free_rows:
            raise QueueFull(f"{self.waiting} requests wait already; try again later")

    def submit(self, sequence: Sequence) -> None:
        self._waiting.append(sequence)

    def find(self, request_id: str) -> Sequence | None:
        return next((s for s in self.held if s.request.id == request_id), None)

    def plan(self, moves: Int64) -> Plan:
        """Admits requests that fit, and plans the tokens of each row for the next step.

        Args:
            moves: See `KVAllocator.enter`.
        """
        admitted = list(self._admit(moves))
        return Plan.of(self.active, self._config.prefill_chunk, admitted, self._most_scored)

    def keep_prompt(self, sequence: Sequence) -> None:
        """Keeps the prefix that the prompt of a prefilled row shares with others."""
        self.prefixes.leave(sequence.first, sequence.prompt, sequence.entered, sequence.adapter)

    def release(self, sequence: Sequence) -> None:
        """Removes a request, and frees its row and its slots."""
        if sequence.row < 0:
            self._waiting.remove(sequence)
            return
        self._slots.leave(sequence)
        del self._active[sequence.row]
        self._free.append(sequence.row)
        sequence.row = sequence.first = -1

    def check_integrity(self, moves: Int64) -> None:
        """Raises AssertionError unless each row is free or held by one request that fits it."""
        active, longest = self._active, self._config.max_model_len
        rows = sorted([*self._free, *active])
        assert rows == list(range(self._config.rows)), f"rows {rows} are not each owned once"
        assert all(s.row == row for row, s in active.items())
        assert all(s.cached <= longest for s in active.values())
        assert all(s.entered <= s.cached and s.behind > 0 for s in active.values())
        held = [range(s.first, s.first + s.needs) for s in active.values()]
        moved = moves.ravel().tolist()
        assert all(any(p in own for own in held) for p in moved), f"{moved} move, {held} are held"
        self._slots.check_integrity()
        self.prefixes.check_integrity()

    def _admit(self, moves: Int64) -> Iterator[Sequence]:
        while self._waiting and self._free:
            sequence = self._waiting[0]
            if not self._slots.enter(sequence, moves):
                return
            self._waiting.popleft()
            sequence.row = row = self._free.pop()
            sequence.admitted = time.monotonic()
            self._active[row] = sequence
            if not sequence.request.wants_prompt_logprobs:  # these need a forward of every token
                entered = self.prefixes.enter(sequence.first, sequence.prompt, sequence.adapter)
                sequence.entered = sequence.cached = entered
            yield sequence
