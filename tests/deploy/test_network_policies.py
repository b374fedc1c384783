"""Who reaches which port on Kubernetes, worked out from the policies as a cluster does it."""

import re
from typing import Any

import pytest
from test_kubernetes import built, one

BALANCER = {"app": "tasc-balancer"}
REDIS = {"app": "tasc-redis"}
RAY = {"app": "tasc-ray", "component": "ray"}
JOB = {"app": "tasc-job", "component": "ray"}
STRANGER = {"app": "stranger"}
PROMETHEUS = {"app.kubernetes.io/name": "prometheus"}
OPERATOR = {"app.kubernetes.io/name": "kuberay-operator"}
METRICS = 40_000  # one of those that processes of ours take


def _selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    assert set(selector) <= {"matchLabels"}
    return selector.get("matchLabels", {}).items() <= labels.items()


def _from(peer: dict[str, Any], labels: dict[str, str], namespace: str) -> bool:
    names = {"kubernetes.io/metadata.name": namespace}
    same = namespace == "tasc" if "namespaceSelector" not in peer else True
    near = _selects(peer.get("namespaceSelector", {}), names)
    return same and near and _selects(peer.get("podSelector", {}), labels)


def reaches(
    source: dict[str, str], target: dict[str, str], port: int, namespace: str = "tasc"
) -> bool:
    """Whether a pod of a namespace may connect to a port of a pod of ours."""
    policies = [o["spec"] for o in built() if o["kind"] == "NetworkPolicy"]
    applied = [p for p in policies if _selects(p["podSelector"], target)]
    assert applied, "no policy selects the target: everything would reach it"
    return any(
        ("from" not in rule or any(_from(peer, source, namespace) for peer in rule["from"]))
        and (
            "ports" not in rule
            or any(p["port"] <= port <= p.get("endPort", p["port"]) for p in rule["ports"])
        )
        for policy in applied
        for rule in policy.get("ingress", [])
    )


@pytest.mark.parametrize("port", [6379, 8265, 10001, 10002, 52365, METRICS])
def test_rays_ports_are_open_to_ray_only(port):
    assert reaches(RAY, RAY, port)
    assert reaches(JOB, RAY, port)
    for other in (BALANCER, REDIS, STRANGER):
        assert not reaches(other, RAY, port)
    assert not reaches(RAY, RAY, port, namespace="elsewhere")


def test_http_comes_from_the_load_balancer():
    assert reaches(BALANCER, RAY, 8000)
    assert not reaches(STRANGER, RAY, 8000)
    assert not reaches(PROMETHEUS, RAY, 8000, "monitoring")


def test_metrics_are_read_by_prometheus_alone():
    for port in (METRICS, 8080):
        assert reaches(PROMETHEUS, RAY, port, "monitoring")
        assert not reaches(PROMETHEUS, RAY, port, "elsewhere")
        assert not reaches(STRANGER, RAY, port, "monitoring")
    for port in (6379, 6381, 8265, 10_002, 19_999, 52_365):
        assert not reaches(PROMETHEUS, RAY, port, "monitoring")


def test_the_operator_reaches_what_it_looks_after():
    for port in (8265, 52365, 8000):
        assert reaches(OPERATOR, RAY, port, "kuberay-system")
        assert not reaches(OPERATOR, RAY, port, "elsewhere")


def test_redis_is_for_ours_alone():
    assert reaches(RAY, REDIS, 6379)
    assert reaches(JOB, REDIS, 6379)
    for other in (BALANCER, STRANGER):
        assert not reaches(other, REDIS, 6379)


def test_everybody_reaches_the_service_and_prometheus_what_is_for_operators():
    assert reaches(STRANGER, BALANCER, 8080, "elsewhere")
    assert reaches(PROMETHEUS, BALANCER, 8081, "monitoring")
    assert not reaches(STRANGER, BALANCER, 8081, "elsewhere")
    assert not reaches(STRANGER, BALANCER, 8081)


def test_a_pod_that_nobody_thought_of_is_closed():
    assert not reaches(RAY, STRANGER, 80)


def test_rays_fixed_ports_leave_the_metrics_ports_alone():
    cluster = one("RayService", "tasc")["spec"]["rayClusterConfig"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    assert len(groups) == 2
    for group in groups:
        ports = [int(v) for k, v in group["rayStartParams"].items() if re.search("port$", k)]
        assert len(ports) == 6
        assert max(ports) < 32_768
