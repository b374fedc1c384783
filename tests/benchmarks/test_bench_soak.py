"""The soak run as its users run it, for seconds; and what it must not overlook."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bench_soak import Asked, faults
from fuzz_service import Process
from soak_watch import Growth, Looks

BENCHMARK = Path(__file__).with_name("bench_soak.py")
ASKED = Asked(1, 1, 1, 1, most_growth=2, most_files=3, most_slower=1.5)
REDIS = {"accepted_draft_tokens": 9, "said": ["degraded", "ready"], "ready_again_s": 0.5}
GOOD = {
    "failed": 0, "wrong": 0, "redis": REDIS, "growth": {"gateway 1": {"memory_mib": 1, "files": 3}},
    "ended": [], "p99_ms": [9.0, 10.0, 14.0],
}  # fmt: skip


@pytest.mark.ray
@pytest.mark.redis
def test_a_short_load_with_redis_away_finds_nothing_wrong() -> None:
    few = ["--minutes", "0.3", "--redis-down", "5", "--capacity-seconds", "1"]
    command = [sys.executable, str(BENCHMARK), *few, "--most-growth", "200", "--most-slower", "99"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["requests"] > 0
    assert (found["failed"], found["wrong"]) == (0, 0)
    assert found["redis"]["answers"] > 0
    assert {who.rsplit(" ", 1)[0] for who in found["growth"]} >= {"gateway", "replica of alpha"}


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
