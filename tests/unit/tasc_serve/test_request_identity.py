"""Tests that retries with the same key get the same answer, and requests have unique ids."""

import asyncio
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fake_backend import STATUS, TASK, FakeBackend, Service, answer, error_of

from support import eventually
from tasc_runtime.protocol import Refusal
from tasc_serve.routing.replica_router import ChosenReplicaRouter
from tasc_serve.wire import AttachRequest
from tasc_store import StoreUnreachable

BODY = {"model": TASK, "prompt": "hello"}
KEY = {"Idempotency-Key": "order-7"}


class MemoryAttempts:
    """First attempts in a dictionary; see tests/integration/store/test_store_api_keys.py."""

    def __init__(self) -> None:
        self.notes: dict[tuple[str, str], str] = {}
        self.answers: dict[tuple[str, str], bytes] = {}

    def claim(self, task: str, name: str, note: str) -> tuple[str, bytes | None]:
        return self.notes.setdefault((task, name), note), self.answers.get((task, name))

    def keep(self, task: str, name: str, answer: bytes) -> None:
        self.answers.setdefault((task, name), answer)


class AwayAttempts(MemoryAttempts):
    def claim(self, task: str, name: str, note: str) -> tuple[str, bytes | None]:
        raise StoreUnreachable("no Redis answers")

    keep = claim  # type: ignore[assignment]


def post(service: Service, headers: dict[str, str] = KEY, **more: Any) -> httpx.Response:
    return service.ask("POST", "/v1/completions", json=BODY | more, headers=headers)


@pytest.mark.parametrize("stream", [False, True])
def test_retry_is_answered_from_the_store_byte_for_byte(stream: bool) -> None:
    backend, attempts = FakeBackend(*answer("Good ", "day")), MemoryAttempts()
    service = Service(backend, attempts=attempts)
    first = post(service, stream=stream)
    eventually(lambda: bool(attempts.answers))  # the response does not wait until it is stored
    second = post(service, stream=stream)
    assert "day" in first.text
    assert second.content == first.content
    for name in ("content-type", "cache-control", "x-accel-buffering"):
        assert second.headers.get(name) == first.headers.get(name)
    assert second.headers["idempotency-replayed"] == "true"
    assert "idempotency-replayed" not in first.headers
    assert len(backend.calls) == 1


@pytest.mark.parametrize("attempts", [None, AwayAttempts()])
def test_retry_without_a_store_repeats_seed_and_id(attempts: Any) -> None:
    backend = FakeBackend(*answer("Good day"))
    service = Service(backend, attempts=attempts)
    first, second = (post(service, temperature=1).json() for _ in range(2))
    assert first["id"] == second["id"]
    one, other = backend.calls
    assert one.seed == other.seed
    assert one.id == other.id


@pytest.mark.parametrize("stream", [False, True])
def test_retried_prompt_list_has_the_same_ids_and_seeds(stream: bool) -> None:
    asked, known = {"prompt": ["a", "b"], "n": 2, "stream": stream}, []
    for attempts in (None, MemoryAttempts()):
        backend = FakeBackend(*answer("Good day"))
        service = Service(backend, attempts=attempts)
        first, second = (post(service, **asked) for _ in range(2))
        known += [(c.id, c.seed, c.prompt_index, c.choice_index) for c in backend.calls]
        if attempts:
            assert second.content == first.content
    assert len(known) == 3 * 4
    assert known[:4] == known[4:8] == known[8:]


def test_other_or_missing_idempotency_key_is_another_request() -> None:
    backend = FakeBackend(*answer("Good day"))
    service = Service(backend, attempts=MemoryAttempts())
    for headers in (KEY, {"Idempotency-Key": "order-8"}, {}, {}):
        assert post(service, headers).status_code == 200
    assert len({call.seed for call in backend.calls}) == 4
    assert len({call.id for call in backend.calls}) == 4


def test_idempotency_key_of_another_request_is_refused() -> None:
    service = Service(FakeBackend(*answer("Good day")), attempts=MemoryAttempts())
    assert post(service).status_code == 200
    error = error_of(post(service, max_tokens=3), 422)
    assert error["param"] == "Idempotency-Key"


@pytest.mark.parametrize("key", ["", "k" * 256])
def test_idempotency_key_of_invalid_length_is_refused(key: str) -> None:
    service = Service(FakeBackend(*answer("Good day")))
    error_of(post(service, {"Idempotency-Key": key}), 400)


def test_failed_answer_is_not_stored() -> None:
    attempts = MemoryAttempts()
    backend = FakeBackend(Refusal("full", "no place"))
    service = Service(backend, attempts=attempts)
    error_of(post(service), 503)
    backend.script = tuple(answer("Good day"))
    assert post(service).json()["choices"][0]["text"] == "Good day"
    assert len(backend.calls) == 2


def test_interrupted_stream_is_not_stored() -> None:
    attempts = MemoryAttempts()
    broken = (*answer("Good ", "day")[:1], RuntimeError("cut"))
    assert "day" not in post(Service(FakeBackend(*broken), attempts=attempts), stream=True).text
    assert not attempts.answers


def test_oversized_answer_is_generated_again() -> None:
    backend, attempts = FakeBackend(*answer("Good day")), MemoryAttempts()
    service = Service(backend, attempts=attempts, max_idempotent_bytes=10)
    for stream in (False, True):
        headers = {"Idempotency-Key": f"key {stream}"}
        assert [post(service, headers, stream=stream).status_code for _ in range(2)] == [200] * 2
    assert len(backend.calls) == 4
    assert not attempts.answers


def test_retry_uses_the_record_version_of_its_first_attempt() -> None:
    attempts, versions = MemoryAttempts(), []
    for version in (1, 2):
        status = replace(STATUS, record_version=version)
        backend = FakeBackend(Refusal("full", "no place"), status=status)
        post(Service(backend, attempts=attempts))
        versions.append(backend.calls[0].record_version)
    assert versions == [1, 1]


def test_silent_store_delays_only_one_request() -> None:
    asked, release = [], threading.Event()

    class Silent(MemoryAttempts):
        def claim(self, task: str, name: str, note: str) -> tuple[str, bytes | None]:
            asked.append(name)
            release.wait(30)
            return note, None

    limits = {"store_timeout_s": 0.05, "store_pause_s": 60.0}
    service = Service(FakeBackend(*answer("Good day")), attempts=Silent(), **limits)
    assert [post(service).status_code for _ in range(3)] == [200] * 3
    release.set()
    assert len(asked) == 1


def test_serve_backs_off_before_it_looks_for_replicas_again() -> None:
    waiting = SimpleNamespace(args=[], routing_context=SimpleNamespace(should_backoff=False))
    choose: Any = ChosenReplicaRouter.choose_replicas
    asyncio.run(choose(None, [], waiting))
    assert waiting.routing_context.should_backoff


def test_connection_is_routed_to_the_named_replica() -> None:
    replicas = [SimpleNamespace(replica_id=SimpleNamespace(unique_id=n)) for n in ("one", "two")]
    choose: Any = ChosenReplicaRouter.choose_replicas

    def chosen(*args: object) -> Any:
        routing = SimpleNamespace(should_backoff=False)
        waiting = SimpleNamespace(args=args, routing_context=routing)
        return asyncio.run(choose(None, replicas, waiting))

    assert chosen(AttachRequest("two")) == [replicas[1:]]
    assert chosen("a word") == chosen() == [replicas]
    assert chosen(AttachRequest("gone")) == [replicas]
