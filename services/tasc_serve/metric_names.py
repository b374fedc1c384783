"""The names of all exported series: a dashboard or rule may ask for no other."""

from typing import Final

from prometheus_client import CollectorRegistry

from tasc_serve.gateway_metrics import GatewayMetrics
from tasc_serve.metrics import ReplicaMetrics

_SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}


def _exported() -> frozenset[str]:
    registry = CollectorRegistry()
    ReplicaMetrics(registry, task="", model_name="", proposer="")
    GatewayMetrics(registry)
    return frozenset(f.name + end for f in registry.collect() for end in _SUFFIXES[f.type])


METRICS: Final = _exported()
