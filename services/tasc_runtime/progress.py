"""Shows progress of a job and its stages on stderr: a bar on a terminal, else regular lines.

Stdout is left for results.
"""

import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Protocol, Self, TextIO, TypeAlias

StageProgress: TypeAlias = Callable[[str, int, int | None], None]
"""Called with the stage, how much of it is done, and its total, None if unknown."""


def note(text: str, stream: TextIO | None = None) -> None:
    """Writes one line for waiting users; to stderr if no stream is given."""
    print(text, file=stream or sys.stderr, flush=True)


class Clock:
    """Writes lines for waiting users, each with the seconds since its creation."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def note(self, text: str) -> None:
        note(f"{time.monotonic() - self._began:5.1f} s  {text}")


class Progress(Protocol):
    """Shows how much is done, the rate and the time left while its block runs.

    The time left is shown from the second `advance` on, and computed from the time after the first
    one, because the time before it is mostly preparation, such as compiling.
    """

    def advance(self, count: int = 1) -> None:
        """Adds ``count`` to the number done; 0 has no effect."""

    def resume(self, count: int) -> None:
        """Counts items done before the start; the rate does not include them."""

    def tell(self, text: str) -> None:
        """Replaces the text shown after the rate."""

    def expect(self, total: int) -> None:
        """Sets the total, if it becomes known only later."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *error: object) -> None: ...


def show_progress(
    description: str,
    total: int | None,
    unit: str = "rows",
    *,
    every_s: float = 5.0,
    stream: TextIO | None = None,
) -> Progress:
    """Shows a bar on a terminal, lines elsewhere.

    Args:
        description: One or two words.
        total: The total number, or None if unknown.
        unit: Name of the counted items, in the plural.
        every_s: Without a terminal, minimum seconds between two lines; the last line always
            appears.
        stream: Where to write; stderr if None.
    """
    out = stream or sys.stderr
    if out.isatty():
        return _Bar(description, total, unit, out)
    return _Lines(description, total, unit, out, every_s)


class _Lines:
    def __init__(
        self, description: str, total: int | None, unit: str, out: TextIO, every_s: float
    ) -> None:
        self._description, self._total, self._unit = description, total, unit
        self._out, self._every_s = out, every_s
        self._done = self._first = self._before = 0
        self._told = ""
        self._started = self._written = self._first_at = time.monotonic()

    def __enter__(self) -> Self:
        self._started = self._written = time.monotonic()
        return self

    def __exit__(self, *error: object) -> None:
        self._write()

    def advance(self, count: int = 1) -> None:
        if not count:
            return
        if self._done == self._before:
            self._first, self._first_at = self._before + count, time.monotonic()
        self._done += count
        if time.monotonic() - self._written >= self._every_s:
            self._write()

    def resume(self, count: int) -> None:
        self._done = self._before = self._done + count

    def tell(self, text: str) -> None:
        self._told = text

    def expect(self, total: int) -> None:
        self._total = total

    def _write(self) -> None:
        self._written = time.monotonic()
        elapsed = self._written - self._started
        rate = (self._done - self._before) / elapsed if elapsed > 0 else 0.0
        parts = [f"{self._description}: {self._done}{self._of_total()} {self._unit}"]
        parts.append(f"{_short(rate)} {self._unit}/s")
        if self._told:
            parts.append(self._told)
        if (left := self._seconds_left()) is not None:
            parts.append(f"{left:.0f} s left")
        print(", ".join(parts), file=self._out, flush=True)

    def _seconds_left(self) -> float | None:
        since, spent = self._done - self._first, self._written - self._first_at
        if self._total is None or not since or spent <= 0:
            return None
        return max(0, self._total - self._done) * spent / since

    def _of_total(self) -> str:
        return "" if self._total is None else f"/{self._total}"


def _short(rate: float) -> str:
    """Formats a rate as a whole number; a slow rate is not shown as 0."""
    return f"{rate:.0f}" if rate >= 10 else f"{rate:.2g}"


class _Bar:
    def __init__(self, description: str, total: int | None, unit: str, out: TextIO) -> None:
        # Imported here, since training machines may not have rich.
        from rich import progress
        from rich.console import Console
        from rich.text import Text

        class Rate(progress.ProgressColumn):
            def render(self, task: progress.Task) -> Text:
                return Text("" if task.speed is None else f"{_short(task.speed)} {unit}/s")

        self._rich = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            Rate(),
            progress.TextColumn("{task.fields[told]}"),
            progress.TimeRemainingColumn(),
            console=Console(file=out),
        )
        self._task = self._rich.add_task(description, total=total, told="")

    def __enter__(self) -> Self:
        self._rich.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._rich.stop()

    def advance(self, count: int = 1) -> None:
        if count:
            self._rich.advance(self._task, count)

    def resume(self, count: int) -> None:
        if count:
            self._rich.reset(self._task, completed=count)

    def tell(self, text: str) -> None:
        self._rich.update(self._task, told=text)

    def expect(self, total: int) -> None:
        self._rich.update(self._task, total=total)


def silent(stage: str, done: int, total: int | None) -> None:
    """A `StageProgress` that shows nothing."""


class Stages:
    """Shows each stage of a job with a separate `Progress`; call it as a `StageProgress`.

    Args:
        description: One or two words, before the stage's name.
        units: Names of the counted items of each stage, in the plural.
        notes: Texts to show at the beginning of some stages.
        stream: Where to write; stderr if None.

    Attributes:
        seconds: Duration of each stage so far, by name; a stage ends when the next begins.
    """

    def __init__(
        self,
        description: str,
        units: Mapping[str, str],
        *,
        notes: Mapping[str, str] | None = None,
        stream: TextIO | None = None,
    ) -> None:
        self.seconds: dict[str, float] = {}
        self._description, self._units, self._stream = description, units, stream
        self._notes = notes or {}
        self._open = ExitStack()
        self._stage: str | None = None
        self._done = 0
        self._started = 0.0

    def __call__(self, stage: str, done: int, total: int | None) -> None:
        if stage != self._stage:
            self._close()
            name = f"{self._description}: {stage}"
            if said := self._notes.get(stage):
                note(f"{name}: {said}", self._stream)
            shown = show_progress(name, total, self._units[stage], stream=self._stream)
            self._bar = self._open.enter_context(shown)
            self._stage, self._done, self._started = stage, done, time.perf_counter()
            self._bar.resume(done)
        self._bar.advance(done - self._done)
        self._done = done

    def tell(self, text: str) -> None:
        """Replaces the text shown for the running stage."""
        if self._stage is not None:
            self._bar.tell(text)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._close()

    def _close(self) -> None:
        self._open.close()
        if self._stage is not None:
            spent = time.perf_counter() - self._started
            self.seconds[self._stage] = self.seconds.get(self._stage, 0.0) + spent
        self._stage = None
