"""Tests that rows with equal payloads are sent once, and end with their own records."""

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.exceptions import ActorDiedError

from tasc_jobs.batch import engines
from tasc_jobs.batch.engines import EngineSpec, Pool, ReorderBuffer
from tasc_jobs.batch.generate import RowAnswers
from tasc_jobs.batch.repeats import _ENTRY_BYTES, Repeats
from tasc_jobs.batch.work import JobReport, Record, Row, Totals
from tasc_jobs.worker.lines import LineAnswers
from tasc_protocol import Request, Scoring
from tasc_protocol.sampling import SamplingDefaults
from tasc_runtime.engine.versions import Pinned
from tasc_runtime.engine_settings import EngineSettings
from tasc_serve.settings import LimitSettings
from tasc_store import TaskRecord

ENOUGH = 1 << 20


def rows(payloads: Iterable[str], refused: Sequence[int] = ()) -> list[Row]:
    return [
        Row(i, f"r{i}", said, i + 1, f"f{i}", "no text" if i in refused else None)
        for i, said in enumerate(payloads)
    ]


def buffer_of(
    payloads: Iterable[str], max_bytes: int = ENOUGH, **more: object
) -> tuple[ReorderBuffer, list[Row]]:
    given = rows(payloads)
    return ReorderBuffer(iter(given), repeats=Repeats(max_bytes), **more), given


def right(row: Row) -> Record:
    """The record of a row that an engine answers."""
    return Record.of(row, {"of": row.payload, "tokens": [1, 2]}, None, 2, 1)


def failed(row: Row) -> Record:
    return Record.of(row, None, "it broke")


def ordinals(found: Iterable[Row | Record]) -> list[int]:
    return [each.ordinal for each in found]


def test_repeats_of_a_row_in_flight_and_of_an_answered_row_are_its_copies() -> None:
    buffer, given = buffer_of("abaab")
    buffer.read(3)
    assert ordinals(buffer.take(9)) == [0, 1]
    found = buffer.finish([right(given[0])])
    buffer.read(9)
    assert (buffer.take(9), buffer.empty) == ([], False)
    found += buffer.finish([])
    found += buffer.finish([right(given[1])])
    assert buffer.empty
    own = sorted(found, key=lambda record: record.ordinal)
    for record, row in zip(own, given, strict=True):
        place = (record.id, record.line, record.file)
        assert place == (row.id, row.line, row.file)
        assert (record.content, record.error) == (right(row).content, None)
    assert [(r.repeat, r.tokens, r.steps) for r in own] == [(False, 2, 1)] * 2 + [(True, 0, 0)] * 3


def test_rows_that_wait_for_a_failed_row_are_sent_themselves_before_others() -> None:
    buffer, given = buffer_of("aaabaaa")
    buffer.read(5)
    assert ordinals(buffer.take(1)) == [0]
    assert ordinals(buffer.finish([failed(given[0])])) == [0]
    assert ordinals(buffer.take(9)) == [1, 2, 4, 3]
    buffer.read(9)
    assert ordinals(buffer.take(9)) == [5], "no answer is known"
    assert ordinals(buffer.finish([right(given[2])])) == [2, 6], "the first answer serves row 6"
    assert ordinals(buffer.finish(map(right, given))) == [1, 3, 4, 5]
    assert buffer.empty


def test_refused_rows_answer_no_others() -> None:
    given = rows(["", "", ""], refused=[0, 1])
    buffer = ReorderBuffer(iter(given), repeats=Repeats(ENOUGH))
    buffer.read(3)
    refusals = [Record.of(row, None, row.refused) for row in given[:2]]
    assert ordinals(buffer.finish(refusals)) == [0, 1]
    assert ordinals(buffer.take(9)) == [2]


def test_row_whose_equal_was_answered_by_an_earlier_start_is_sent() -> None:
    buffer, _ = buffer_of("aaab", first=1, finished=[2])
    buffer.read(9)
    assert ordinals(buffer.take(9)) == [1, 3]


def test_without_memory_every_row_is_sent() -> None:
    buffer, given = buffer_of("aaa", 0)
    buffer.read(2)
    assert ordinals(buffer.take(9)) == [0, 1]
    assert ordinals(buffer.finish(map(right, given[:2]))) == [0, 1]
    buffer.read(1)
    assert ordinals(buffer.take(9)) == [2]


def test_kept_answers_stay_within_the_memory_and_the_least_recently_used_go_first() -> None:
    size = _ENTRY_BYTES + len('{"of": "a", "tokens": [1, 2]}')
    buffer, given = buffer_of("abacab", 2 * size)
    sent = []
    for row in given:
        buffer.read(1)
        sent += buffer.take(9)
        buffer.finish([right(row)] if row in sent else [])
    assert ordinals(sent) == [0, 1, 3, 5], "c took the place of b, as a was used after it"
    repeats, given = Repeats(2 * size), rows("aaabab")
    for row in given[:4]:
        repeats.finish(row, right(row))
    assert all(map(repeats.add, given[4:])), "an answer that is made again is kept once"
    whole, given = buffer_of("aa", size - 1)
    whole.read(1)
    whole.take(1)
    whole.finish([right(given[0])])
    whole.read(1)
    assert ordinals(whole.take(1)) == [1], "an answer above the limit is not kept"


@given(
    st.text("abc", max_size=30),
    st.integers(1, 8),
    st.sampled_from([_ENTRY_BYTES + 40, ENOUGH]),
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 31)), max_size=80),
    st.integers(0, 4),
    st.sets(st.integers(0, 29), max_size=5),
)
def test_each_row_ends_once_with_its_own_record_within_the_window(
    payloads: str, most: int, max_bytes: int, moves: list[tuple[int, int]], first: int,
    behind: set[int],
) -> None:  # fmt: skip
    """Moves take rows, answer one, let one fail, or lose one with its engine."""
    buffer, given = buffer_of(payloads, max_bytes, first=first, finished=behind, max_ahead=most)
    todo = {row.ordinal for row in given if row.ordinal >= first and row.ordinal not in behind}
    left, done, held = sorted(todo), list[Record](), list[Row]()

    def finish(found: Sequence[Record]) -> None:
        new = buffer.finish(found)
        assert all(left.index(record.ordinal) < most for record in new)
        for record in new:
            left.remove(record.ordinal)
        done.extend(new)

    failures = set[int]()
    for kind, number in moves:
        buffer.read(3)
        if kind == 0:
            held += buffer.take(number)
        elif held:
            row = held.pop(number % len(held))
            if kind == 1:
                finish([right(row)])
            elif kind == 2:
                failures.add(row.ordinal)
                finish([failed(row)])
            else:
                buffer.requeue([row.ordinal])
    while not buffer.empty:
        buffer.read(100)
        finish([right(row) for row in held + buffer.take(100)])
        held = []
    assert Counter(ordinals(done)) == Counter(todo)
    for record in done:
        row = given[record.ordinal]
        assert (record.id, record.line, record.file) == (row.id, row.line, row.file)
        assert (record.content is None) == (row.ordinal in failures)
        assert record.content is None or record.content["of"] == row.payload
        assert record.tokens == 2 * (record.content is not None and not record.repeat)


@pytest.mark.parametrize("seed", range(5))
def test_engines_that_die_decode_each_payload_once(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    rng, decoded = random.Random(seed), Counter[str]()

    def get(call: Asked) -> object:
        if call.name == "load":
            return None
        if rng.random() < 0.3:
            return ActorDiedError()
        decoded.update(row.payload for row in call.rows)
        return [right(row) for row in call.rows]

    monkeypatch.setattr(engines, "ray", ray_of(get))
    spec = EngineSpec("url", "t", Pinned(1, None), EngineSettings(rows=2), None, 0.0)
    pool = Pool(spec, 3, 1.0, pause_s=0.0, look_s=0.0)
    buffer, given = buffer_of([str(rng.randrange(60)) for _ in range(200)], max_ahead=50)
    totals = Totals()
    while not buffer.empty:
        buffer.read(20)
        for record in buffer.finish(pool.poll(buffer, 0.0)):
            totals.add(record)
    assert decoded == Counter({row.payload for row in given})
    assert (totals.rows, totals.repeats) == (200, 200 - len(decoded))
    report = totals.report(0)
    assert (report.tokens, report.steps) == (2 * len(decoded), len(decoded))
    assert (report.block_efficiency, report.forwards) == (2.0, 1.0), "of decoded answers"


@dataclass(eq=False)
class Asked:
    name: str
    rows: Sequence[Row]


def ray_of(get: Callable[[Asked], object]) -> SimpleNamespace:
    """Stands in for ``ray``; ``get`` returns the result of a call, or the error to raise."""

    def call(name: str) -> SimpleNamespace:
        return SimpleNamespace(remote=lambda sent=(): Asked(name, sent))

    def result(asked: Asked) -> object:
        found = get(asked)
        if isinstance(found, Exception):
            raise found
        return found

    actor = SimpleNamespace(load=call("load"), work=call("work"))
    made = SimpleNamespace(remote=lambda spec: actor)
    return SimpleNamespace(
        remote=lambda **options: lambda cls: made,
        get=result,
        kill=lambda actor: None,
        wait=lambda calls, num_returns, timeout: (calls[:num_returns], []),
        nodes=lambda: [{"Alive": True}],
    )


def test_report_of_copies_alone_has_no_forwards() -> None:
    assert JobReport(5, 1, 0, 0, repeats=4).forwards == 0.0


@pytest.mark.parametrize(
    ("own", "asked", "repeatable"),
    [
        (None, Request(), True),
        (None, Request(logprobs=2, parameters={"presence_penalty": 1.0}), True),
        (None, Request(parameters={"temperature": 0.5}, seed=3), False),
        (0.5, Request(), False),
        (0.5, Request(parameters={"temperature": 0.0}), True),
        (0.5, Request(scoring=Scoring()), True),
    ],
)
def test_rows_of_a_job_are_repeatable_if_they_draw_no_random_numbers(
    own: float | None, asked: Request, repeatable: bool
) -> None:
    record = TaskRecord("t", "m", "f", "{input}", sampling=SamplingDefaults(temperature=own))
    assert RowAnswers(asked, draft=True).is_repeatable(record) == repeatable
    lines = LineAnswers("b", "/v1/chat/completions", "t", 1, LimitSettings())
    assert not lines.is_repeatable(record), "each has an id and a seed of its own"
