"""A gateway that is drained, a store that is away, and times that run out."""

import asyncio

import pytest
from fake_backend import FOREVER, FakeBackend, Service, answer, error_of

from tasc_serve.calls import Refusal

COMPLETIONS = "/v1/completions"
GOOD = {COMPLETIONS: {"model": "greet", "prompt": "hello"}}


@pytest.fixture
def service() -> Service:
    return Service(FakeBackend(*answer("Good ", "day")))


def test_without_its_store_the_service_is_degraded_and_still_ready():
    away = Service(FakeBackend(store_fault="no Redis answers at redis://host"))
    found = away.ask("GET", "/readyz")
    assert found.status_code == 200
    assert found.json()["status"] == "degraded"
    assert "no Redis" in found.json()["store"]


def test_a_gateway_that_is_drained_takes_nothing_new_and_ends_what_it_has(service):
    answered = service.ask("POST", COMPLETIONS, json=GOOD[COMPLETIONS])
    assert (answered.status_code, service.doors.inside) == (200, 0)
    service.doors.enter()
    assert asyncio.run(service.doors.drain(0.05)) == 1
    service.doors.leave()
    assert asyncio.run(service.doors.drain(0.05)) == 0
    response = service.ask("POST", COMPLETIONS, json=GOOD[COMPLETIONS])
    error_of(response, 503)
    assert response.headers["connection"] == "close"
    error_of(service.ask("GET", "/readyz"), 503)
    assert service.doors.inside == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("script", [answer("Good ", "day"), [RuntimeError("no")], [FOREVER]])
def test_whoever_came_in_is_out_again_whatever_became_of_the_answer(stream, script):
    service = Service(FakeBackend(*script), request_timeout_s=0.05)
    service.ask("POST", COMPLETIONS, json=GOOD[COMPLETIONS] | {"stream": stream})
    assert service.doors.inside == 0


def test_a_request_may_set_a_shorter_timeout_and_no_longer_one():
    backend = FakeBackend(FOREVER)
    service = Service(backend, request_timeout_s=0.05)
    for timeout in (0.01, 1000):
        error = error_of(
            service.ask("POST", COMPLETIONS, json=GOOD[COMPLETIONS] | {"timeout": timeout}), 504
        )
        assert f"{min(timeout, 0.05)} s" in error["message"]
    assert [call.timeout_s for call in backend.calls] == [0.01, 0.05]


def test_a_full_service_says_when_to_come_again():
    backend = FakeBackend(Refusal("full", "no place", None, 11.2))
    response = Service(backend).ask("POST", COMPLETIONS, json=GOOD[COMPLETIONS])
    error_of(response, 503)
    assert response.headers["retry-after"] == "12"
