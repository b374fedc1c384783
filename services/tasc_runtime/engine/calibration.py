"""Calibrates probabilities of labels, and measures how far they can be trusted.

Log-probabilities are divided by the temperature with the least negative log-likelihood of held-out
rows (temperature scaling). If it also helps rows that were not fitted on, a bias of each label is
added (vector scaling with one factor for all labels). Both: Guo et al. 2017, arXiv 1706.04599.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tasc_protocol import FieldError, LabelScores

MIN_ROWS = 50
MOST_SCORES = 10_000_000  # of rows and labels together, about 1 GB
LEVELS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99)
_BINS = 15
_COLDEST, _HOTTEST = 0.05, 20.0
_ITERATIONS = 500
_LEAST_LOGPROB = -1000.0
Prior = Literal["uniform", "empty"]
Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]


@dataclass(frozen=True)
class Scaling:
    """Turns log-probabilities into calibrated ones: ``log_softmax(logprobs / temperature + bias)``.

    Attributes:
        biases: ``float64[labels]``.
    """

    temperature: float
    biases: Float64

    def log_shares(self, logprobs: Float64) -> Float64:
        """Scales ``float64[rows, labels]``."""
        scaled = logprobs / self.temperature + self.biases
        scaled -= scaled.max(axis=1, keepdims=True)
        shares: Float64 = scaled - np.log(np.exp(scaled).sum(axis=1, keepdims=True))
        return shares


@dataclass(frozen=True)
class Scored:
    """Rows with the scores of all labels, and the right ones.

    Attributes:
        logprobs: ``float64[rows, labels]``, in the order of the labels.
        right: ``int64[rows]``, indices of the right labels.
    """

    logprobs: Float64
    right: Int64

    @classmethod
    def of(cls, scores: Sequence[LabelScores], labels: Sequence[str]) -> "Scored":
        """Collects the exact scores of rows, and the right label of each."""
        logprobs = np.empty((len(scores), scores[0].count if scores else 0))
        right = np.empty(len(scores), np.int64)
        for at, (own, label) in enumerate(zip(scores, labels, strict=True)):
            logprobs[at, list(own.numbers)] = own.logprobs
            right[at] = own.numbers[own.labels.index(label)]
        return cls(logprobs, right)

    def part(self, rows: Int64) -> "Scored":
        return Scored(self.logprobs[rows], self.right[rows])

    def loss(self, scaling: Scaling) -> float:
        """The mean negative log-likelihood of the right labels."""
        of_right = scaling.log_shares(self.logprobs)[np.arange(len(self.right)), self.right]
        return -float(np.maximum(of_right, _LEAST_LOGPROB).mean())


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
    def of(cls, probabilities: Float64, right: Int64) -> "Reliability":
        """Measures rows.

        Args:
            probabilities: ``float64[rows, labels]``.
            right: ``int64[rows]``, the right label of each row.
        """
        rows = np.arange(len(right))
        sure, hit = probabilities.max(axis=1), probabilities.argmax(axis=1) == right
        squares = (probabilities**2).sum(axis=1) + 1 - 2 * probabilities[rows, right]
        at = np.minimum((sure * _BINS).astype(int), _BINS - 1)
        bins = tuple(
            (float(sure[at == b].mean()), float(hit[at == b].mean()), int((at == b).sum()))
            for b in range(_BINS)
            if (at == b).any()
        )
        return cls(
            error=sum(abs(p - share) * n for p, share, n in bins) / len(rows),
            brier=float(squares.mean()),
            accuracy=float(hit.mean()),
            bins=bins,
            thresholds=tuple(
                AtThreshold(
                    level,
                    float((sure >= level).mean()),
                    float(hit[sure >= level].mean()) if (sure >= level).any() else None,
                )
                for level in LEVELS
            ),
        )


@dataclass(frozen=True)
class Calibration:
    """A fitted scaling, and how far probabilities can be trusted without and with it.

    Attributes:
        temperature: Divisor of log-probabilities.
        biases: Added to each label's quotient, in the order of the labels; empty: nothing is added.
        rows: Number of rows.
        before: Without a scaling.
        after: With a scaling; each half of the rows is measured with that of the other half.
    """

    temperature: float
    biases: tuple[float, ...]
    rows: int
    before: Reliability
    after: Reliability


def require_fitting(rows: int, labels: int) -> None:
    """Raises ValueError if the scores of all labels for all rows take too much memory."""
    if rows * labels > MOST_SCORES:
        raise ValueError(
            f"{rows} rows and {labels} labels are {rows * labels} scores; at most {MOST_SCORES} "
            f"are held: give at most {MOST_SCORES // labels} rows"
        )


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


def calibrated(rows: Scored, prior: Float64 | None = None) -> Calibration:
    """Fits a temperature and, if they help rows that they were not fitted on, biases of the labels.

    Args:
        prior: ``float64[labels]``, log-probabilities of the labels behind an empty input, by which
            probabilities are divided first; None: they are not divided.

    Raises:
        ValueError: There are too few rows, or they do not determine a temperature.
    """
    n, labels = rows.logprobs.shape
    if n < MIN_ROWS:
        raise ValueError(f"{n} rows are given; at least {MIN_ROWS} are needed: give more")
    plain = Scaling(1.0, np.zeros(labels))
    before = Reliability.of(np.exp(plain.log_shares(rows.logprobs)), rows.right)
    own = rows if prior is None else Scored(rows.logprobs - prior, rows.right)
    order = np.random.default_rng(0).permutation(n)
    halves = [own.part(order[part::2]) for part in (0, 1)]
    # Without biases, then with them: fits of both halves, and of all rows.
    parts = (*halves, own)
    fits = [[fitted(part, biased) for part in parts] for biased in (False, True)]
    usable = [found for found in fits if all(map(_is_determined, found, parts))]
    if not usable:
        right = int((own.logprobs.argmax(axis=1) == own.right).sum())
        raise ValueError(
            f"the likeliest label is right in {right} of {n} rows; such rows do not determine a "
            f"temperature from {_COLDEST} to {_HOTTEST:g}: give more rows, with right and wrong "
            "ones"
        )

    def loss(found: Sequence[Scaling]) -> float:
        """The loss of each half with the fit of the other half."""
        return halves[0].loss(found[1]) + halves[1].loss(found[0])

    best = min(usable, key=loss)
    shares = [
        np.exp(fit.log_shares(half.logprobs)) for half, fit in zip(halves, best[1::-1], strict=True)
    ]
    after = Reliability.of(np.concatenate(shares), np.concatenate([h.right for h in halves]))
    found = best[2]
    biases = found.biases if prior is None else found.biases - prior / found.temperature
    kept = tuple(biases.tolist()) if biases.any() else ()
    return Calibration(found.temperature, kept, n, before, after)


def fitted(rows: Scored, biased: bool = False) -> Scaling:
    """Fits a temperature and, if ``biased``, biases, which have a standard normal prior.

    A label without rows would otherwise have a bias of minus infinity. The loss is convex in the
    biases and the reciprocal of the temperature, which may come out of any range.
    """
    import torch  # only here, since mistakes of users are reported without it

    highest = rows.logprobs.max(axis=1, keepdims=True)
    logits = torch.from_numpy(np.maximum(rows.logprobs - highest, _LEAST_LOGPROB))
    right, n = torch.from_numpy(rows.right), len(rows.right)
    scale = torch.ones((), dtype=torch.float64, requires_grad=True)
    biases = torch.zeros(logits.shape[1], dtype=torch.float64, requires_grad=biased)
    optimizer = torch.optim.LBFGS(
        [scale, biases] if biased else [scale], max_iter=_ITERATIONS, history_size=20,
        tolerance_grad=1e-7, tolerance_change=1e-14, line_search_fn="strong_wolfe",
    )  # fmt: skip

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        found = torch.nn.functional.cross_entropy(scale * logits + biases, right)
        found = found + biases.square().sum() / (2 * n)
        found.backward()
        return found

    optimizer.step(loss)
    return Scaling(float(1 / scale.detach()), biases.detach().numpy())


def _is_determined(found: Scaling, rows: Scored) -> bool:
    """Whether the fit is within its limits. Rows that are all right would make it ever colder."""
    hit = found.log_shares(rows.logprobs).argmax(axis=1) == rows.right
    return _COLDEST < found.temperature < _HOTTEST and not hit.all()
