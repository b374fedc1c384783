"""Starts sides, calls them in turn, and keeps what they say. Their end is `engine_loop`."""

import json
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from engine_loop import WARM_UP_ROWS, Job, Ran

HERE = Path(__file__).resolve().parent


class SideFailed(Exception):
    """A side ended by itself; the message is the last line it wrote."""


@dataclass
class Measured:
    """All timed runs of a setting of a side, in their order."""

    side: str
    setting: str
    runs: list[Ran] = field(default_factory=list)
    memory_mb: float = 0.0

    @property
    def name(self) -> str:
        kind, batch = self.setting.split()
        return f"{self.side} {kind} b={batch}"


class Side:
    """A process with one engine; it waits between calls.

    Raises:
        SideFailed: It did not load, or fails in a call.
    """

    def __init__(
        self, name: str, job: Job, settings: Sequence[str], folder: Path, python: str | None = None
    ) -> None:
        self.name, self.settings = name, settings
        file, self._log = folder / f"{name}.json", folder / f"{name}.log"
        file.write_text(json.dumps(asdict(job)), encoding="utf-8")
        script = HERE / f"engine_side_{name.split()[0]}.py"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [python or sys.executable, str(script), str(file)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
            )  # fmt: skip
        self._read()

    def close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def call(self, **call: Any) -> Any:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # what it said last is in its log
            print(json.dumps(call), file=self._process.stdin, flush=True)
        return self._read()

    def run(self, setting: str, rows: int) -> tuple[Ran, float]:
        """A run and the most megabytes the side has had so far."""
        found = self.call(setting=setting, rows=rows)
        memory = found.pop("memory_mb")
        return Ran(**found), memory

    def _read(self) -> Any:
        assert self._process.stdout is not None
        if line := self._process.stdout.readline():
            return json.loads(line)
        self._process.wait()
        said = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        raise SideFailed(f"{self.name}: {said[-1] if said else 'it ended without a word'}")


def in_turn(sides: Sequence[Side], rows: int, repeats: int, tick: Any) -> list[Measured]:
    """Run every setting of every side, warmed up first; every other repeat the other way round."""
    places = [(side, Measured(side.name, s)) for side in sides for s in side.settings]
    for side, found in places:
        side.run(found.setting, min(rows, WARM_UP_ROWS))
    for repeat in range(repeats):
        for side, found in places if repeat % 2 == 0 else reversed(places):
            ran, found.memory_mb = side.run(found.setting, rows)
            found.runs.append(ran)
            tick()
    return [found for _, found in places]
