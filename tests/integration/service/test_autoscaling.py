"""A task gets a second replica when many ask, and loses it when nobody does; no request fails."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import httpx
import pytest
from ray import serve
from serving import ALPHA, Ask, Said, Service

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
    """One task in an application of its own, which scales."""
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


@contextmanager
def load(service: Service) -> Iterator[list[Future[list[tuple[Ask, Said]]]]]:
    """Clients that ask without a pause; what each was told is there behind the block."""
    enough = threading.Event()

    def asked(number: int) -> list[tuple[Ask, Said]]:
        told = []
        with httpx.Client() as client:
            while not enough.is_set():
                one = Ask(ALPHA, tiny.SENTENCES[number % len(tiny.SENTENCES)])
                told.append((one, service.answer(one, client)))
        return told

    with ThreadPoolExecutor(CLIENTS) as pool:
        clients = [pool.submit(asked, number) for number in range(CLIENTS)]
        try:
            yield clients
        finally:
            enough.set()


@pytest.mark.slow("waits for Serve to add and remove replicas")
def test_replicas_come_with_the_load_and_go_with_it_and_no_request_fails(scaled: Service) -> None:
    assert replicas() == 1
    with load(scaled) as clients:
        eventually(lambda: replicas() == 2)
    eventually(lambda: replicas() == 1)
    told = [pair for client in clients for pair in client.result()]
    assert len(told) > CLIENTS
    for one, said in told:
        assert said == scaled.expected(one)
    one = Ask(ALPHA, tiny.SENTENCES[0])
    assert scaled.answer(one) == scaled.expected(one)
