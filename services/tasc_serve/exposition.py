"""Merges the Prometheus text of several processes into one, for people. It fetches nothing.

Prometheus itself scrapes each process: a merged counter falls when a process ends.
"""

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

_Key = tuple[str, tuple[tuple[str, str], ...]]
_NO_SUMMANDS = ("_info", "_ratio", "_per_step", "_seen", "_timestamp_seconds")
_OF_ONE_PROCESS = ("process_", "python_")  # a sum of start times or file limits says nothing


class _Family:
    """One metric family and its samples over all texts, in the order they were first seen."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric
        # Summing would make of a mark (1) a count, and of a part in [0, 1] more than the whole.
        self._take_max = metric.type == "gauge" and metric.name.endswith(_NO_SUMMANDS)
        self._samples: dict[_Key, Sample] = {}

    def add(self, metric: Metric) -> None:
        if metric.type != self._metric.type:
            raise ValueError(
                f"{metric.name} is a {self._metric.type} in one text and a {metric.type} in"
                " another; merge processes of one release"
            )
        for sample in metric.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            known = self._samples.get(key)
            value = sample.value if known is None else self._join(known.value, sample.value)
            self._samples[key] = Sample(sample.name, sample.labels, value)

    def _join(self, left: float, right: float) -> float:
        return max(left, right) if self._take_max else left + right

    def metric(self) -> Metric:
        metric = Metric(self._metric.name, self._metric.documentation, self._metric.type)
        metric.samples = list(self._samples.values())
        return metric


class _Merged(Collector):
    def __init__(self, families: Iterable[_Family]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        return (family.metric() for family in self._families)


def merge(texts: Iterable[str]) -> str:
    """Sum what has the same name and labels; gauges that are no summands take the greatest.

    ``*_created`` series and those of the process and Python collectors are left out. Histograms
    are expected to have the same buckets in every text.

    Raises:
        ValueError: A text is not in Prometheus text format, or two disagree on a series' type.
    """
    families: dict[str, _Family] = {}
    for text in texts:
        for metric in text_string_to_metric_families(text):
            if metric.name.endswith("_created") or metric.name.startswith(_OF_ONE_PROCESS):
                continue
            families.setdefault(metric.name, _Family(metric)).add(metric)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Merged(families.values()))
    return generate_latest(registry).decode()
