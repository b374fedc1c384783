"""Collects a share of a task's finished answers for the task's corpus, on a separate thread.

Answers never wait for the store: rows that the store does not accept in time are dropped and
counted.
"""

import threading
from collections import deque

from msgspec import structs

from tasc_protocol import GenerationResult, Request
from tasc_serve.metrics.replica_metrics import ReplicaMetrics
from tasc_serve.settings import CollectSettings
from tasc_serve.store_calls import RepeatedCall
from tasc_store import CollectedRow, CollectedRows
from tasc_store.corpus import MAX_COLLECTED
from tasc_text import Conversation

_JOIN_S = 5.0
# Request fields that may have any value. For a default answer (see `row_of`), all other fields must
# have their defaults.
_FREE = (
    *("id", "prompt", "templated", "max_tokens", "draft", "stream", "parameters", "seed"),
    *("prompt_index", "logprobs", "n", "prompts", "timeout_s", "committed_ids", "record_version"),
)
_OVERHEAD = 256  # approximate bytes of a row in addition to its characters


def row_of(asked: Request, request: Request, result: GenerationResult) -> CollectedRow | None:
    """Makes a row of a default answer; returns None for other answers.

    A default answer is decoded greedily, and was ended by the model or the task's own stop string.
    Its request is a chat that sets no rule, guide, adapter or stop string. Only the first of
    several equal answers (``n``) is a default answer.

    Args:
        asked: The request as the client sent it; its prompt becomes the input of the row.
        request: The same request with the task's values filled in.
    """
    own = (
        asked.templated
        and isinstance(asked.prompt, str)
        and result.finish_reason == "stop"
        and request.sampling.temperature == 0
        and asked.parameters.keys() <= {"temperature"}
        and asked == Request(**{name: getattr(asked, name) for name in _FREE})
    )
    if not own:
        return None
    try:
        return CollectedRow(str(asked.prompt), result.text)
    except ValueError:  # blank, or invalid Unicode, which a corpus refuses
        return None


class Collector:
    """Accepts answers on any thread, and stores them on a separate thread.

    Args:
        rows: The store of collected rows.
        takes_conversations: Whether the task has a chat template. Otherwise, only the input of a
            conversation is put into the task's template.
    """

    def __init__(
        self,
        rows: CollectedRows,
        settings: CollectSettings,
        metrics: ReplicaMetrics,
        takes_conversations: bool = False,
    ) -> None:
        self._rows, self._settings, self._metrics = rows, settings, metrics
        self._takes_conversations = takes_conversations
        self._due = 0.0
        self._buffer: deque[CollectedRow] = deque()
        self._held, self._lock = 0, threading.Lock()  # approximate bytes of the buffer
        self._flushing: RepeatedCall | None = None
        if settings.sample_rate:
            self._flushing = RepeatedCall(
                "storing answers", self._flush, settings.flush_interval_s, last=self._flush
            )

    def finished(self, asked: Request, request: Request, result: GenerationResult) -> None:
        """Notes the end of an answer; every n-th default answer is kept."""
        if not self._settings.sample_rate:
            return
        if isinstance(asked.prompt, Conversation) and not self._takes_conversations:
            asked = structs.replace(asked, prompt=asked.prompt.input)
        if (row := row_of(asked, request, result)) is None:
            return
        self._due += self._settings.sample_rate
        if self._due < 1:
            return
        self._due -= 1
        with self._lock:
            fits = self._held + _size(row) <= self._settings.max_buffer_bytes
            if fits:
                self._held += _size(row)
                self._buffer.append(row)
        if not fits:
            self._metrics.not_collected["full"].inc()

    def close(self) -> None:
        """Stores the buffered rows, if the store accepts them at once."""
        if self._flushing:
            self._flushing.close(_JOIN_S)

    def _flush(self) -> None:
        while batch := [self._buffer[i] for i in range(min(len(self._buffer), MAX_COLLECTED))]:
            settings = self._settings
            trimmed = self._rows.add(
                batch, max_rows=settings.max_rows, max_bytes=settings.max_bytes
            )
            with self._lock:
                self._held -= sum(_size(self._buffer.popleft()) for _ in batch)
            self._metrics.collected.inc(len(batch))
            self._metrics.not_collected["trimmed"].inc(trimmed)


def _size(row: CollectedRow) -> int:
    return len(row.input) + len(row.output) + _OVERHEAD
