"""Tests that calls become requests or refusals with a field, and that guides delay no others."""

import asyncio
import threading
from types import SimpleNamespace

import pytest
from msgspec import structs

from tasc_engine import RequestTooLong
from tasc_engine.errors import GuideError
from tasc_protocol import FieldError, GuideSpec, Request
from tasc_runtime.protocol import Refusal
from tasc_runtime.sampling_options import guide_of
from tasc_serve.replica.replica import Admission
from tasc_serve.settings import LimitSettings
from tasc_store import TaskRecord
from tasc_text import Conversation, Message

VERSION = 4
PLAIN = TaskRecord("greet", "model", "f" * 32, "{input}")
CHOOSING = TaskRecord("greet", "model", "f" * 32, "{input}", choices=("a", "b"))


def by(pattern):
    return Request(guide=GuideSpec("regex", text=pattern, field="guided_regex"))


GUIDED = by("a+")


class Guides:
    """Caches guides; ``make`` compiles them slowly, or fails."""

    def __init__(self, make=lambda spec: None):
        self.kept, self.threads, self._make = {}, [], make

    def known(self, spec):
        return spec in self.kept

    def prepare(self, spec):
        self.of(spec)

    def of(self, spec, max_tokens=None):
        if spec not in self.kept:
            self.threads.append(threading.current_thread())
            self._make(spec)
            self.kept[spec] = f"the guide of {spec.text or spec.choices}"
        return self.kept[spec]


class Engine:
    longest = 100

    def __init__(self, guides):
        self.guides, self.compiled_on = guides, []
        self.rules_compiled = True

    def compile_rules(self):
        self.compiled_on.append(threading.current_thread())
        self.rules_compiled = True


def request(call, **filled):
    return structs.replace(
        call,
        **{
            "prompt": (1,),
            "max_tokens": call.max_tokens or 10,
            "record_version": VERSION,
            **filled,
        },
    )


def worker_of(guides=None, record=PLAIN, read=request, has_chat_template=False):
    engine = Engine(guides or Guides())

    def read_with_guide(call, id, version):
        return structs.replace(read(call), guide=call.guided_by(guide_of(record)))

    def guide(guide):
        return engine.guides.of(guide) if guide else None

    reader = SimpleNamespace(read=read_with_guide, guide=guide)
    return SimpleNamespace(has_chat_template=has_chat_template, reader=reader, engine=engine)


def admitted(calls, worker, **limits):
    """Returns the results of calls that arrive together."""
    admission = Admission(worker, LimitSettings(**limits))

    async def together():
        return await asyncio.gather(*(admission.request(call, call.id, VERSION) for call in calls))

    try:
        return asyncio.run(together())
    finally:
        admission.close()


def call(asked=None, **fields):
    return structs.replace(asked or Request(), id="id", prompt="hi", templated=True, **fields)


def raising(error):
    def make(anything):
        raise error

    return make


@pytest.mark.parametrize(
    ("record", "asked", "guide"),
    [
        (PLAIN, None, None),
        (PLAIN, GUIDED, "the guide of a+"),
        (CHOOSING, None, "the guide of ('a', 'b')"),
    ],
)
def test_valid_call_becomes_a_request_with_its_guide(record, asked, guide):
    one = call(asked, max_tokens=7)
    expected = request(one, guide=one.guided_by(guide_of(record)))
    assert admitted([one], worker_of(record=record)) == [(expected, guide)]


@pytest.mark.parametrize(
    ("error", "field"),
    [
        (FieldError("logit_bias", "no such token of logit_bias"), "logit_bias"),
        (ValueError("no tokens"), "messages.0.content"),
        (RequestTooLong("too long"), "messages.0.content"),
    ],
)
@pytest.mark.parametrize("asked", [None, GUIDED])
def test_faulty_field_is_named_before_the_guide_is_compiled(error, field, asked):
    guides = Guides()
    (refusal,) = admitted([call(asked)], worker_of(guides, read=raising(error)))
    assert (refusal.kind, refusal.param) == ("invalid", field)
    assert field in refusal.message
    assert str(error) in refusal.message
    assert not guides.threads


def test_faulty_prompt_of_a_list_is_named_in_the_error():
    one = Request("id", (1, 2), prompt_index=3, prompts=5)
    (refusal,) = admitted([one], worker_of(read=raising(ValueError("no tokens"))))
    assert refusal == Refusal("invalid", "prompt.3: no tokens", "prompt.3")


def test_invalid_guide_is_refused_and_named_and_compiled_once():
    guides = Guides(raising(GuideError("no such thing")))
    (refusal,) = admitted([call(GUIDED)], worker_of(guides))
    assert refusal == Refusal("invalid", "guided_regex: no such thing", "guided_regex")
    assert len(guides.threads) == 1


def test_n_answers_beyond_the_total_token_limit_are_refused():
    def found(n):
        (one,) = admitted([call(n=n)], worker_of(), max_total_tokens=30)
        return one

    assert found(1) == (request(call(n=1)), None)
    assert found(3) == (request(call(n=3)), None)
    assert (found(4).kind, found(4).param) == ("invalid", "n")
    assert "40 together; at most 30" in found(4).message


@pytest.mark.parametrize(
    ("prompts", "logprobs", "taken"),
    [(2, 20, True), (3, 20, False), (3, 12, True), (1, 20, True), (99, None, True)],
)
def test_log_probabilities_of_all_prompts_of_a_request_have_one_limit(prompts, logprobs, taken):
    def read(call):
        echo = logprobs is not None
        return request(call, prompt=(1,) * 80, max_tokens=20, logprobs=logprobs, echo=echo)

    (found,) = admitted([call(prompts=prompts)], worker_of(read=read), max_total_tokens=200)
    assert isinstance(found, tuple) == taken
    assert taken or (found.kind, found.param) == ("invalid", "logprobs")


@pytest.mark.parametrize(
    ("prompt", "has_chat_template", "aside"),
    [
        ("x" * 99_999, False, True),
        (Conversation((Message("user", "x" * 99_999),)), False, True),
        ("x", True, True),
        ("x", False, False),
        ((1,) * 99_999, False, False),
    ],
)
def test_long_or_templated_prompts_are_tokenized_off_the_event_loop(
    prompt, has_chat_template, aside
):
    threads = []

    def read(call):
        threads.append(threading.current_thread())
        return request(call)

    worker = worker_of(read=read, has_chat_template=has_chat_template)
    admitted([structs.replace(call(), prompt=prompt)], worker)
    assert (threads[0] is not threading.main_thread()) == aside


def test_sampling_rules_are_compiled_once_and_off_the_event_loop():
    worker = worker_of()
    worker.engine.rules_compiled = False
    assert admitted([call()], worker) == [(request(call()), None)]
    assert not worker.engine.compiled_on
    scored = call(logprobs=0)
    assert admitted([scored] * 3, worker) == [(request(scored), None)] * 3
    (thread,) = worker.engine.compiled_on
    assert thread is not threading.main_thread()


def test_compiling_guides_delay_neither_known_guides_nor_the_task_guide():
    others = threading.Event()

    def make(spec):
        if spec.text.startswith("slow"):
            assert others.wait(30)

    guides = Guides(make)
    guides.of(GUIDED.guide, 10)
    admission = Admission(worker_of(guides, CHOOSING), LimitSettings(guide_timeout_s=60))

    async def meet():
        slow = [
            asyncio.create_task(admission.request(call(by(f"slow{i}")), "id", VERSION))
            for i in range(9)
        ]
        await asyncio.sleep(0)
        assert isinstance(await admission.request(call(GUIDED), "id", VERSION), tuple)
        assert isinstance(await admission.request(call(), "id", VERSION), tuple)
        assert not any(task.done() for task in slow)
        others.set()
        return await asyncio.gather(*slow)

    try:
        assert [type(one) for one in asyncio.run(meet())] == [tuple] * 9
    finally:
        others.set()
        admission.close()
    assert threading.main_thread() not in guides.threads[1:]


def test_number_of_compiling_guides_is_limited_and_equal_guides_count_once():
    ended = threading.Event()
    guides = Guides(lambda spec: ended.wait(30))
    calls = [*[call(by("a"))] * 20, call(by("b")), call(by("c"))]
    try:
        found = admitted(calls, worker_of(guides), guide_timeout_s=0.2, max_compiling_guides=2)
    finally:
        ended.set()
    assert {(r.kind, r.param) for r in found} == {("full", "guided_regex")}
    assert all("0.2 s" in r.message for r in found[:-1])
    assert "2 other guides are being compiled; try again later" in found[-1].message


def test_small_sets_of_labels_are_not_limited_and_large_ones_are():
    ended = threading.Event()
    guides = Guides(lambda spec: ended.wait(30))
    small = [
        call(Request(guide=GuideSpec("labels", (f"a{i}", "b"), field="labels"))) for i in range(6)
    ]
    large = [
        call(Request(guide=GuideSpec("labels", (f"a{i}" * 40_000, "b"), field="labels")))
        for i in range(2)
    ]
    try:
        found = admitted(
            [*small, *large], worker_of(guides), guide_timeout_s=0.2, max_compiling_guides=1
        )
    finally:
        ended.set()
    assert all("0.2 s" in r.message for r in found[:-1])
    assert "1 other guides are being compiled" in found[-1].message


def test_call_that_timed_out_on_a_guide_succeeds_after_the_guide_is_compiled():
    ended = threading.Event()
    guides = Guides(lambda spec: ended.wait(30))
    admission = Admission(worker_of(guides), LimitSettings(guide_timeout_s=0.2))

    async def twice():
        first = await admission.request(call(GUIDED), "id", VERSION)
        ended.set()
        return first, await admission.request(call(GUIDED), "id", VERSION)

    try:
        first, second = asyncio.run(twice())
    finally:
        ended.set()
        admission.close()
    assert (first.kind, first.param) == ("full", "guided_regex")
    assert isinstance(second, tuple)
    assert len(guides.threads) == 1
