"""Calibrates probabilities of labels by a temperature, and measures how far they can be trusted.

Log-probabilities are divided by the temperature with the least negative log-likelihood of held-out
rows (Guo et al. 2017, arXiv 1706.04599).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tasc_protocol import FieldError, LabelScores

MIN_ROWS = 50
LEVELS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99)
_BINS = 15
_COLDEST, _HOTTEST = 0.05, 20.0
_GOLDEN = (math.sqrt(5) - 1) / 2
Float64 = NDArray[np.float64]


@dataclass(frozen=True)
class Judged:
    """The scored labels of one row, and which of them is right.

    Attributes:
        logprobs: ``float64[k]``, the most likely first.
        right: Index of the right label.
    """

    logprobs: Float64
    right: int

    @classmethod
    def of(cls, scores: LabelScores, label: str) -> "Judged":
        return cls(np.array(scores.logprobs), scores.labels.index(label))

    def probabilities(self, temperature: float) -> Float64:
        return np.exp(self.log_softmax(temperature))

    def log_softmax(self, temperature: float) -> Float64:
        scaled: Float64 = self.logprobs / temperature
        return scaled - np.logaddexp.reduce(scaled)


@dataclass(frozen=True)
class AtThreshold:
    """Rows whose label has at least a probability.

    Attributes:
        threshold: The probability.
        coverage: Their share of all rows.
        accuracy: The share of right labels among them; None without rows.
    """

    threshold: float
    coverage: float
    accuracy: float | None


@dataclass(frozen=True)
class Reliability:
    """How far probabilities can be trusted.

    Attributes:
        error: Expected calibration error: the mean difference between the probability of the label
            and the share of right labels, over 15 equal intervals of the probability.
        brier: Mean Brier score: the sum over labels of squared differences from 1 for the right
            label and 0 for others.
        accuracy: Share of rows whose likeliest label is right.
        bins: Mean probability, share of right labels and number of rows, by interval with rows.
        thresholds: The effect of `Scoring.abstain_below`.
    """

    error: float
    brier: float
    accuracy: float
    bins: tuple[tuple[float, float, int], ...]
    thresholds: tuple[AtThreshold, ...]

    @classmethod
    def of(cls, rows: Sequence[tuple[Judged, float]]) -> "Reliability":
        """Measures rows, each with its temperature."""
        found = [row.probabilities(temperature) for row, temperature in rows]
        sure = np.array([probabilities[0] for probabilities in found])
        right = np.array([row.right == 0 for row, _ in rows])
        squares = [
            float((p**2).sum()) + 1 - 2 * float(p[row.right])
            for p, (row, _) in zip(found, rows, strict=True)
        ]
        at = np.minimum((sure * _BINS).astype(int), _BINS - 1)
        bins = tuple(
            (float(sure[at == b].mean()), float(right[at == b].mean()), int((at == b).sum()))
            for b in range(_BINS)
            if (at == b).any()
        )
        return cls(
            error=sum(abs(p - share) * n for p, share, n in bins) / len(rows),
            brier=float(np.mean(squares)),
            accuracy=float(right.mean()),
            bins=bins,
            thresholds=tuple(
                AtThreshold(
                    level,
                    float((sure >= level).mean()),
                    float(right[sure >= level].mean()) if (sure >= level).any() else None,
                )
                for level in LEVELS
            ),
        )


@dataclass(frozen=True)
class Calibration:
    """A fitted temperature, and how far probabilities can be trusted without and with it.

    Attributes:
        temperature: Fitted on all rows.
        rows: Number of rows.
        before: Without a temperature.
        after: With a temperature; each half of the rows is measured with that of the other half.
    """

    temperature: float
    rows: int
    before: Reliability
    after: Reliability


def labels_of(outputs: Sequence[str], choices: Sequence[str], end: str | None) -> list[str]:
    """Returns the choice that each output is, or the longest with which it begins before ``end``.

    Raises:
        FieldError: An output is none of the choices.
    """
    known, found = set(choices), list[str]()
    for at, output in enumerate(outputs):
        cut = len(output)
        while cut > 0 and output[:cut] not in known:
            cut = output.rfind(end, 0, cut) if end else -1
        if cut <= 0:
            shown = ", ".join(repr(choice) for choice in choices[:3])
            raise FieldError(
                "rows",
                f"row {at + 1}: the output {output!r:.100} is none of the task's {len(choices)} "
                f"choices, such as {shown:.200}, and begins with none before the end {end!r}; "
                "correct it, or set the end (--label-end)",
            )
        found.append(output[:cut])
    return found


def calibrated(rows: Sequence[Judged]) -> Calibration:
    """Fits a temperature.

    Raises:
        ValueError: There are too few rows, or they do not determine a temperature.
    """
    if len(rows) < MIN_ROWS:
        raise ValueError(f"{len(rows)} rows are given; at least {MIN_ROWS} are needed: give more")
    order = np.random.default_rng(0).permutation(len(rows)).tolist()
    halves = [[rows[at] for at in order[part::2]] for part in (0, 1)]
    temperature, others = fitted(rows), [fitted(half) for half in halves[::-1]]
    for half, found in zip(halves, others[::-1], strict=True):
        right = sum(row.right == 0 for row in half)
        if not 0 < right < len(half) or not _COLDEST * 1.05 < found < _HOTTEST / 1.05:
            raise ValueError(
                f"the likeliest label is right in {right} of {len(half)} rows, a half of the rows; "
                f"such rows do not determine a temperature from {_COLDEST} to {_HOTTEST:g}: give "
                "more rows, with right and wrong ones"
            )
    pairs = [(row, t) for half, t in zip(halves, others, strict=True) for row in half]
    before = Reliability.of([(row, 1.0) for row in rows])
    return Calibration(temperature, len(rows), before, Reliability.of(pairs))


def fitted(rows: Sequence[Judged]) -> float:
    """The temperature with the least mean negative log-likelihood, from 0.05 to 20."""

    def loss(log_temperature: float) -> float:
        t = math.exp(log_temperature)
        return -sum(max(float(row.log_softmax(t)[row.right]), -1e6) for row in rows)

    return math.exp(_least(loss, math.log(_COLDEST), math.log(_HOTTEST)))


def _least(loss: Callable[[float], float], low: float, high: float) -> float:
    """The place of the minimum of a function with one minimum, by golden-section search."""
    a, b = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    of_a, of_b = loss(a), loss(b)
    while high - low > 1e-3:
        if of_a < of_b:
            high, b, of_b = b, a, of_a
            a = high - _GOLDEN * (high - low)
            of_a = loss(a)
        else:
            low, a, of_a = a, b, of_b
            b = low + _GOLDEN * (high - low)
            of_b = loss(b)
    return (low + high) / 2
