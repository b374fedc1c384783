"""Tests that a task gets a second replica under load and loses it later without failed requests."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from ray import serve
from serving import ALPHA, Ask, Service, asking

import tiny
from support import eventually
from tasc_serve.app import build, newest_digests
from tasc_serve.settings import ServedTask

pytestmark = [pytest.mark.ray, pytest.mark.redis]
NAME = "scaled"
CLIENTS = 12
SCALING = {
    "min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": 2,
    "look_back_period_s": 3, "upscale_delay_s": 0, "downscale_delay_s": 1,
}  # fmt: skip


@pytest.fixture
def scaled(service: Service) -> Iterator[Service]:
    """One task in a separate application that scales."""
    task = ServedTask.model_validate({"name": ALPHA, "num_cpus": 0.1, "autoscaling": SCALING})
    settings = service.settings.model_copy(update={"tasks": (task,)})
    application = build(settings, service.redis_url, newest_digests(settings, service.redis_url))
    serve.run(application, name=NAME, route_prefix=f"/{NAME}")
    try:
        yield replace(service, base=f"{service.base}/{NAME}", settings=settings)
    finally:
        serve.delete(NAME)


def replicas() -> int:
    return serve.status().applications[NAME].deployments[ALPHA].replica_states.get("RUNNING", 0)


@pytest.mark.slow("waits for Serve to add and remove replicas")
def test_replicas_follow_the_load_and_no_request_fails(scaled: Service) -> None:
    assert replicas() == 1
    with asking(scaled, [Ask(ALPHA, value) for value in tiny.SENTENCES], CLIENTS) as answers:
        eventually(lambda: replicas() == 2)
    eventually(lambda: replicas() == 1)
    assert len(answers) > CLIENTS
    for one, answer in answers:
        assert answer == scaled.expected(one)
    one = Ask(ALPHA, tiny.SENTENCES[0])
    assert scaled.answer(one) == scaled.expected(one)
