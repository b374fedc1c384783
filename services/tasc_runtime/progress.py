"""Shows progress of a job and its stages on stderr: a bar on a terminal, else regular lines.

Stdout is left for results.
"""

import math
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Self, TextIO, TypeAlias

if TYPE_CHECKING:
    import rich.progress

StageProgress: TypeAlias = Callable[[str, int, int | None], None]
"""Called with the stage, the number of items done, and the total number (None: unknown)."""


def note(text: str, stream: TextIO | None = None) -> None:
    """Writes one line for waiting users; to stderr if no stream is given."""
    print(text, file=stream or sys.stderr, flush=True)


class Clock:
    """Writes lines for waiting users, each with the seconds since its creation."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def note(self, text: str) -> None:
        note(f"{time.monotonic() - self._began:5.1f} s  {text}")


class Progress:
    """Shows the number of items done, the rate and the time left while its block runs.

    The time left is computed from the time after the first `advance`, because the time before
    that is mostly preparation, such as compiling.
    """

    def __init__(self, bar: "rich.progress.Progress", unit: str, every_s: float) -> None:
        self._bar, self._unit, self._every_s = bar, unit, every_s
        self._task = bar.tasks[0]
        self._resumed = 0
        self._written = time.monotonic()

    def advance(self, count: int = 1) -> None:
        """Adds ``count`` to the number done; 0 has no effect."""
        if not count:
            return
        self._bar.advance(self._task.id, count)
        if self._bar.disable and time.monotonic() - self._written >= self._every_s:
            self._write()

    def resume(self, count: int) -> None:
        """Counts items done before the start; the rate does not include them."""
        self._resumed = count
        self._bar.reset(self._task.id, completed=count)

    def set_suffix(self, text: str) -> None:
        """Replaces the text shown after the rate."""
        self._task.fields["suffix"] = text

    def set_total(self, total: int) -> None:
        """Sets the total, if it becomes known only later."""
        self._bar.update(self._task.id, total=total)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()
        if self._bar.disable:
            self._write()

    def _write(self) -> None:
        """Writes a line, as there is no terminal."""
        self._written = time.monotonic()
        task, unit = self._task, self._unit
        rate = (task.completed - self._resumed) / (task.elapsed or math.inf)
        total = "" if task.total is None else f"/{task.total}"
        parts = [f"{task.description}: {task.completed}{total} {unit}", f"{_short(rate)} {unit}/s"]
        if suffix := task.fields["suffix"]:
            parts.append(suffix)
        if not task.finished and task.time_remaining is not None:
            parts.append(f"{task.time_remaining:.0f} s left")
        print(", ".join(parts), file=self._bar.console.file, flush=True)


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
    # Imported here, because many processes show no progress.
    from rich import progress
    from rich.console import Console
    from rich.text import Text

    class Rate(progress.ProgressColumn):
        def render(self, task: progress.Task) -> Text:
            return Text("" if task.speed is None else f"{_short(task.speed)} {unit}/s")

    out = stream or sys.stderr
    bar = progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        Rate(),
        progress.TextColumn("{task.fields[suffix]}"),
        progress.TimeRemainingColumn(),
        console=Console(file=out),
        get_time=time.monotonic,
        disable=not out.isatty(),
    )
    bar.add_task(description, total=total, suffix="")
    return Progress(bar, unit, every_s)


def _short(rate: float) -> str:
    """Formats a rate as a whole number; a slow rate is not shown as 0."""
    return f"{rate:.0f}" if rate >= 10 else f"{rate:.2g}"


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
            if text := self._notes.get(stage):
                note(f"{name}: {text}", self._stream)
            shown = show_progress(name, total, self._units[stage], stream=self._stream)
            self._bar = self._open.enter_context(shown)
            self._stage, self._done, self._started = stage, done, time.perf_counter()
            self._bar.resume(done)
        self._bar.advance(done - self._done)
        self._done = done

    def set_suffix(self, text: str) -> None:
        """Replaces the text shown for the running stage."""
        if self._stage is not None:
            self._bar.set_suffix(text)

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
