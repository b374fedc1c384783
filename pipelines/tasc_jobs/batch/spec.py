"""What a batch job is given: one frozen value, checked. It starts nothing."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tasc_serve.settings import EngineSettings


@dataclass(frozen=True)
class JobSpec:
    """One job.

    Attributes:
        folder: Where its state is; made if its parent is there.
        pins: For JSON: whatever changes the result, but for the versions of task and index, which
            are those of the first start.
        actors: Most engines; fewer where the cluster has no room.
        actor_cpus: Logical CPUs of each.
        actor_gpus: GPUs of each; without any, engines run on the CPU.
        total: Rows, if known; for progress only.
        max_unflushed: Most results in Redis, and rows in memory, that are in no file.
        part_rows: Rows of a part file at most.
        part_seconds: A part is written after so long, however few its rows.
        max_errors: More rows without an answer end the job; unset: any number may be.
        stall_s: No row finished for so long, in seconds, ends the job.
        store_wait_s: Redis may be away so long, in seconds.
        restart: Throw away what an earlier start has done.
    """

    url: str
    task: str
    folder: Path
    pins: Mapping[str, Any]
    engine: EngineSettings = field(default_factory=EngineSettings)
    actors: int = 1
    actor_cpus: float = 0.5
    actor_gpus: float = 0.0
    total: int | None = None
    max_unflushed: int = 8192
    part_rows: int = 1000
    part_seconds: float = 30.0
    max_errors: int | None = None
    stall_s: float = 600.0
    store_wait_s: float = 60.0
    restart: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.part_rows <= self.max_unflushed:
            raise ValueError(
                f"part_rows is {self.part_rows}; it goes from 1 to max_unflushed, which is "
                f"{self.max_unflushed}"
            )
