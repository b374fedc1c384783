"""Replicas that come up are told once each, as Serve says that they run."""

from types import SimpleNamespace

from tasc_serve.app import Arrivals


def deployments(**running: int) -> dict[str, SimpleNamespace]:
    return {
        name: SimpleNamespace(replica_states={"RUNNING": n} if n else {"STARTING": 1})
        for name, n in running.items()
    }


def test_a_deployment_is_told_whenever_more_of_its_replicas_run():
    told: list[tuple[str, int]] = []
    arrivals = Arrivals(lambda *came_up: told.append(came_up))
    for looked in ({}, {"gateway": 0, "t": 0}, {"gateway": 1, "t": 0}, {"gateway": 1, "t": 2}):
        arrivals.look(deployments(**looked))
    assert told == [("gateway", 1), ("t", 2)]
    arrivals.look(deployments(gateway=1, t=3))
    assert told[2:] == [("t", 3)]


def test_one_that_died_and_came_back_is_not_told_again():
    told: list[tuple[str, int]] = []
    arrivals = Arrivals(lambda *came_up: told.append(came_up))
    for running in (1, 0, 1):
        arrivals.look(deployments(t=running))
    assert told == [("t", 1)]
