"""Tests which pods reach which ports on Kubernetes, evaluating policies as a cluster does."""

import re
from itertools import product
from typing import Any

from test_kubernetes import built, one

PODS = {
    "ray": {"app": "tasc-ray", "component": "ray"},
    "job": {"app": "tasc-job", "component": "ray"},
    "balancer": {"app": "tasc-balancer"},
    "redis": {"app": "tasc-redis"},
    "stranger": {"app": "stranger"},
    "prometheus": {"app.kubernetes.io/name": "prometheus"},
    "operator": {"app.kubernetes.io/name": "kuberay-operator"},
}
TARGETS = ("ray", "job", "balancer", "redis", "stranger")
NAMESPACES = ("tasc", "monitoring", "kuberay-system", "elsewhere")
METRICS = 40_000  # one of the ports that our processes use
PORTS = (80, 6379, 6381, 8000, 8080, 8081, 8265, 10_001, 10_002, 19_999, METRICS, 52_365)
# Source and its namespace, target, ports. Ray's own ports are among these.
OPEN = [
    *(("ray job", "tasc", target, PORTS) for target in ("ray", "job")),
    *(("balancer", "tasc", target, [8000]) for target in ("ray", "job")),
    *(("operator", "kuberay-system", target, [8000, 8265, 52_365]) for target in ("ray", "job")),
    *(("prometheus", "monitoring", target, [8080, METRICS]) for target in ("ray", "job")),
    ("ray job", "tasc", "redis", [6379]),
    ("prometheus", "monitoring", "balancer", [8081]),
    *((" ".join(PODS), namespace, "balancer", [8080]) for namespace in NAMESPACES),
]


def _selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    assert set(selector) <= {"matchLabels"}
    return selector.get("matchLabels", {}).items() <= labels.items()


def _from(peer: dict[str, Any], labels: dict[str, str], namespace: str) -> bool:
    names = {"kubernetes.io/metadata.name": namespace}
    same = namespace == "tasc" if "namespaceSelector" not in peer else True
    near = _selects(peer.get("namespaceSelector", {}), names)
    return same and near and _selects(peer.get("podSelector", {}), labels)


def reaches(source: dict[str, str], namespace: str, target: dict[str, str], port: int) -> bool:
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


def test_only_the_listed_connections_are_open():
    wanted = {
        (source, namespace, target, port)
        for sources, namespace, target, ports in OPEN
        for source, port in product(sources.split(), ports)
    }
    asked = product(PODS, NAMESPACES, TARGETS, PORTS)
    assert {a for a in asked if reaches(PODS[a[0]], a[1], PODS[a[2]], a[3])} == wanted


def test_fixed_ports_of_ray_are_below_the_metrics_ports():
    cluster = one("RayService", "tasc")["spec"]["rayClusterConfig"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    assert len(groups) == 2
    for group in groups:
        ports = [int(v) for k, v in group["rayStartParams"].items() if re.search("port$", k)]
        assert len(ports) == 6
        assert max(ports) < 32_768
