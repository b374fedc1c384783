"""The names of all exported series: a dashboard or rule may ask for no other."""

from typing import Final

from prometheus_client import CollectorRegistry

from tasc_runtime.engine.drafters import NeuralMetrics
from tasc_serve.metrics.batch_metrics import BatchMetrics
from tasc_serve.metrics.gateway_metrics import (
    FailoverMetrics,
    GatewayMetrics,
    QueueMetrics,
    RateMetrics,
)
from tasc_serve.metrics.replica_metrics import (
    CollectorMetrics,
    DriftMetrics,
    RecordMetrics,
    ReplicaMetrics,
    ShadowMetrics,
)

_SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}


def _exported() -> frozenset[str]:
    registry = CollectorRegistry()
    ReplicaMetrics(registry, task="", model_name="", proposer="")
    GatewayMetrics(registry)
    ShadowMetrics(registry, task="", model_name="")
    CollectorMetrics(registry, task="", model_name="")
    RecordMetrics(registry, int, task="", model_name="")
    NeuralMetrics(registry, {"task": ""})
    drift = DriftMetrics(registry, {"task": ""})
    drift.expect(1.0)
    drift.built(1.0)
    RateMetrics(registry)
    FailoverMetrics(registry)
    BatchMetrics(registry)
    QueueMetrics(registry, ())
    return frozenset(f.name + end for f in registry.collect() for end in _SUFFIXES[f.type])


METRICS: Final = _exported()
