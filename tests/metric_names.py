"""Names of all exported series. Dashboards and rules query no others."""

from typing import Final

from prometheus_client import CollectorRegistry

from tasc_runtime.engine.drafters import NeuralMetrics
from tasc_serve.metrics.batch_metrics import BatchMetrics
from tasc_serve.metrics.gateway_metrics import GatewayMetrics
from tasc_serve.metrics.replica_metrics import ReplicaMetrics

_SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}


def _exported() -> frozenset[str]:
    registry = CollectorRegistry()
    ReplicaMetrics(registry, task="", model_name="", proposer="")
    NeuralMetrics(registry, {"task": ""})
    GatewayMetrics(registry)
    BatchMetrics(registry)
    return frozenset(f.name + end for f in registry.collect() for end in _SUFFIXES[f.type])


METRICS: Final = _exported()
