"""Rows into saved records, with one engine that is kept full from one handful to the next.

A row's record goes to Redis as soon as its last answer ends, a few rows in one call. It knows no
Ray and reads no file; who gives it rows hears which are saved.
"""

import dataclasses
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tasc_engine import GenerationResult
from tasc_jobs.batch.window import Saved
from tasc_jobs.batch.work import Row, Strategy, named
from tasc_runtime.detokenizer import TokenTexts
from tasc_runtime.engine.builder import EngineBuilder
from tasc_runtime.protocol import Answer, Call
from tasc_store import JobResults, StoreError

_TURN_S = 1.0  # after so long, what is saved is told, whatever is still decoded
_SAVE_ROWS, _SAVE_S = 64, 0.5
_PAUSE_S = 0.1


@dataclass
class _Open:
    """A row some of whose answers are missing."""

    row: Row
    calls: Sequence[Call]
    answers: dict[int, Answer] = field(default_factory=dict)


class Answering:
    """Answers rows with a worker's engine.

    Args:
        results: Where records go.
        store_wait_s: Redis may be away so long, in seconds, before `work` raises.
    """

    def __init__(
        self, worker: EngineBuilder, strategy: Strategy, results: JobResults, store_wait_s: float
    ) -> None:
        self._builder, self._strategy, self._results = worker, strategy, results
        self._store_wait_s = store_wait_s
        self._open: dict[int, _Open] = {}
        self._unsaved: list[tuple[Saved, str]] = []
        self._told: list[Saved] = []
        self._tried = self._reached = time.monotonic()

    def work(self, rows: Sequence[Row]) -> list[Saved]:
        """Begin with these rows, and decode until there is room for more or a second has passed.

        Returns:
            Rows that were saved since the last call, of these and of earlier ones.

        Raises:
            StoreError: Redis was away for too long.
        """
        engine, ends = self._builder.engine, time.monotonic() + _TURN_S
        if not self._unsaved:
            self._tried = self._reached = time.monotonic()
        for row in rows:
            self._begin(row)
        while (engine.running or engine.waiting) and time.monotonic() < ends:
            for delta in engine.step():
                if delta.result:
                    self._ended(delta.result)
            self._save()
            if rows and engine.waiting < engine.config.rows:
                break
        while not self._save(at_once=True) and not engine.running and time.monotonic() < ends:
            time.sleep(_PAUSE_S)
        told, self._told = self._told, []
        return told

    def _begin(self, row: Row) -> None:
        if row.ordinal in self._open:
            return
        try:
            calls = named(row, self._strategy.calls(row, self._builder))
            requests = [self._builder.request(call) for call in calls]
        except ValueError as error:
            self._finish(row, str(error))
            return
        self._open[row.ordinal] = _Open(row, calls)
        for request in requests:
            self._builder.engine.submit(request)

    def _ended(self, result: GenerationResult) -> None:
        ordinal, number = map(int, result.id.split("."))
        found = self._open[ordinal]
        found.answers[number] = self._answer(found.calls[number], result)
        if len(found.answers) == len(found.calls):
            del self._open[ordinal]
            answers = [found.answers[i] for i in range(len(found.calls))]
            failed = [a.result.error for a in answers if a.result.error]
            self._finish(found.row, failed[0] if failed else None, answers)

    def _answer(self, call: Call, result: GenerationResult) -> Answer:
        ends = () if call.options.ignore_eos else self._builder.tokenizer.eos_ids
        tokens = TokenTexts(self._builder.tokenizer, ends).of(result.logprobs)
        artifact = self._builder.artifact
        version = artifact.version if artifact else None
        return Answer(dataclasses.replace(result, logprobs=(), index_version=version), tokens)

    def _finish(self, row: Row, error: str | None, answers: Sequence[Answer] = ()) -> None:
        content: dict[str, Any] | None = None
        if error is None:
            content = self._strategy.content(row, answers, self._builder)
        tokens = sum(len(a.result.tokens) for a in answers)
        steps = sum(a.result.acceptance.steps for a in answers)
        entry = {"content": content, "error": error, "tokens": tokens, "steps": steps}
        saved = Saved(row.ordinal, error is not None, tokens, steps)
        text = json.dumps(entry, ensure_ascii=False)
        # A lone surrogate, of a request that a message quotes, becomes JSON's own escape.
        text = text.encode(errors="backslashreplace").decode()
        self._unsaved.append((saved, text))

    def _save(self, at_once: bool = False) -> bool:
        """Write finished records, if they are many or old enough; whether none is left."""
        now = time.monotonic()
        if not self._unsaved:
            self._tried = self._reached = now
            return True
        due = len(self._unsaved) >= _SAVE_ROWS or now - self._tried >= _SAVE_S
        if not (due or at_once):
            return False
        self._tried = now
        try:
            self._results.put([(saved.ordinal, entry) for saved, entry in self._unsaved])
        except StoreError:
            if now - self._reached > self._store_wait_s:
                raise
            return False
        self._reached = time.monotonic()
        self._told += [saved for saved, _ in self._unsaved]
        self._unsaved = []
        return True
