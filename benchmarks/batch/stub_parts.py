"""A job of parts without a model, which `bench_parts` runs in a process of its own.

    python benchmarks/batch/stub_parts.py REDIS_URL TASK INPUT OUTPUT

The engine is a stub: it answers each row at once with the same text. All else is the job's own:
the plan, the actor that reads rows and writes parts, the manifest. The program prints one JSON
object with the memory of this process, which drives the job, and of its engine.
"""

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

if __name__ == "__main__":  # modules are found from the repository's root, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))

from killable import pids
from tasc_jobs.batch import parts
from tasc_jobs.batch.engines import EngineActor
from tasc_jobs.batch.inputs import Source
from tasc_jobs.batch.parts import PartActor, PartSpec
from tasc_jobs.batch.work import JobProgress, Record, Row
from tasc_jobs.ray_local import local_ray

TOKENS = list(range(100, 120))
CONTENT = {
    "text": "intent: alarm_set, slot fills: {time: nine am, date: friday}",
    "tokens": TOKENS,
    "finish_reason": "stop",
    "model": "stub",
    "adapter": None,
    "index_version": None,
}


class StubAnswering:
    """Answers all rows with the same text, without a model."""

    def work(self, rows: Sequence[Row]) -> list[Record]:
        return [Record.of(row, CONTENT, None, len(TOKENS), 1) for row in rows]


class StubActor(PartActor):
    """The actor of parts, with a stub in place of its engine."""

    def load(self) -> None:
        super().load()
        self._answering = StubAnswering()  # type: ignore[assignment]

    def _built(self) -> Any:
        """No engine."""


class StubSpec(PartSpec):
    @property
    def actor(self) -> type[EngineActor]:
        return StubActor


def main() -> None:
    url, task, source, output = sys.argv[1:]
    engines: dict[int, float] = {}  # the peak of each engine's process, by its id

    def progress(found: JobProgress) -> None:
        if found.engines and not engines:
            engines.update(dict.fromkeys(pids("ray::StubActor"), 0.0))
        for pid in engines:
            engines[pid] = max(engines[pid], memory("VmHWM", pid))

    with local_ray(), patch.object(parts, "PartSpec", StubSpec):
        Path("/proc/self/clear_refs").write_text("5")  # the peak is that of the job alone
        before, began = memory("VmRSS"), time.monotonic()
        plan = parts.Plan.of(Source.of(source), output)
        report = parts.generate_parts(url, task, plan, progress=progress)
        found = {
            "seconds": time.monotonic() - began,
            "before_mb": before,
            "peak_mb": memory("VmHWM"),
            "engine_peak_mb": max(engines.values(), default=None),
        }
    print(json.dumps({**asdict(report), **found}))


def memory(field: str, pid: int | None = None) -> float:
    """A field of the memory of a process, in MB; 0 if the process has ended."""
    try:
        lines = Path(f"/proc/{pid or os.getpid()}/status").read_text().splitlines()
    except OSError:
        return 0.0
    values = [line.split()[1] for line in lines if line.startswith(f"{field}:")]
    return int(values[0]) * 1024 / 1e6 if values else 0.0


if __name__ == "__main__":
    main()
