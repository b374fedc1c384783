"""How far a batch job is, in words for people who wait. It counts nothing itself."""

import time
from collections.abc import Callable

from tasc_jobs.batch.preview import Preview
from tasc_jobs.batch.work import JobProgress
from tasc_jobs.runtime.progress import Progress


class BatchProgress:
    """Shows a job on a progress bar; call it with each `JobProgress`."""

    def __init__(self, bar: Progress, now: Callable[[], float] = time.monotonic) -> None:
        self._bar, self._now = bar, now
        self._began: tuple[float, int] | None = None
        self._done = 0

    def __call__(self, found: JobProgress) -> None:
        if self._began is None:
            self._began = self._now(), found.tokens
            self._done = found.resumed
            self._bar.resume(found.resumed)
            if found.total is not None:
                self._bar.expect(found.total)
        self._bar.tell(self._words(found, *self._began))
        self._bar.advance(max(0, found.done - self._done))
        self._done = max(self._done, found.done)

    def _words(self, found: JobProgress, began: float, tokens: int) -> str:
        if not found.engines and found.done <= found.resumed:
            return "engines are coming up"
        spent = self._now() - began
        parts = [f"{(found.tokens - tokens) / spent:,.0f} tokens/s"] if spent > 0 else []
        if found.steps:
            parts.append(f"{found.tokens / found.steps:.2f} tokens a step")
        if found.errors:
            parts.append(f"{found.errors} errors")
        return ", ".join(parts)


def preview_in_words(found: Preview, total: int, engines: int) -> str:
    """What a dry run found, and what it makes of the whole job."""
    lines = [
        f"{found.rows} rows answered{f', {found.refused} refused' if found.refused else ''}; "
        f"{found.identical} of {found.rows} answers identical with and without drafts"
    ]
    for name, side, draft in (
        ("without drafts", found.plain, False),
        ("with drafts", found.drafted, True),
    ):
        seconds = found.seconds_of(total, engines, draft)
        lines.append(
            f"{name:14} {side.tokens / side.seconds:8,.0f} tokens/s, {side.block_efficiency:5.2f} "
            f"tokens a step, {total} rows in about {_duration(seconds or 0.0)}"
        )
    return "\n".join([*lines, f"speed-up by drafts: {found.speed_up:.2f} x"])


def preview_as_json(found: Preview, total: int, engines: int) -> dict[str, object]:
    """The same, for `--json`; seconds are those of the whole job."""

    def side(draft: bool) -> dict[str, float | None]:
        of = found.drafted if draft else found.plain
        seconds = found.seconds_of(total, engines, draft)
        return {
            "tokens_per_second": round(of.tokens / of.seconds, 1),
            "block_efficiency": round(of.block_efficiency, 3),
            "job_seconds": None if seconds is None else round(seconds, 1),
        }

    return {
        "rows": found.rows,
        "refused": found.refused,
        "identical": found.identical,
        "total": total,
        "engines": engines,
        "plain": side(False),
        "drafted": side(True),
        "speed_up": round(found.speed_up, 3),
    }


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return (
        f"{hours} h {minutes} min"
        if hours
        else f"{minutes} min {rest} s"
        if minutes
        else f"{rest} s"
    )
