"""What processes hold while time goes by, and whether it grows. It asks the service nothing."""

import statistics
from dataclasses import dataclass, field

from fuzz_service import Process

_MIB = 2**20


@dataclass(frozen=True)
class Growth:
    """Of one process: the median of the last third of the time less that of the second.

    The first third is left out: caches fill, and Python and the allocator find their size.

    Attributes:
        memory_mib: Resident.
        files: Open file handles.
    """

    memory_mib: float
    files: float


@dataclass
class Looks:
    """What was seen of processes, and when."""

    _seen: list[tuple[float, dict[int, Process]]] = field(default_factory=list)

    def add(self, at: float, processes: dict[int, Process]) -> None:
        self._seen.append((at, processes))

    def growth(self, length: float) -> dict[str, Growth]:
        """By process, of those that lived through the last two of three thirds."""
        names = {pid: f"{p.role} {pid}" for _, seen in self._seen for pid, p in seen.items()}
        found = {name: self._of(pid, length) for pid, name in sorted(names.items())}
        return {name: growth for name, growth in found.items() if growth}

    def ended(self, length: float) -> list[str]:
        """Processes of the first third that are not there in the last look."""
        first = {pid: p for at, seen in self._seen if at < length / 3 for pid, p in seen.items()}
        last = self._seen[-1][1] if self._seen else {}
        return sorted(f"{p.role} {pid}" for pid, p in first.items() if pid not in last)

    def _of(self, pid: int, length: float) -> Growth | None:
        middle, last = (self._between(pid, length * i / 3, length * (i + 1) / 3) for i in (1, 2))
        if not (middle and last):
            return None
        memory, files = (
            statistics.median(getattr(p, what) for p in last)
            - statistics.median(getattr(p, what) for p in middle)
            for what in ("memory", "files")
        )
        return Growth(round(memory / _MIB, 2), files)

    def _between(self, pid: int, begin: float, end: float) -> list[Process]:
        return [seen[pid] for at, seen in self._seen if begin <= at < end and pid in seen]
