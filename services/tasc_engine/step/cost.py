"""Costs of verify forwards on this machine: measured once, kept in a file, used each step.

A cost is the time of one forward in seconds, for a number of rows, a total number of tokens, and a
context of each row. This module measures a target. `live_costs` corrects the costs, and
`draft_budget` uses them for its decisions.
"""

import json
import logging
import math
import os
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tasc_draft.files import whole_file
from tasc_engine.layout import ForwardBatch, chains, plain_batch
from tasc_engine.model.target import Target

Float64 = NDArray[np.float64]
log = logging.getLogger(__name__)

DRAFTED = (0, 1, 3, 7, 15, 31)  # measured numbers of draft tokens per row
SECONDS = 15.0  # maximum time of a measurement, without its last forward
SETTLED = 0.05  # a round that makes no point faster by a larger share is the last
_CONTEXT = 64


@dataclass(frozen=True)
class Effort:
    """How often points are timed.

    Attributes:
        rounds, min_rounds: Numbers of rounds over all points; the first is always complete for the
            full batch.
        seconds: Maximum time of a measurement, even if the caller allows more.
        warm_up: Whether each point has a forward before its first time.
    """

    rounds: int
    min_rounds: int
    seconds: float
    warm_up: bool


THOROUGH = Effort(rounds=25, min_rounds=3, seconds=math.inf, warm_up=True)
# A GPU runs only this process's graphs, which were replayed or captured before, so that two times
# of a point differ by a few percent; the first real steps correct the rest (`live_costs`).
BRIEF = Effort(rounds=2, min_rounds=2, seconds=3.0, warm_up=False)


def effort_on(device: str) -> Effort:
    """The effort for a kind of device: a start on a GPU should take seconds."""
    return BRIEF if device == "cuda" else THOROUGH


def processor() -> str:
    """The processor's model, or its architecture if the system does not report a model."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith("model name")), platform.processor())


@dataclass(frozen=True)
class Conditions:
    """Where and when costs were measured, for people who check the costs.

    Attributes:
        load: Load average of the last minute before the measurement.
        at: Time in UTC, in ISO 8601.
        real_steps: Number of real steps that have corrected the costs since they were measured.
    """

    processor: str = field(default_factory=processor)
    threads: int = field(default_factory=torch.get_num_threads)
    load: float = field(default_factory=lambda: os.getloadavg()[0])
    at: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    real_steps: int = 0


@dataclass(frozen=True)
class Cost:
    """Seconds of a forward over ``tokens`` of all ``rows``, each with ``context`` in the cache."""

    rows: int
    tokens: int
    context: int
    seconds: float


@dataclass(frozen=True)
class StepCosts:
    """All measured costs of one target on one machine."""

    model: str
    device: str
    dtype: str
    costs: tuple[Cost, ...]
    measured: Conditions | None = None

    def seconds(self, rows: int, tokens: Float64, context: float) -> Float64:
        """Seconds of forwards with these numbers of tokens, by linear inter- and extrapolation."""
        near = min({c.rows for c in self.costs}, key=lambda known: (abs(known - rows), known))
        own = [c for c in self.costs if c.rows == near]
        contexts = sorted({c.context for c in own})
        curves = [
            _line([(c.tokens, c.seconds) for c in own if c.context == known], tokens)
            for known in contexts
        ]
        if len(curves) == 1:
            return curves[0]
        low, high = contexts[0], contexts[-1]
        share = min(max((context - low) / (high - low), 0.0), 1.0)
        return (1 - share) * curves[0] + share * curves[-1]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> "StepCosts":
        costs = tuple(Cost(**c) for c in found["costs"])
        if not costs or not all(0 < c.seconds < float("inf") for c in costs):
            raise ValueError("costs are missing, or are no times")
        measured = Conditions(**found["measured"]) if found.get("measured") else None
        return cls(found["model"], found["device"], found["dtype"], costs, measured)


def _line(points: list[tuple[int, float]], x: Float64) -> Float64:
    """Interpolates linearly; flat before the first point, extrapolated from the last two."""
    xs, ys = np.array(sorted(points)).T
    ys = np.minimum.accumulate(ys[::-1])[::-1]  # a point slower than a larger point was disturbed
    if len(xs) == 1:
        return np.full(len(x), ys[0])
    i = np.clip(np.searchsorted(xs, x), 1, len(xs) - 1)
    slope = (ys[i] - ys[i - 1]) / (xs[i] - xs[i - 1])
    found: Float64 = np.maximum(ys[i - 1] + slope * (x - xs[i - 1]), ys[0])
    return found


def measure(
    target: Target,
    model: str,
    seconds: float = SECONDS,
    progress: Callable[[int, int], None] = lambda done, of: None,
    effort: Effort = THOROUGH,
) -> StepCosts:
    """Times forwards of a target whose rows are all free, and clears the cache afterwards.

    Points are timed in rounds, so that a short disturbance does not spoil a point. The minimum time
    of each point counts. The measurement ends with the first round that improves no point by more
    than `SETTLED`.

    Args:
        model: Name under which the costs are kept.
        seconds: Maximum time of the measurement; ``effort`` may have a lower one. Points that were
            not reached are left out, except the points of the full batch at the first context,
            which are always measured.
        progress: Called with the number of timed forwards and their maximum.
        effort: How often points are timed.
    """
    until = time.perf_counter() + min(seconds, effort.seconds)
    points = list(_points(target))
    took: dict[tuple[int, int, int], float] = {}
    smallest = sum(point[::2] == points[0][::2] for point in points)
    for n in range(effort.rounds):
        before = dict(took)
        for i, point in enumerate(points):
            if (n or i >= smallest) and time.perf_counter() > until:
                break
            warm_up = effort.warm_up and not n
            took[point] = min(_time(target, point, warm_up), took.get(point, np.inf))
            progress(n * len(points) + i + 1, effort.rounds * len(points))
        settled = all(s >= (1 - SETTLED) * before.get(point, np.inf) for point, s in took.items())
        if (settled and n + 1 >= effort.min_rounds) or time.perf_counter() > until:
            break
    costs = (
        Cost(rows, rows * (1 + drafted), context, found)
        for (rows, drafted, context), found in took.items()
    )
    target.cache.clear()
    return StepCosts(model, target.device_name, target.dtype_name, tuple(costs), Conditions())


def _points(target: Target) -> Iterator[tuple[int, int, int]]:
    """The points as (rows, draft tokens per row, context), the full batch first."""
    max_drafts = target.config.max_draft_tokens
    drafted = [n for n in DRAFTED if n <= max_drafts and n < _stride(target)] or [0]
    longest = max(_stride(target) - 1 - max(drafted), 0)
    short, long = min(_CONTEXT, longest), 3 * longest // 4
    contexts = [short, long] if long >= 2 * short > 0 else [short]
    counts = [min(target.config.rows, target.cache.slots)]
    while counts[-1] > 1:
        counts.append(counts[-1] // 2)
    return ((r, n, c) for r, c, n in product(counts, contexts, drafted))


def _time(target: Target, point: tuple[int, int, int], warm_up: bool) -> float:
    """Seconds of one forward."""
    # Rows are as close as in real use. With large equal distances, CPU caches hold fewer rows.
    batch = _batch(target.vocab_size, *point, min(_stride(target), point[2] + point[1] + 1))
    if warm_up:
        target.next_tokens(batch)
    began = time.perf_counter()
    target.next_tokens(batch)
    return time.perf_counter() - began


def _stride(target: Target) -> int:
    """Number of cache slots for each row."""
    slots, config = target.cache.slots, target.config
    return min(config.max_model_len, slots // min(config.rows, slots))


def _batch(vocab_size: int, rows: int, drafted: int, context: int, stride: int) -> ForwardBatch:
    """A step of ``rows`` current tokens, each followed by a chain of ``drafted`` tokens."""
    ids = (np.arange(rows * drafted, dtype=np.int32) * 7 + 1) % np.int32(vocab_size)
    kv_starts = [stride * row for row in range(rows)]
    plain = plain_batch(kv_starts, context, np.ones(1, np.int32))
    return replace(plain, drafts=chains(ids.reshape(rows, drafted)))


def kept(path: Path, make: Callable[[], StepCosts]) -> StepCosts:
    """Reads costs from a file. If the file cannot be read, measures and writes the costs.

    If the file cannot be written, costs are measured at each start.
    """
    try:
        return StepCosts.from_json(json.loads(path.read_bytes()))
    except (OSError, ValueError, KeyError, TypeError):
        made = make()
    write(path, made)
    return made


def write(path: Path, costs: StepCosts) -> None:
    """Writes costs to a file atomically."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path, sync=False) as file:
            file.write(json.dumps(costs.as_json()).encode())
    except OSError as error:
        log.warning("cannot keep step costs in %s: %s; the next start measures again", path, error)
