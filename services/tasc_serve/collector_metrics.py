"""What a replica counts of the answers it keeps for the corpus, as Prometheus series."""

from typing import Final, Literal, TypeAlias, get_args

from prometheus_client import CollectorRegistry, Counter

Lost: TypeAlias = Literal["full", "trimmed"]
_LABELS: Final = ("task", "model_name")


class CollectorMetrics:
    """The series of one replica's collector; all of them are there from the start, at 0.

    Raises:
        ValueError: The registry already holds these series.
    """

    def __init__(self, registry: CollectorRegistry, *, task: str, model_name: str) -> None:
        own = (task, model_name)
        self._rows = Counter(
            "tasc_collected_rows",
            "Finished answers that were stored for `tasc refresh`.",
            _LABELS,
            registry=registry,
        ).labels(*own)
        lost = Counter(
            "tasc_collected_rows_lost",
            "Answers that no refresh will see: full where they came faster than the store took"
            " them, trimmed where the store let old ones go for new ones.",
            (*_LABELS, "reason"),
            registry=registry,
        )
        self._lost = {reason: lost.labels(*own, reason) for reason in get_args(Lost)}

    def stored(self, rows: int) -> None:
        """Count answers that reached the store."""
        self._rows.inc(rows)

    def lost(self, reason: Lost, rows: int = 1) -> None:
        """Count answers that went."""
        self._lost[reason].inc(rows)
