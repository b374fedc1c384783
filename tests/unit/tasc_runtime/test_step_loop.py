"""Tests the step loop with a real engine: each request gets an answer or a reason."""

import math
import queue
import threading
from functools import partial

import pytest

import support
import tiny
from support import eventually, replace
from tasc_engine import Engine, EngineConfig, Request
from tasc_runtime.engine.step_loop import EngineLoop
from tasc_runtime.protocol import Refusal

CONFIG = EngineConfig(rows=3, max_model_len=256, prefill_chunk=8)
PROMPTS = [*tiny.SENTENCES, *(f"{s} please" for s in tiny.SENTENCES)]


@pytest.fixture(scope="module")
def make_engine(folder):
    return partial(support.make_engine, folder, CONFIG)


@pytest.fixture(scope="module")
def requests(tokenizer):
    return [
        Request(str(i), tuple(tokenizer.encode_prompt(p)), 20 + i, stream=i % 2 == 0)
        for i, p in enumerate(PROMPTS)
    ]


@pytest.fixture(scope="module")
def expected(make_engine, requests):
    """Returns results of an engine without a loop; drafts were both accepted and rejected."""
    found = {r.id: r for r in make_engine().generate(requests)}
    drafted, accepted = (
        sum(sum(getattr(r.acceptance, name)) for r in found.values())
        for name in ("drafted", "accepted")
    )
    assert 0 < accepted < drafted
    return found


@pytest.fixture
def engine(make_engine):
    return make_engine()


@pytest.fixture
def loop(engine):
    running = EngineLoop(engine)
    yield running
    running.close()
    assert not running.alive


class Sink:
    """Collects the deltas of one request."""

    def __init__(self):
        self._items = queue.Queue()

    def __call__(self, item):
        self._items.put(item)

    def next(self):
        return self._items.get(timeout=60)

    def all(self):
        """Returns the deltas up to the one with the result."""
        found = [self.next()]
        while not found[-1].result:
            found.append(self.next())
        return found

    @property
    def silent(self):
        return self._items.empty()


def submit(loop, requests):
    sinks = {r.id: Sink() for r in requests}
    for request in requests:
        loop.submit(request, sinks[request.id])
    return sinks


def on_the_engines_thread(loop, call):
    """Returns the result of ``call`` between two steps."""
    found = queue.Queue()
    loop.between_steps(lambda: found.put(call()))
    return found.get(timeout=60)


def test_step_loop_answers_equal_engine_answers(loop, requests, expected):
    sinks = submit(loop, requests)
    for request in requests:
        deltas = sinks[request.id].all()
        want = expected[request.id]
        assert (deltas[-1].result.tokens, deltas[-1].result.text) == (want.tokens, want.text)
        assert "".join(d.text for d in deltas) == want.text
        if request.stream:
            assert tuple(t for d in deltas for t in d.tokens) == want.tokens
            assert len(deltas) > 1
        else:
            assert len(deltas) == 1
    assert all(sink.silent for sink in sinks.values())


def test_cancelled_queued_requests_free_their_places(loop, engine, requests, expected):
    held = threading.Event()
    loop.between_steps(lambda: held.wait(60) and None)
    sinks = submit(loop, requests)
    gone = requests[:5]  # some of them would run and others wait
    for request in gone:
        loop.cancel(request.id)
    held.set()
    for request in requests[5:]:
        assert sinks[request.id].all()[-1].result.tokens == expected[request.id].tokens
    assert on_the_engines_thread(loop, lambda: (engine.running, engine.waiting)) == (0, 0)
    assert all(sinks[request.id].silent for request in gone)


def test_request_cancelled_during_its_answer_frees_its_row(loop, engine, requests, expected):
    first, second = requests[0], requests[2]
    sinks = submit(loop, [first, second])
    assert not sinks[first.id].next().result, "the answer must be longer than one step"
    loop.cancel(first.id)
    assert sinks[second.id].all()[-1].result.tokens == expected[second.id].tokens
    eventually(lambda: on_the_engines_thread(loop, lambda: engine.running) == 0)
    on_the_engines_thread(loop, engine.check_integrity)
    again = submit(loop, [first])[first.id]
    assert again.all()[-1].result.tokens == expected[first.id].tokens


def test_actions_run_in_order_on_the_engines_thread(loop, requests):
    def thread():
        return threading.current_thread().name

    assert on_the_engines_thread(loop, thread) == "engine"
    sink = submit(loop, requests[:1])[requests[0].id]
    sink.next()
    seen = [on_the_engines_thread(loop, lambda n=n: (n, thread())) for n in range(3)]
    assert seen == [(n, "engine") for n in range(3)]
    assert sink.all()[-1].result


def test_refused_request_affects_no_other_request(loop, requests, expected):
    good = requests[0]
    long = Request("long", good.prompt, CONFIG.max_model_len)
    sinks = submit(loop, [long, good])
    refusal = sinks["long"].next()
    assert (refusal.kind, "a row holds" in refusal.message) == ("invalid", True)
    assert sinks[good.id].all()[-1].result.tokens == expected[good.id].tokens
    assert loop.alive


def test_step_loop_is_stalled_only_while_an_action_blocks_the_thread(loop):
    eventually(lambda: loop.stalled_s == 0)
    go_on = threading.Event()
    loop.between_steps(lambda: go_on.wait(60) and None)
    eventually(lambda: loop.stalled_s > 0)
    go_on.set()
    eventually(lambda: loop.stalled_s == 0)


def test_gap_between_outputs_of_a_request_is_reported(engine, requests, expected):
    gaps = []
    loop = EngineLoop(engine, on_delta=lambda seconds, tokens: gaps.append((seconds, tokens)))
    for sink in submit(loop, requests[:2]).values():
        sink.all()
    loop.close()
    assert all(seconds >= 0 for seconds, _ in gaps)
    results = [expected[r.id] for r in requests[:2]]
    steps = sum(r.acceptance.steps for r in results)
    assert len(gaps) == steps - len(results), "a gap lies between two deltas of one request"


def test_broken_engine_fails_all_requests_and_refuses_later_requests(
    make_engine, requests, expected, caplog
):
    engine, fault, steps = make_engine(), RuntimeError("the device is gone"), iter(range(3))
    begin = engine.launch

    def launch():
        if next(steps, None) is None:
            raise fault
        begin()

    engine.launch = launch
    loop = EngineLoop(engine)
    held = threading.Event()
    loop.between_steps(lambda: held.wait(60) and None)
    sinks = submit(loop, requests)
    assert loop.alive
    held.set()
    for request in requests:
        items = [sinks[request.id].next()]
        while request.stream and items[-1] is not fault:
            items.append(sinks[request.id].next())
        assert items[-1] is fault
        assert sinks[request.id].silent
    assert not loop.alive
    assert loop.failure is fault
    assert "must be replaced" in caplog.text
    late = Request("late", requests[0].prompt, 5)
    assert submit(loop, [late])["late"].next() is fault
    loop.close()


def test_idle_and_later_requests_get_the_error_of_a_broken_engine(make_engine, requests):
    engine, fault, steps = make_engine(), RuntimeError("the device is gone"), iter(range(2))
    begin = engine.launch

    def launch():
        if engine.running and next(steps, None) is None:
            raise fault
        begin()

    engine.launch = launch
    loop, sink = EngineLoop(engine), Sink()
    for request in requests[: CONFIG.rows + 1]:  # the last one never begins
        loop.submit_idle(replace(request, stream=False), sink, None, math.inf)
    assert [sink.next() for _ in range(CONFIG.rows + 1)] == [fault] * (CONFIG.rows + 1)
    for number in range(CONFIG.rows + 1):  # an engine that broke frees no row
        late = Request(f"late {number}", requests[0].prompt, 5)
        assert submit(loop, [late])[late.id].next() is fault
    loop.close()


def test_request_is_refused_if_the_queue_is_full(folder, requests):
    loop, sink = EngineLoop(support.make_engine(folder, replace(CONFIG, max_waiting=2))), Sink()
    held = threading.Event()
    loop.between_steps(lambda: held.wait(60) and None)
    for request in requests[: CONFIG.rows + 3]:
        loop.submit(request, sink)
    held.set()
    refusal = next(item for item in iter(sink.next, None) if isinstance(item, Refusal))
    assert (refusal.kind, loop.alive) == ("full", True)
    loop.close()


def test_requests_are_read_during_a_forward_and_keep_their_order_with_cancellations(
    make_engine, requests, expected, monkeypatch
):
    monkeypatch.setattr(Engine, "overlaps", True)  # as on a GPU
    engine, arrive = make_engine(), threading.Event()
    begin, sent = engine.launch, threading.Event()
    first, second, third, other = (replace(r, stream=False) for r in requests[:4])

    def launch():
        begin()
        if engine.running and not sent.is_set():
            arrive.set()
            assert sent.wait(60)

    engine.launch = launch
    read = []
    submit_to_engine = engine.submit
    engine.submit = lambda request, guide: (
        read.append((request.id, engine._step is not None)), submit_to_engine(request, guide),
    )  # fmt: skip
    loop = EngineLoop(engine)
    (kept,) = submit(loop, [first]).values()
    assert arrive.wait(60)
    (early,) = submit(loop, [second]).values()  # is read while the forward runs
    (dropped,) = submit(loop, [third]).values()
    loop.cancel(third.id)
    (again,) = submit(loop, [third]).values()  # is read after its cancellation
    (last,) = submit(loop, [other]).values()
    sent.set()
    for sink, request in ((kept, first), (early, second), (again, third), (last, other)):
        assert sink.all()[-1].result.tokens == expected[request.id].tokens
    assert dropped.silent
    assert read[:3] == [(first.id, False), (second.id, True), (third.id, True)]
    assert not read[3][1]
    loop.close()


def test_idle_requests_keep_their_rows_if_a_request_arrives_during_a_forward(
    make_engine, requests, expected, monkeypatch
):
    monkeypatch.setattr(Engine, "overlaps", True)  # as on a GPU
    engine, runs, sent = make_engine(), threading.Event(), threading.Event()
    begin, idle = engine.launch, Sink()
    first, second = (replace(request, stream=False) for request in requests[:2])

    def launch():
        begin()
        if engine.running:
            runs.set()
            assert sent.wait(60)

    engine.launch = launch
    loop = EngineLoop(engine)
    loop.submit_idle(first, idle, None, math.inf)
    assert runs.wait(60)
    (other,) = submit(loop, [second]).values()
    sent.set()
    for sink, request in ((idle, first), (other, second)):
        assert sink.next().result.tokens == expected[request.id].tokens
    loop.close()
