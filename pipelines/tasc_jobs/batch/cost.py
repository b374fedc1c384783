"""Speed and cost of a batch job: measured while it runs, or estimated from a dry run.

Prices are per engine-hour, because a job knows its engines and not their machines. An engine counts
from when it is loaded until it ends.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from tasc_jobs.batch.work import JobProgress, JobReport
from tasc_jobs.preview import Preview
from tasc_jobs.report.document import Bars, Curve, Lines, ReportDocument

_MOST_SAMPLES = 256  # even, so that halving keeps the newest sample
_WINDOW = 4  # samples over which the plotted speed is averaged, because rows finish in bursts
_SHOWN = {
    "rows_per_second": "{:,.2f} rows/s",
    "tokens_per_second": "{:,.0f} decoded tokens/s",
    "block_efficiency": "block efficiency {:.2f}",
    "repeats": "{:,} repeats",
    "engine_hours": "{:,.4f} engine-hours without loading",
    "price": "price {:,.4f}",
    "price_per_million_rows": "{:,.2f} per million rows",
}
_TERMS = "Tokens are those of decoded rows. Engine-hours exclude the time to load engines."


@dataclass(frozen=True)
class Cost:
    """The rows that a job finishes in some time, and the engine-hours that it needs.

    Attributes:
        rows: Number of finished rows, with and without an answer.
        repeats: Number of rows whose answer is copied from an equal row.
        tokens: Number of tokens of all decoded answers, end-of-sequence included.
        steps: Number of decoding steps of all rows together.
        engine_hours: Hours in which engines run, summed over the engines.
        price_per_hour: Price of an hour of one engine.
    """

    rows: int
    repeats: int
    tokens: float
    steps: float
    seconds: float
    engine_hours: float
    price_per_hour: float | None = None

    @property
    def as_json(self) -> dict[str, float | None]:
        """The figures; ratios of nothing, and prices without a price per hour, are None."""
        price = self.price_per_hour and self.price_per_hour * self.engine_hours
        speeds = _ratio(self.rows, self.seconds), _ratio(self.tokens, self.seconds)
        costs = self.engine_hours, price, _ratio(price, self.rows / 1e6)
        values = *speeds, _ratio(self.tokens, self.steps), self.repeats, *costs, self.seconds
        names = *_SHOWN, "seconds"
        return {name: value and round(value, 5) for name, value in zip(names, values, strict=True)}

    @property
    def in_words(self) -> str:
        """The duration, and the figures that are neither 0 nor None."""
        found = self.as_json
        parts = (shown.format(found[name]) for name, shown in _SHOWN.items() if found[name])
        return f"{timedelta(seconds=round(self.seconds))}: {', '.join(parts)}"


@dataclass(frozen=True)
class DryRun:
    """The first rows, answered with drafts and without, and the estimate for the whole job.

    Attributes:
        preview: Has at least one answered row.
        total: Number of rows of the job.
        compared: Number of valid rows at the beginning of the input that were searched for repeats.
        repeats: Number of compared rows to which the job would copy an answer. All rows of the job
            are expected to have the same share of repeats.
        price_per_hour: Price of an hour of one engine.
    """

    preview: Preview
    total: int
    engines: int
    compared: int
    repeats: int
    price_per_hour: float | None = None

    def cost(self, draft: bool) -> Cost:
        """Returns the estimate for the whole job.

        It assumes that the engines do not share a processor, and excludes the time to load them.
        """
        side = self.preview.drafted if draft else self.preview.plain
        repeats = round(self.total * self.repeats / self.compared)
        scale = (self.total - repeats) / self.preview.rows
        tokens, steps, seconds = side.tokens * scale, side.steps * scale, side.seconds * scale
        counts = self.total, repeats, tokens, steps, seconds / self.engines
        return Cost(*counts, seconds / 3600, self.price_per_hour)

    @property
    def as_json(self) -> dict[str, Any]:
        counts = {name: getattr(self.preview, name) for name in ("rows", "refused", "identical")}
        own = {name: getattr(self, name) for name in ("total", "engines", "compared", "repeats")}
        sides = {
            name: {**self.cost(draft).as_json, "forwards_per_answer": self.preview.forwards(draft)}
            for name, draft in (("plain", False), ("drafted", True))
        }
        return {**counts, **own, **sides, "speed_up": round(self.preview.speed_up, 3)}

    def page(self, task: str) -> ReportDocument:
        """Returns a report; its summary is the dry run in words."""
        found, sides = self.preview, (("without drafts", False), ("with drafts", True))
        summary = (
            f"{found.rows} rows answered{f', {found.refused} refused' if found.refused else ''}; "
            f"{found.identical} of {found.rows} answers identical with and without drafts",
            f"{self.repeats / self.compared:.1%} of the first {self.compared} valid rows would get "
            "the answer of an equal row; this share is assumed for the whole input",
            *(
                f"{name:14} {self.total} rows in about {self.cost(draft).in_words}, "
                f"{found.forwards(draft):.2f} forward passes an answer"
                for name, draft in sides
            ),
            f"speed-up from drafts: {found.speed_up:.2f} x",
        )
        bars = tuple((name, self.total / self.cost(draft).seconds) for name, draft in sides)
        plot = Bars("Estimated speed", "rows/s", bars)
        return ReportDocument(f"tasc generate {task}", summary, (), (plot,), _TERMS)


class Meter:
    """Measures the speed and cost of one start of a job. Call it with each `JobProgress`.

    Args:
        price: Price of an hour of one engine.

    Attributes:
        samples: Seconds and finished rows since the first call, and the number of running engines.
            Samples have about equal distances. Their number is bounded: if there are too many,
            every second one is dropped.
    """

    def __init__(self, price: float | None, now: Callable[[], float] = time.monotonic) -> None:
        self.samples: list[tuple[float, int, int]] = []
        self._price, self._now = price, now
        self._first = self._last = JobReport(0, 0, 0, 0)
        self._began, self._hours, self._distance = 0.0, 0.0, 1.0

    def __call__(self, job: JobProgress) -> None:
        now, samples, self._last = self._now(), self.samples, job.report
        if not samples:
            self._began, self._first = now, job.report
        else:
            before, _, engines = samples[-1]
            self._hours += engines * (now - self._began - before) / 3600
            if len(samples) > 1 and before - samples[-2][0] < self._distance:
                samples.pop()
        samples.append((now - self._began, job.report.rows - self._first.rows, job.engines))
        if len(samples) > _MOST_SAMPLES:
            del samples[1::2]
            self._distance *= 2

    @property
    def cost(self) -> Cost:
        names = "rows", "repeats", "tokens", "steps"
        counts = {name: getattr(self._last, name) - getattr(self._first, name) for name in names}
        seconds = self.samples[-1][0] if self.samples else 0.0
        return Cost(**counts, seconds=seconds, engine_hours=self._hours, price_per_hour=self._price)

    def page(self, task: str, *summary: str) -> ReportDocument:
        """Returns a report with a plot of the rows per second over time."""
        found = self.samples
        pairs = [(found[max(0, i - _WINDOW)], end) for i, end in enumerate(found)][1:]
        speeds = [(b[1] - a[1]) / (b[0] - a[0]) if b[0] > a[0] else 0.0 for a, b in pairs]
        lines = (Curve("finished rows", [end[0] for _, end in pairs], speeds),)
        plot = Lines("Speed over time", "seconds since the start", "rows/s", lines)
        return ReportDocument(f"tasc generate {task}", summary, (), (plot,), _TERMS)


def _ratio(count: float | None, per: float) -> float | None:
    return count / per if count and per else None
