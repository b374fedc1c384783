"""Token buckets admit exactly their limit and keep a bound; rates predict waiting times."""

import heapq
import math
import random
from collections import Counter
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support import FakeClock
from tasc_serve.access.access_control import Bucket, Rates, duration, retry_after
from tasc_serve.app import report_arrivals
from tasc_serve.replica.replica import DrainRate
from tasc_serve.settings import ServedTask
from tasc_store import ApiKey


def key(number: int, requests: int | None = None, tokens: int | None = None) -> ApiKey:
    limits = {"requests_per_minute": requests, "tokens_per_minute": tokens}
    return ApiKey(f"{number:016x}", "key", **limits)


def rates(
    clock: FakeClock, limit: float | None = None, gateways: int = 1, most: int = 100
) -> Rates:
    return Rates([ServedTask(name="t", max_requests_per_s=limit)], gateways, most, clock)


def admitted(of: Rates, key: ApiKey | None, asked: int) -> int:
    return sum(of.take(key, "t") is None for _ in range(asked))


@given(
    per_minute=st.integers(1, 2000),
    gateways=st.integers(1, 7),
    waits=st.lists(st.floats(0, 5), max_size=40),
)
def test_greedy_client_gets_exactly_the_limit(per_minute, gateways, waits) -> None:
    clock = FakeClock()
    of, mine = rates(clock, gateways=gateways), key(1, per_minute)
    per_s = per_minute / 60 / gateways
    size, level = max(60 * per_s, 1), max(60 * per_s, 1)
    for wait in [0.0, *waits]:
        clock.now += wait
        level = min(size, level + wait * per_s)
        got = admitted(of, mine, math.ceil(size) + 1)
        assert level - 1 - 1e-6 < got < level + 1e-6
        level -= got


def test_reported_wait_is_exact_and_sufficient_in_whole_seconds() -> None:
    clock = FakeClock()
    of, mine = rates(clock), key(1, 7)
    assert admitted(of, mine, 8) == 7
    over = of.take(mine, "t")
    clock.now += over.wait_s / 2
    assert of.take(mine, "t") is not None
    clock.now += over.wait_s / 2 + 1e-6
    assert of.take(mine, "t") is None
    clock.now += int(retry_after(of.take(mine, "t").wait_s))
    assert of.take(mine, "t") is None


def test_prompts_of_a_request_are_admitted_together_or_not_at_all() -> None:
    clock = FakeClock()
    of, mine = rates(clock, limit=40), key(1, 60)
    assert of.take(mine, "t", 40) is None
    assert of.headers(mine)["x-ratelimit-remaining-requests"] == "20"
    clock.now += 1
    over = of.take(mine, "t", 40)
    assert (over.what, over.wait_s) == ("key", pytest.approx(19))
    assert of.headers(mine)["x-ratelimit-remaining-requests"] == "21"
    clock.now += 19
    assert of.take(mine, "t", 40) is None


def test_request_larger_than_the_bucket_waits_for_a_full_bucket_and_leaves_a_debt() -> None:
    clock = FakeClock()
    of, mine = rates(clock), key(1, 60)
    assert of.take(mine, "t") is None
    assert of.take(mine, "t", 150).wait_s == pytest.approx(1)
    clock.now += 1
    assert of.take(mine, "t", 150) is None
    assert of.take(mine, "t").wait_s == pytest.approx(91)


def test_refusal_by_the_tasks_limit_costs_a_key_nothing() -> None:
    clock = FakeClock()
    of, a, b = rates(clock, limit=2), key(1, 60), key(2, 60)
    assert [of.take(k, "t") for k in (a, None)] == [None, None]
    over = of.take(b, "t")
    assert (over.what, over.wait_s) == ("task", pytest.approx(0.5))
    assert of.headers(b)["x-ratelimit-remaining-requests"] == "60"
    assert of.take(b, "another task") is None


def test_refusal_by_a_keys_limit_costs_the_task_nothing() -> None:
    clock = FakeClock()
    of, mine = rates(clock, limit=2), key(1, 1)
    assert of.take(mine, "t") is None
    assert {of.take(mine, "t").what for _ in range(5)} == {"key"}
    assert admitted(of, None, 5) == 1


def test_tokens_beyond_the_limit_are_a_debt_paid_by_time() -> None:
    clock = FakeClock()
    of, mine = rates(clock), key(1, None, 60)
    assert of.take(mine, "t") is None
    of.spend(mine, 100)
    over = of.take(mine, "t")
    assert over.wait_s == pytest.approx(41)
    assert "60 tokens a minute" in over.message
    assert of.headers(mine) == {
        "x-ratelimit-limit-tokens": "60",
        "x-ratelimit-remaining-tokens": "0",
        "x-ratelimit-reset-tokens": "1m40s",
    }
    clock.now += 41
    assert of.take(mine, "t") is None


def test_keys_without_limits_have_no_headers_and_no_buckets() -> None:
    of, free = rates(FakeClock()), key(1)
    assert admitted(of, free, 1000) == admitted(of, None, 1000) == 1000
    of.spend(None, 5)
    of.spend(free, 5)
    assert of.headers(free) == of.headers(None) == {}


def test_number_of_held_keys_is_bounded_and_active_keys_stay() -> None:
    clock = FakeClock()
    of, busy = rates(clock, most=10), key(0, 1)
    assert of.take(busy, "t") is None
    for number in range(1, 500):
        assert of.take(key(number, 1), "t") is None
        assert of.take(busy, "t") is not None
    assert of.take(key(499, 1), "t") is not None
    assert of.take(key(1, 1), "t") is None, "forgotten, so that its bucket is full again"


def test_stopped_clock_adds_no_tokens() -> None:
    bucket = Bucket(1e6, 1, FakeClock())
    bucket.take(1)
    assert bucket.wait_s() > 0


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0, "0ms"), (0.0164, "17ms"), (1, "1s"), (1.5, "1.5s"), (60, "1m0s"), (361.25, "6m1.25s")],
)
def test_durations_have_the_openai_format(seconds: float, expected: str) -> None:
    assert duration(seconds) == expected


@pytest.mark.parametrize(
    ("wait_s", "expected"), [(1e-9, "1"), (1, "1"), (1.001, "2"), (59.1, "60")]
)
def test_retry_after_is_whole_seconds_and_never_too_short(wait_s: float, expected: str) -> None:
    assert retry_after(wait_s) == expected


ROWS = 8


def rate_of(*ends: float) -> tuple[DrainRate, FakeClock]:
    """Returns a rate with places that became free at these times since 0, and its clock."""
    clock = FakeClock(0.0)
    drain = DrainRate(ROWS, clock)
    drain.began("first")
    for clock.now in ends:
        drain.ended()
    return drain, clock


def test_retry_times_of_refused_calls_follow_the_drain_rate():
    drain, clock = rate_of(*(i / 4 for i in range(1, 9)))
    assert drain.per_second() == 4
    assert [drain.retry_after_s(f"call {i}", 0) for i in range(4)] == [0.25, 0.5, 0.75, 1]
    clock.now += 0.5  # two of them have retried; the rate falls
    assert drain.retry_after_s("call 4", 0) == 3 / drain.per_second()


def test_early_retry_keeps_its_assigned_retry_time():
    """A stream whose replica died tries full replicas repeatedly."""
    drain, clock = rate_of(*(i / 10 for i in range(1, 65)))
    begin, streams = clock.now, [f"stream {i}" for i in range(40)]
    first = [drain.retry_after_s(stream, 0) for stream in streams]
    for _ in range(3):
        clock.now += 0.03
        again = [drain.retry_after_s(stream, 0) for stream in streams]
        waited = clock.now - begin
        assert again == pytest.approx([wait_s - waited for wait_s in first])
    assert drain.retry_after_s("another", 0) == pytest.approx(41 / drain.per_second())
    for stream in streams[:30]:  # places are found before the time
        drain.began(stream)
    assert drain.retry_after_s("one more", 0) == pytest.approx(12 / drain.per_second())
    clock.now = begin + 60
    assert drain.retry_after_s(streams[0], 0) == pytest.approx(1 / drain.per_second())


def test_retry_time_grows_with_the_queue():
    waits = [rate_of(*(i / 4 for i in range(1, 9)))[0].retry_after_s("a", n) for n in (0, 40, 80)]
    assert waits == [0.25, 2.75, 5.25]


def test_long_retry_times_are_spread_below_a_minute():
    drain, _ = rate_of(100)
    waits = {drain.retry_after_s(str(i), 1000) for i in range(50)}
    assert all(55 <= wait <= 60 for wait in waits)
    assert len(waits) > 40


def test_drain_rate_falls_while_no_request_ends():
    drain, clock = rate_of(1, 2)
    clock.now = 10
    assert drain.per_second() == 0.2
    drain, clock = rate_of()
    assert drain.per_second() == ROWS
    clock.now = 10
    assert drain.per_second() == ROWS / 10


def test_drain_rate_is_the_rate_of_the_latest_endings():
    ends = [float(i) for i in range(1, 100)] + [99 + i / 100 for i in range(1, 66)]
    assert round(rate_of(*ends)[0].per_second()) == 100


def test_idle_time_does_not_change_the_drain_rate():
    drain, clock = rate_of(*(i / 100 for i in range(1, 64)))
    drain.idle()
    clock.now += 600
    drain.began("a")
    assert round(drain.per_second()) == 100
    drain.idle()
    for at in (700.0, 800.0):  # one request by itself says little about full rows
        clock.now = at
        drain.began("a")
        clock.now += 1
        drain.ended()
        drain.idle()
    drain.began("a")
    assert round(drain.per_second()) == 100


def lost(callers: int, queued: int, answer_s: float, within_s: float, tries: int = 3) -> int:
    """Returns how many callers are refused at all tries, if each retries at the suggested time.

    All arrive within ``within_s`` seconds at a replica that has answered nothing before.
    """
    drain, clock = rate_of()
    chance = random.Random(0)
    tried: Counter[int] = Counter()
    events = [(within_s * caller / callers, caller) for caller in range(callers)]
    waiting = running = refused = 0
    while events:
        clock.now, caller = heapq.heappop(events)
        if caller < 0:
            running -= 1
            drain.ended()
        elif waiting + running < ROWS + queued:
            waiting += 1
        else:
            tried[caller] += 1
            wait_s = math.ceil(drain.retry_after_s(str(caller), waiting))
            if tried[caller] < tries:
                heapq.heappush(events, (clock.now + wait_s, caller))
            else:
                refused += 1
        while waiting and running < ROWS:
            waiting, running = waiting - 1, running + 1
            heapq.heappush(events, (clock.now + chance.uniform(0.8, 1.2) * answer_s, -1))
    return refused


@pytest.mark.parametrize("within_s", [0.0, 2.0])
@pytest.mark.parametrize("answer_s", [0.05, 0.2, 0.4, 0.8, 1.2, 1.35, 1.5, 1.6])
def test_crowd_of_three_times_the_queue_is_answered_in_three_tries(answer_s, within_s) -> None:
    assert lost(800, 256, answer_s, within_s) == 0


def deployments(**running: int) -> dict[str, SimpleNamespace]:
    return {
        name: SimpleNamespace(replica_states={"RUNNING": n} if n else {"STARTING": 1})
        for name, n in running.items()
    }


def test_callback_is_called_when_a_deployment_exceeds_its_highest_number_of_replicas():
    known, seen = dict[str, int](), list[tuple[str, int]]()
    for looked in ({}, {"gateway": 0, "t": 0}, {"gateway": 1, "t": 0}, {"gateway": 1, "t": 2}):
        report_arrivals(deployments(**looked), known, lambda *running: seen.append(running))
    assert seen == [("gateway", 1), ("t", 2)]
    for running in (3, 0, 3):  # they died and were replaced
        found = deployments(gateway=1, t=running)
        report_arrivals(found, known, lambda *running: seen.append(running))
    assert seen[2:] == [("t", 3)]
