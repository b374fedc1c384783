"""What shadow checks count, as Prometheus series. It decodes nothing and judges nothing."""

from typing import Final, Literal, TypeAlias, get_args

from prometheus_client import CollectorRegistry, Counter

Mismatch: TypeAlias = Literal["near_tie", "real"]
Dropped: TypeAlias = Literal["full", "old", "failed"]
_LABELS: Final = ("task", "model_name")


class ShadowMetrics:
    """The series of one replica's shadow checks; all of them are there from the start, at 0.

    Raises:
        ValueError: The registry already holds these series.
    """

    def __init__(self, registry: CollectorRegistry, *, task: str, model_name: str) -> None:
        own = (task, model_name)
        self._checks = Counter(
            "tasc_lossless_checks",
            "Drafted answers that were decoded again without drafts, and compared.",
            _LABELS,
            registry=registry,
        ).labels(*own)
        mismatches = Counter(
            "tasc_lossless_mismatches",
            "Of these, answers that differ: near_tie where the two tokens are as likely as rounding"
            " can tell, real otherwise.",
            (*_LABELS, "kind"),
            registry=registry,
        )
        self._mismatches = {kind: mismatches.labels(*own, kind) for kind in get_args(Mismatch)}
        dropped = Counter(
            "tasc_lossless_checks_dropped",
            "Answers chosen for a check that had none: the queue was full, rows were not idle"
            " before they were old, or decoding failed.",
            (*_LABELS, "reason"),
            registry=registry,
        )
        self._dropped = {reason: dropped.labels(*own, reason) for reason in get_args(Dropped)}

    def checked(self, mismatch: Mismatch | None) -> None:
        """Count one comparison, and what differed."""
        self._checks.inc()
        if mismatch:
            self._mismatches[mismatch].inc()

    def dropped(self, reason: Dropped) -> None:
        """Count an answer that was chosen and not checked."""
        self._dropped[reason].inc()
