"""Tests that engines answer rows of a buffer, and that their failures are classified."""

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.exceptions import ActorDiedError, RayError, RayTaskError

from support import EAGER, record_of
from tasc_engine import Engine
from tasc_engine.errors import UnsupportedModel
from tasc_jobs.batch import engines
from tasc_jobs.batch.engines import Answering, EngineSpec, Pool, ReorderBuffer, measure
from tasc_jobs.batch.generate import RowAnswers
from tasc_jobs.batch.work import EngineFailed, Read, Record, Row, Strategy, row_request
from tasc_jobs.errors import ClusterError, JobError
from tasc_jobs.worker.lines import LineAnswers
from tasc_protocol import GuideSpec, Request, Whole
from tasc_runtime.engine.builder import EngineBuilder
from tasc_runtime.engine.versions import Pinned
from tasc_runtime.engine_settings import EngineSettings
from tasc_runtime.errors import ServiceError
from tasc_serve.settings import LimitSettings
from tasc_store import StoreUnreachable, TaskRecord
from tiny import make_folder


def row(ordinal: int, payload: str = "1") -> Row:
    return Row(ordinal, f"r{ordinal}", payload, ordinal + 1)


def source(count: int) -> Iterator[Row]:
    return (row(i) for i in range(count))


def records(*ordinals: int) -> list[Record]:
    return [Record.of(row(i), {}, None) for i in ordinals]


def ordinals(found: Sequence[Row | Record] | None) -> list[int]:
    return [each.ordinal for each in found or ()]


def test_long_rows_fill_the_buffer_sooner_and_requeued_rows_come_first() -> None:
    buffer = ReorderBuffer(row(i, "x" * (30 << 20)) for i in range(9))
    assert (ordinals(buffer.read(100)), buffer.read(100)) == ([0, 1, 2], None)
    buffer = ReorderBuffer(source(6), max_ahead=10)
    buffer.read(100)
    buffer.take(4)
    buffer.finish(records(0, 2))
    buffer.requeue([3, 1])
    buffer.finish(records(3))
    assert ordinals(buffer.take(2)) == [1, 4]
    assert buffer.finish(records(0, 3)) == []


@given(
    st.integers(0, 30),
    st.integers(1, 8),
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 31)), max_size=80),
    st.integers(0, 4),
    st.sets(st.integers(0, 29), max_size=5),
)
def test_lost_rows_are_finished_once_and_reading_stays_within_the_limit(
    count: int, most: int, moves: list[tuple[int, int]], first: int, behind: set[int]
) -> None:
    """Rows before ``first`` and the later rows in ``behind`` were finished by earlier starts."""
    buffer = ReorderBuffer(source(count), first, behind, most)
    before = {i for i in range(count) if i < first or i in behind}
    done, held = list[int](), list[int]()

    def finish(found: Sequence[int]) -> None:
        new = ordinals(buffer.finish(records(*found)))
        left = [i for i in range(count) if i not in before and i not in done]
        assert all(left.index(ordinal) < most for ordinal in new)
        done.extend(new)

    for kind, number in moves:
        buffer.read(3)
        if kind == 0:
            held += ordinals(buffer.take(number))
        elif kind == 1 and held:
            finish([held.pop(number % len(held))])
        elif kind == 2 and held:
            buffer.requeue([held.pop(number % len(held))])
    while not buffer.empty:
        buffer.read(100)
        finish(held + ordinals(buffer.take(100)))
        held = []
    assert sorted(done) == sorted({*range(count)} - before)


@dataclass(eq=False)
class Asked:
    name: str
    rows: Sequence[Row]


class FakeRay:
    """Stands in for ``ray``: a function of its name and rows gives the result of a call."""

    def __init__(self, answer: Callable[[str, Sequence[Row]], object], alive: bool = True) -> None:
        self._answer, self._alive = answer, alive

    def remote(self, **options: object) -> Callable[[type], object]:
        def call(name: str) -> object:
            return SimpleNamespace(remote=lambda rows=(): Asked(name, rows))

        actor = SimpleNamespace(load=call("load"), work=call("work"))
        return lambda cls: SimpleNamespace(remote=lambda spec: actor)

    def wait(self, calls: list[Any], num_returns: int, timeout: float) -> tuple[list[Any], list]:
        return (calls[:num_returns], []) if self._alive else ([], calls)

    def get(self, call: Any) -> object:
        found = self._answer(call.name, call.rows)
        if isinstance(found, Exception):
            raise found
        return found

    def kill(self, actor: object) -> None:
        pass

    def nodes(self) -> list[dict[str, bool]]:
        return [{"Alive": self._alive}]


@pytest.fixture
def pool_on(monkeypatch: pytest.MonkeyPatch) -> Callable[[FakeRay, int], Pool]:
    def make(ray: FakeRay, size: int) -> Pool:
        monkeypatch.setattr(engines, "ray", ray)
        spec = EngineSpec("url", "t", Pinned(1, None), EngineSettings(rows=2), None, 0.0)
        return Pool(spec, size, 1.0, pause_s=0.0, look_s=0.0)

    return make


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
        (task_error(StoreUnreachable("no Redis answers")), False, True),
    ],
)
def test_engine_that_cannot_start_is_an_error_of_the_machine_or_of_the_task(
    pool_on: Callable[[FakeRay, int], Pool], error: RayError, up: bool, machines: bool
) -> None:
    def answer(name: str, rows: Sequence[Row]) -> object:
        return None if up and name == "load" else error

    pool, buffer = pool_on(FakeRay(answer), 1), ReorderBuffer(source(3))
    buffer.read(3)
    with pytest.raises(JobError) as ended:
        [pool.poll(buffer, 0.0) for _ in range(20)]
    kinds = [isinstance(ended.value, kind) for kind in (EngineFailed, ClusterError)]
    assert kinds == [machines, machines]


@pytest.mark.parametrize("seed", range(5))
def test_rows_of_dying_engines_are_finished_once(
    pool_on: Callable[[FakeRay, int], Pool], seed: int
) -> None:
    rng = random.Random(seed)

    def answer(name: str, rows: Sequence[Row]) -> object:
        if name == "load":
            return None
        return ActorDiedError() if rng.random() < 0.3 else records(*ordinals(rows))

    pool, buffer = pool_on(FakeRay(answer), 3), ReorderBuffer(source(200), max_ahead=50)
    done: list[int] = []
    while not buffer.empty:
        buffer.read(20)
        done += ordinals(buffer.finish(pool.poll(buffer, 0.0)))
    assert (sorted(done), pool.rows_in_flight) == (list(range(200)), 0)


def test_cluster_without_nodes_is_an_error(pool_on: Callable[[FakeRay, int], Pool]) -> None:
    with pytest.raises(ClusterError):
        pool_on(FakeRay(lambda name, rows: None, alive=False), 1).poll(
            ReorderBuffer(source(1)), 0.0
        )


class Pairs:
    """Requests two answers for each row; a row of a number is refused."""

    def requests(self, row: Row, builder: EngineBuilder) -> Sequence[Read]:
        if row.payload.isdigit():
            raise ValueError(f"{row.payload} is no text")
        asked = [row_request(Request("", row.payload, 24), row, i) for i in range(2)]
        return [(each, builder.reader.request(each)) for each in asked]

    def content(self, row: Row, answers: Sequence[Whole], record: TaskRecord) -> dict[str, Any]:
        return {"of": row.id, "tokens": [len(result.tokens) for result, _ in answers]}


def test_record_of_a_row_has_all_answers_or_an_error(builder: EngineBuilder) -> None:
    refused, good = answered(builder, Pairs(), "5", "wake me")
    assert (refused.content, refused.error) == (None, "5 is no text")
    assert good.content is not None
    counts = good.content["tokens"]
    assert (good.content["of"], counts[0], good.tokens) == ("r1", counts[1], sum(counts))
    assert (good.error, good.line) == (None, 2)
    assert good.steps >= 2


@pytest.mark.parametrize("overlaps", [False, True])
def test_finished_rows_are_returned_before_longer_rows_end_and_no_row_begins_twice(
    builder: EngineBuilder, overlaps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ``overlaps``, a call may return while a forward runs, as on a GPU."""
    monkeypatch.setattr(Engine, "overlaps", overlaps)
    rows = [row(i, f"wake me at {i:x}!") for i in range(20)]
    answering = Answering(builder, Pairs())
    found = answering.work(rows)
    assert 0 < len(found) < len(rows)
    found += answering.work([each for each in rows if each.ordinal not in ordinals(found)])
    while len(found) < len(rows):
        found += answering.work([])
    assert sorted(ordinals(found)) == list(range(20))


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> EngineBuilder:
    folder = make_folder(tmp_path_factory.mktemp("model"))
    fields = {"dtype": "float64", "max_tokens": 8, "draft": EAGER}
    settings = EngineSettings(rows=4, max_model_len=64, cost_aware=False)
    return EngineBuilder(record_of(folder, "greet", "say {input}\n", **fields), 1, settings)


@pytest.mark.parametrize(("gpus", "part"), [(0.0, 1.0), (0.25, 0.25), (1.0, 1.0), (2.0, 1.0)])
def test_engine_uses_the_part_of_a_gpu_that_its_process_was_given(builder, gpus, part) -> None:
    settings = EngineSettings(
        rows=1, max_model_len=64, cost_aware=False, device="cpu", gpu_memory_share=0.5
    )
    config = EngineBuilder(builder.record, 1, settings, gpus=gpus).engine.config
    assert (config.gpu_part, config.gpu_memory_share) == (part, 0.5)


def answered(builder: EngineBuilder, strategy: Strategy, *payloads: str) -> list[Record]:
    """Returns the records of rows, in their order."""
    answering = Answering(builder, strategy)
    found = answering.work([row(i, payload) for i, payload in enumerate(payloads)])
    while len(found) < len(payloads):
        found += answering.work([])
    return sorted(found, key=lambda record: record.ordinal)


def rounded(value: Any) -> Any:
    """Rounds floats, because batches of another size add numbers in another order."""
    return json.loads(json.dumps(value), parse_float=lambda text: round(float(text), 9))


@pytest.mark.parametrize("choices", [(), ("alarm", "alarm clock", "weather")])
def test_batch_log_probabilities_equal_service_log_probabilities(
    builder: EngineBuilder, choices: tuple[str, ...]
) -> None:
    """Answers are the same with and without drafts, and with tokens that a guide forces."""
    texts = ["wake me", "wake me at nine", "wake me"]
    guide = GuideSpec("choice", choices, field="--choices") if choices else None
    bodies = (
        {
            "model": "greet", "messages": [{"role": "user", "content": text}], "logprobs": True,
            "top_logprobs": 2, **({"guided_choice": choices} if choices else {}),
        }
        for text in texts
    )  # fmt: skip
    served = LineAnswers("b", "/v1/chat/completions", "greet", 1, LimitSettings())
    whole = [r.content["choices"][0] for r in answered(builder, served, *map(json.dumps, bodies))]
    for draft in (True, False):
        bare, asked = (
            answered(builder, RowAnswers(Request(guide=guide, logprobs=top), draft), *texts)
            for top in (None, 2)
        )
        found = [record.content.pop("logprobs") for record in asked]
        assert [r.content for r in asked] == [r.content for r in bare]
        assert [r.content["text"] for r in asked] == [c["message"]["content"] for c in whole]
        assert rounded(found) == rounded([choice["logprobs"]["content"] for choice in whole])
        assert all(len(token["top_logprobs"]) == 2 for tokens in found for token in tokens)
    alone = answered(builder, RowAnswers(Request(guide=guide, logprobs=0), True), texts[0])
    tokens = alone[0].content["logprobs"]
    assert rounded(tokens) == rounded([{**token, "top_logprobs": []} for token in found[0]])


def test_too_long_row_is_refused_and_its_error_names_command_options(
    builder: EngineBuilder,
) -> None:
    long, strategy = "wake me " * 40, RowAnswers(Request(), True)
    first, refused, last = answered(builder, strategy, "hi", long, "ho")
    assert first.content is not None
    assert last.content is not None
    tokens = len(builder.template.encode(builder.tokenizer, long))
    assert (refused.id, refused.content) == ("r1", None)
    parts = (f" {tokens} tokens", " 64,", "--max-model-len", f" {builder.positions},", "--restart")
    assert all(part in str(refused.error) for part in parts)
    assert not any(word in str(refused.error) for word in ("messages", "truncate", "kv_cache"))
    (refused,) = answered(builder, strategy, "wake me " * builder.positions)
    assert f" {builder.positions} tokens" in str(refused.error)
    assert "--max-model-len" not in str(refused.error)
    found = measure(builder, strategy, [row(0, long), row(1, "hi")])
    assert (found.rows, found.refused) == (1, 1)
    assert str(found.first_error).startswith(f"row 1: the prompt has {tokens} tokens")
