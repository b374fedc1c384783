"""Calls become requests or refusals that name a field, and no guide keeps others waiting."""

import asyncio
import threading
from types import SimpleNamespace

import pytest

from tasc_engine import GenerationRequest, GuideSpec, RequestTooLong
from tasc_serve.admission import Admission
from tasc_serve.asked import Asked, FieldError, Guide
from tasc_serve.calls import Call, Refusal
from tasc_serve.settings import LimitSettings
from tasc_store import TaskRecord

PLAIN = TaskRecord("greet", "model", "f" * 32, "{input}")
CHOOSING = TaskRecord("greet", "model", "f" * 32, "{input}", choices=("a", "b"))
GUIDED = Asked(guide=Guide(GuideSpec("regex", text="a+"), "guided_regex"))


def admitted(calls, make, record=PLAIN, fits=lambda request: None, **limits):
    """What becomes of calls that come together; ``make`` is the worker's part."""
    worker = SimpleNamespace(record=record, request=make, engine=SimpleNamespace(require_fit=fits))
    admission = Admission(worker, LimitSettings(**limits))

    async def together():
        return await asyncio.gather(*(admission.request(call) for call in calls))

    try:
        return asyncio.run(together())
    finally:
        admission.close()


def call(asked=None, **fields):
    return Call("id", "hi", templated=True, asked=asked or Asked(), **fields)


def request(call):
    return GenerationRequest(call.id, (1,), call.max_tokens or 10)


def raising(error):
    def make(call):
        raise error

    return make


@pytest.mark.parametrize(("record", "asked"), [(PLAIN, None), (PLAIN, GUIDED), (CHOOSING, None)])
def test_what_fits_becomes_a_request(record, asked):
    one = call(asked, max_tokens=7)
    assert admitted([one], request, record) == [request(one)]


@pytest.mark.parametrize(
    ("error", "field"),
    [
        (FieldError("logit_bias", "no such token"), "logit_bias"),
        (FieldError("guided_regex", "no such thing"), "guided_regex"),
        (ValueError("no tokens"), "messages.0.content"),
    ],
)
@pytest.mark.parametrize("asked", [None, GUIDED])
def test_what_is_at_fault_is_named(error, field, asked):
    (refusal,) = admitted([call(asked)], raising(error))
    assert refusal == Refusal("invalid", str(error), field)


def test_what_is_too_long_names_the_prompt():
    error = RequestTooLong("too long")
    (refusal,) = admitted([call()], request, fits=raising(error))
    assert refusal == Refusal("invalid", "too long", "messages.0.content")


def test_ignoring_the_end_of_a_task_with_choices_is_refused_by_name():
    (refusal,) = admitted([call(Asked(ignore_eos=True))], request, CHOOSING)
    assert (refusal.kind, refusal.param) == ("invalid", "ignore_eos")


def test_answers_that_are_too_long_together_are_refused_also_where_the_task_says_how_long():
    def found(n):
        (one,) = admitted([call(n=n)], request, max_total_tokens=30)
        return one

    assert found(1) == found(3) == request(call())
    assert (found(4).kind, found(4).param) == ("invalid", "n")
    assert "40 together; at most 30" in found(4).message


def test_while_a_guide_is_compiled_others_are_answered():
    others_are_through = threading.Event()

    def make(call):
        if call.asked.guide:
            assert others_are_through.wait(30)
        else:
            others_are_through.set()
        return request(call)

    found = admitted([call(GUIDED), call()], make, guide_timeout_s=60)
    assert [type(one) for one in found] == [GenerationRequest] * 2


def test_who_waits_too_long_for_a_guide_may_come_again_when_it_is_ready():
    ended = threading.Event()

    def make(call):
        assert ended.wait(30)
        return request(call)

    try:
        found = admitted([call(GUIDED)] * 20, make, guide_timeout_s=0.2)
    finally:
        ended.set()
    assert {r.kind for r in found} == {"full"}
    assert all(r.message.startswith("guided_regex: ") and "0.2 s" in r.message for r in found)
