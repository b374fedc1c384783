"""Replicas that die or hang in the middle of answers: clients see a pause, and the same answers."""

import json
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import BETA, Ask, Service, replica_pids

import tiny
from support import DEADLINE_S, eventually

pytestmark = [
    pytest.mark.ray,
    pytest.mark.redis,
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at Linux's /proc"),
]
LONG = 400
SAMPLED = {
    "temperature": 1.3,
    "seed": 11,
    "repetition_penalty": 1.2,
    "frequency_penalty": 0.3,
    "stop": ["never written"],
    "logprobs": 1,
    "ignore_eos": True,
}
CROWD = 3  # clients of each kind


class Client:
    """One streaming client with an answer that can be read while it grows."""

    def __init__(self, service: Service, body: dict[str, Any]) -> None:
        self.events: list[dict[str, Any]] = []
        self.begun = threading.Event()
        self._url = f"{service.base}/v1/completions"
        self._body = body | {"stream": True}

    def run(self) -> "Client":
        with httpx.stream("POST", self._url, json=self._body, timeout=DEADLINE_S) as response:
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    self.events.append(json.loads(line.removeprefix("data: ")))
                    self.begun.set()
        return self

    @property
    def text(self) -> str:
        return "".join(e["choices"][0]["text"] for e in self.events)

    @property
    def tokens(self) -> list[str]:
        found = (e["choices"][0]["logprobs"] or {"tokens": []} for e in self.events)
        return [token for logprobs in found for token in logprobs["tokens"]]


def body_of(value: str, **more: Any) -> dict[str, Any]:
    return Ask(BETA, value, LONG, draft=False).body | {"stream": False} | more


def whole(service: Service, body: dict[str, Any]) -> dict[str, Any]:
    """Returns text and tokens; the last digit of log-probabilities depends on the batch."""
    response = httpx.post(f"{service.base}/v1/completions", json=body, timeout=DEADLINE_S)
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    tokens = choice["logprobs"] and choice["logprobs"]["tokens"]
    return {"text": choice["text"], "tokens": tokens, "reason": choice["finish_reason"]}


def both_serve(service: Service) -> None:
    """Wait until the task has its two replicas, and both answer the gateway."""
    reached = "tasc_replicas_reachable"
    eventually(lambda: len(replica_pids(BETA)) == 2 == service.metrics().sum(reached, task=BETA))


def failovers(service: Service, reason: str) -> float:
    return service.metrics().sum("tasc_failovers_total", task=BETA, reason=reason)


def answers_outlive(service: Service, harm: Callable[[], None]) -> None:
    """Harms the service during greedy and sampled, streaming and whole answers."""
    value = tiny.SENTENCES[2]
    asked = [body_of(value, ignore_eos=True), body_of(value, **SAMPLED)]
    expected = [whole(service, body) for body in asked]
    streams = [Client(service, body) for body in asked * CROWD]
    with ThreadPoolExecutor(4 * CROWD) as pool:
        coming: list[Future[Any]] = [pool.submit(stream.run) for stream in streams]
        later = [pool.submit(whole, service, body) for body in asked * CROWD]
        for stream in streams[:CROWD]:
            assert stream.begun.wait(DEADLINE_S)
        harm()
        for future in coming:
            future.result()
        wholes = [future.result() for future in later]
    assert wholes == expected * CROWD
    for stream, answer in zip(streams, expected * CROWD, strict=True):
        assert stream.text == answer["text"]
        if answer["tokens"]:
            assert stream.tokens == answer["tokens"]


def outlived(service: Service, reason: str, harm: Callable[[int], None]) -> bool:
    """Whether harm to one replica met answers in progress; it may come after all have ended."""
    for _ in range(6):
        both_serve(service)
        before = failovers(service, reason)
        answers_outlive(service, lambda: harm(replica_pids(BETA)[0]))
        if failovers(service, reason) > before:
            return True
    return False


def test_answers_continue_when_a_replica_is_killed(service: Service) -> None:
    assert outlived(service, "died", lambda pid: os.kill(pid, signal.SIGKILL))
    assert service.metrics().sum("tasc_failover_seconds_count", task=BETA) > 0
    both_serve(service)


@pytest.mark.slow("waits for silence")
def test_answers_continue_when_a_replica_hangs(service: Service) -> None:
    stopped: list[int] = []

    def stop(pid: int) -> None:
        os.kill(pid, signal.SIGSTOP)
        stopped.append(pid)

    try:
        assert outlived(service, "silent", stop)
    finally:
        for pid in stopped:
            with suppress(ProcessLookupError):  # Serve may have replaced it
                os.kill(pid, signal.SIGCONT)
    both_serve(service)
