"""What a task's drafter drafts from, and whether it has been switched off, as Prometheus series."""

from collections.abc import Mapping, Sequence
from typing import get_args

from prometheus_client import CollectorRegistry, Gauge, Histogram

from tasc_engine.neural.guard import Reason

SIZES = (64, 256, 1024, 4096, 16384, 65536, 262144)


class NeuralMetrics:
    """The series of one replica whose task has a drafter.

    Args:
        labels: Those of the replica's task and model.

    Raises:
        ValueError: The registry already holds these series.
    """

    def __init__(self, registry: CollectorRegistry, labels: Mapping[str, str]) -> None:
        names, values = tuple(labels), tuple(labels.values())
        self._sizes = Histogram(
            "tasc_active_vocabulary_tokens",
            "Tokens that the drafter could draft, per drafted step and row.",
            names,
            buckets=SIZES,
            registry=registry,
        ).labels(*values)
        off = Gauge(
            "tasc_neural_drafting_off",
            "1 once the drafter has been switched off until a restart, by why.",
            (*names, "reason"),
            registry=registry,
        )
        self._off = {reason: off.labels(*values, reason) for reason in get_args(Reason)}

    def sizes(self, sizes: Sequence[int]) -> None:
        """Count how many tokens each row of some steps was drafted from."""
        for size in sizes:
            self._sizes.observe(size)

    def off(self, reason: Reason) -> None:
        """Say that the drafter is off."""
        self._off[reason].set(1)
