"""Rates of arriving and finished requests, and the waiting times they predict."""

from types import SimpleNamespace

from support import FakeClock
from tasc_serve.app import Arrivals
from tasc_serve.replica.admission import DrainRate


def rate_of(*ends: float) -> tuple[DrainRate, FakeClock]:
    clock = FakeClock(0.0)
    drain = DrainRate(clock)
    for clock.now in ends:
        drain.ended()
    return drain, clock


def test_the_wait_is_what_is_ahead_over_the_rate():
    drain, _ = rate_of(*(i / 4 for i in range(9)))
    assert drain.per_second() == 4
    assert [drain.retry_after_s(n) for n in (1, 4, 5, 40)] == [1, 1, 2, 10]


def test_the_wait_has_a_least_and_a_most():
    assert rate_of()[0].retry_after_s(100) == rate_of(3.0)[0].retry_after_s(100) == 1
    assert rate_of(0, 100)[0].retry_after_s(1000) == 60


def test_the_rate_falls_while_nothing_ends():
    drain, clock = rate_of(0, 1, 2)
    clock.now = 10
    assert drain.per_second() == 0.2
    assert drain.retry_after_s(4) == 20


def test_the_rate_is_that_of_the_last_endings():
    ends = [float(i) for i in range(100)] + [99 + i / 100 for i in range(1, 65)]
    assert round(rate_of(*ends)[0].per_second()) == 100


def test_time_without_requests_does_not_count():
    drain, clock = rate_of(*(i / 100 for i in range(64)))
    drain.idle()
    for clock.now in (600 + i / 100 for i in range(20)):
        drain.ended()
    assert drain.retry_after_s(100) == 2


def deployments(**running: int) -> dict[str, SimpleNamespace]:
    return {
        name: SimpleNamespace(replica_states={"RUNNING": n} if n else {"STARTING": 1})
        for name, n in running.items()
    }


def test_a_deployment_is_told_whenever_more_of_its_replicas_run():
    seen: list[tuple[str, int]] = []
    arrivals = Arrivals(lambda *running: seen.append(running))
    for looked in ({}, {"gateway": 0, "t": 0}, {"gateway": 1, "t": 0}, {"gateway": 1, "t": 2}):
        arrivals.look(deployments(**looked))
    assert seen == [("gateway", 1), ("t", 2)]
    arrivals.look(deployments(gateway=1, t=3))
    assert seen[2:] == [("t", 3)]


def test_one_that_died_and_came_back_is_not_told_again():
    seen: list[tuple[str, int]] = []
    arrivals = Arrivals(lambda *running: seen.append(running))
    for replicas in (1, 0, 1):
        arrivals.look(deployments(t=replicas))
    assert seen == [("t", 1)]
