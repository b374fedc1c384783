"""How far a job of several stages is, and how long each took. It does not know what they do."""

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Self, TextIO, TypeAlias

from tasc_jobs.runtime.progress import Progress, note

StageProgress: TypeAlias = Callable[[str, int, int | None], None]
"""Told the stage, how much of it is done, and how much it is in all, None if nobody knows."""


def silent(stage: str, done: int, total: int | None) -> None:
    """A `StageProgress` that nobody watches."""


class Stages:
    """Shows each stage of a job as a `Progress` of its own; call it as a `StageProgress`.

    Args:
        description: One or two words, before the stage's name.
        units: What is counted in each stage, in the plural.
        notes: What to say where a stage begins, of those that need it.
        stream: Where to write; stderr if None.

    Attributes:
        seconds: Of each stage so far, by name; a stage ends where the next begins.
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
            shown = Progress(name, total, self._units[stage], stream=self._stream)
            self._bar = self._open.enter_context(shown)
            self._stage, self._done, self._started = stage, done, time.perf_counter()
            self._bar.resume(done)
        self._bar.advance(done - self._done)
        self._done = done

    def tell(self, text: str) -> None:
        """Words to show of the stage that runs, in place of those told before."""
        if self._stage is not None:
            self._bar.tell(text)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close()

    def _close(self) -> None:
        self._open.close()
        if self._stage is not None:
            spent = time.perf_counter() - self._started
            self.seconds[self._stage] = self.seconds.get(self._stage, 0.0) + spent
        self._stage = None
