"""An engine is kept full, records are written once they are whole, and an absent Redis is borne."""

import json
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from tasc_engine import GenerationRequest, GenerationResult
from tasc_engine.request import Acceptance, Timings
from tasc_jobs.batch import answering
from tasc_jobs.batch.answering import Answering
from tasc_jobs.batch.work import Row
from tasc_serve.calls import Answer, Call
from tasc_store import StoreUnreachable

ROWS = 2


@dataclass
class Engine:
    """Ends one request a step, the last submitted first."""

    config: Any = field(default_factory=lambda: SimpleNamespace(rows=ROWS))
    held: deque[GenerationRequest] = field(default_factory=deque)

    @property
    def running(self) -> int:
        return min(ROWS, len(self.held))

    @property
    def waiting(self) -> int:
        return max(0, len(self.held) - ROWS)

    def submit(self, request: GenerationRequest) -> None:
        self.held.append(request)

    def step(self) -> list[Any]:
        request = self.held.pop()
        failed = "it broke" if 9 in request.prompt else None
        result = GenerationResult(
            request.id, (1, 2), "said", "error" if failed else "stop", 1,
            Timings(0, 0, 0), Acceptance((1,), (1,)), failed,
        )  # fmt: skip
        return [SimpleNamespace(result=result)]


@dataclass
class Worker:
    engine: Engine = field(default_factory=Engine)
    artifact: Any = None
    tokenizer: Any = field(default_factory=lambda: SimpleNamespace(eos_ids=()))

    def request(self, call: Call) -> GenerationRequest:
        if not call.prompt:
            raise ValueError("it has no prompt")
        return GenerationRequest(call.id, tuple(call.prompt), 4)


class Results:
    """A store that is away as often as it is told."""

    def __init__(self, away: int = 0) -> None:
        self.away, self.entries = away, dict[int, Any]()
        self.calls = 0

    def put(self, entries: Sequence[tuple[int, str]]) -> int:
        self.calls += 1
        if self.away:
            self.away -= 1
            raise StoreUnreachable("gone")
        for row, entry in entries:
            assert row not in self.entries
            self.entries[row] = json.loads(entry)
        return len(entries)


class Pairs:
    """Asks for two answers to each row."""

    def calls(self, row: Row, worker: Any) -> list[Call]:
        numbers = tuple(int(part) for part in row.payload.split())
        return [Call("any", numbers, templated=False)] * 2

    def content(self, row: Row, answers: Sequence[Answer], worker: Any) -> dict[str, Any]:
        return {"of": row.id, "texts": [a.result.text for a in answers]}


def row(ordinal: int, payload: str = "1") -> Row:
    return Row(ordinal, f"r{ordinal}", payload, ordinal + 1)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answering, "_PAUSE_S", 0.0)


def test_a_rows_record_is_made_of_all_its_answers() -> None:
    results = Results()
    engine = Answering(Worker(), Pairs(), results, 1.0)
    saved = engine.work([row(0)]) + engine.work([])
    assert results.entries == {
        0: {"content": {"of": "r0", "texts": ["said"] * 2}, "error": None, "tokens": 4, "steps": 2}
    }
    assert [(s.ordinal, s.failed, s.tokens, s.steps) for s in saved] == [(0, False, 4, 2)]


def test_rows_that_cannot_be_asked_or_that_fail_say_why() -> None:
    results = Results()
    rows = [row(0, ""), row(1, "x"), row(2, "9"), row(3)]
    engine = Answering(Worker(), Pairs(), results, 1.0)
    saved = engine.work(rows) + engine.work([])
    assert {s.ordinal: s.failed for s in saved} == {0: True, 1: True, 2: True, 3: False}
    errors = [results.entries[i]["error"] for i in range(4)]
    assert errors == ["it has no prompt", errors[1], "it broke", None]
    assert "invalid literal" in errors[1]
    assert [results.entries[i]["content"] is None for i in range(4)] == [True, True, True, False]


def test_it_comes_back_for_more_before_its_rows_are_all_done() -> None:
    worker = Worker()
    answers = Answering(worker, Pairs(), Results(), 1.0)
    answers.work([row(i) for i in range(20)])
    assert worker.engine.waiting == ROWS - 1
    answers.work([])
    assert not worker.engine.held


def test_a_row_that_it_has_already_is_not_begun_twice() -> None:
    worker = Worker()
    answers = Answering(worker, Pairs(), Results(), 1.0)
    rows = [row(i) for i in range(20)]
    answers.work(rows)
    held = len(worker.engine.held)
    answers.work(rows[:1])  # the oldest is the last to end
    assert len(worker.engine.held) < held
    answers.work([])


def test_results_wait_for_a_store_that_is_away_but_not_for_ever() -> None:
    results = Results(away=3)
    engine = Answering(Worker(), Pairs(), results, 60.0)
    saved = engine.work([row(0)]) + engine.work([])
    assert [s.ordinal for s in saved] == [0]
    assert results.calls == 4
    engine = Answering(Worker(), Pairs(), Results(away=1 << 30), 0.0)
    engine.work([row(0)])  # one of its two answers
    with pytest.raises(StoreUnreachable):
        engine.work([])


def test_a_lone_surrogate_in_a_message_harms_nobody() -> None:
    class Loud(Pairs):
        def calls(self, row: Row, worker: Any) -> list[Call]:
            raise ValueError("field '\ud800' is unknown")

    results = Results()
    Answering(Worker(), Loud(), results, 1.0).work([row(0)])
    assert results.entries[0]["error"] == "field '\ud800' is unknown"
