"""Engines get rows out of a window, answer them, and end by their own or their machine's fault."""

import json
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.exceptions import ActorDiedError, RayError, RayTaskError

from tasc_engine import GenerationRequest, GenerationResult
from tasc_engine.errors import UnsupportedModel
from tasc_engine.request import Acceptance, Timings
from tasc_jobs.batch import answering
from tasc_jobs.batch import pool as pools
from tasc_jobs.batch.answering import Answering
from tasc_jobs.batch.errors import EngineFailed
from tasc_jobs.batch.pool import EngineSpec, Pool
from tasc_jobs.batch.window import Saved, Window
from tasc_jobs.batch.work import Row
from tasc_jobs.errors import ClusterError, JobError
from tasc_runtime.engine.builder import Pinned
from tasc_runtime.engine_settings import EngineSettings
from tasc_runtime.errors import ServiceError
from tasc_runtime.protocol import Answer, Call
from tasc_store import StoreUnreachable


def source(count: int, refused: frozenset[int] = frozenset()) -> Iterator[Row]:
    for i in range(count):
        yield Row(i, f"r{i}", "x", i + 1, None, "bad" if i in refused else None)


def test_only_so_many_rows_are_read_until_the_first_are_dropped() -> None:
    window = Window(source(10), 0, (), 4)
    assert window.read(100) == 4
    assert [row.ordinal for row in window.take(3)] == [0, 1, 2]
    assert window.save([Saved(1), Saved(2)]) == 2
    assert window.ready == 0
    window.save([Saved(0)])
    assert window.ready == 3
    assert window.read(100) == 0
    window.drop(3)
    assert (window.first, window.ready, window.read(100)) == (3, 0, 3)


def test_long_rows_fill_it_sooner() -> None:
    window = Window((Row(i, "", "x" * (30 << 20), 1) for i in range(9)), 0, (), 100)
    assert window.read(100) == 3


def test_rows_of_before_are_read_over_and_those_that_are_saved_are_not_handed_out() -> None:
    window = Window(source(6, frozenset({4})), 2, [Saved(3, tokens=7)], 10)
    window.read(100)
    assert [row.ordinal for row in window.take(10)] == [2, 5]
    assert sorted((s.ordinal, s.failed, s.tokens) for s in window.saved) == [
        (3, False, 7),
        (4, True, 0),
    ]


def test_what_was_lost_is_handed_out_first_but_not_what_was_saved_since() -> None:
    window = Window(source(6), 0, (), 10)
    window.read(100)
    window.take(4)
    window.save([Saved(0), Saved(1), Saved(2)])
    assert window.ready == 3
    window.again([1, 3])
    assert window.ready == 1
    window.save([Saved(3)])
    assert [row.ordinal for row in window.take(2)] == [1, 4]


@given(
    st.integers(0, 30),
    st.integers(1, 8),
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 31)), max_size=80),
)
def test_whatever_is_lost_on_the_way_each_row_is_dropped_once_and_in_order(
    count: int, most: int, moves: list[tuple[int, int]]
) -> None:
    window = Window(source(count), 0, (), most)
    out: list[int] = []
    held: list[int] = []

    def flush() -> None:
        ready = window.ready
        out.extend(row.ordinal for row in window.head(ready))
        window.drop(ready)

    for kind, number in moves:
        window.read(3)
        if kind == 0:
            held += [row.ordinal for row in window.take(number)]
        elif kind == 1 and held:
            window.save([Saved(held.pop(number % len(held)))])
        elif kind == 2 and held:
            window.again([held.pop(number % len(held))])
        elif kind == 3:
            saved = sorted(s.ordinal for s in window.saved)
            window.again(saved[number:])
        else:
            flush()
        assert window.size <= most
    while not window.empty:
        window.read(100)
        held += [row.ordinal for row in window.take(100)]
        window.save([Saved(ordinal) for ordinal in held])
        held = []
        flush()
    assert out == list(range(count))


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Pool:
    monkeypatch.setattr(pools.ray, "kill", lambda actor: None)
    spec = EngineSpec("url", "t", Pinned(1, None), EngineSettings(), None, "job", 0.0, 1.0)
    return Pool(spec, 1, 1.0, lambda rows: None)


def ended(pool: Pool, error: RayError, monkeypatch: pytest.MonkeyPatch, *, up: bool) -> JobError:
    """What comes of engines that end so, one after another."""

    def get(call: object) -> object:
        raise error

    monkeypatch.setattr(pools.ray, "get", get)
    window = Window(iter(()), 0, (), 1)
    for _ in range(20):
        pool._engines.append(engine := pools._Engine(None, ["call"], up=up))
        try:
            pool._hear(engine, "call", window)
        except JobError as found:
            return found
    pytest.fail("engines may end for ever")


def task_error(cause: Exception | None = None) -> RayTaskError:
    return RayTaskError("load", "why", cause or ValueError("no such model"))


@pytest.mark.parametrize(
    ("error", "up", "machines"),
    [
        (ActorDiedError(), False, True),
        (ActorDiedError(), True, False),
        (task_error(), False, True),
        (task_error(), True, False),
        (task_error(ServiceError("registered with another tokenizer")), False, False),
        (task_error(UnsupportedModel("int8 with outliers")), False, False),
        (task_error(StoreUnreachable("no Redis answers")), True, True),
    ],
)
def test_an_engine_that_never_comes_up_or_loses_the_store_is_nobodys_fault_but_its_machines(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, error: RayError, up: bool, machines: bool
) -> None:
    found = ended(pool, error, monkeypatch, up=up)
    assert isinstance(found, EngineFailed) == isinstance(found, ClusterError) == machines
    assert "without a row between" in str(found)


def test_a_cluster_without_a_node_is_at_fault(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools.ray, "nodes", lambda: [{"Alive": False}])
    pool._look_at = 0.0
    with pytest.raises(ClusterError, match="no node left"):
        pool._require_nodes()


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
