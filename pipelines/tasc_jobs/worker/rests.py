"""Which tasks a worker leaves alone for a while, since its engines fail at them. It takes none."""

import time
from collections.abc import Callable
from typing import Final

from tasc_jobs.errors import ClusterError

MOST_FAULTS: Final = 5
_FIRST_S: Final = 5.0
_LONGEST_S: Final = 60.0


class Rests:
    """Faults of this worker, by task.

    Args:
        most: So many in a row, of all tasks together, are too many.
        first_s: How long a task rests behind its first fault, in seconds; twice as long behind each
            other one, a minute at most.
        now: Seconds on a clock that never goes back.
    """

    def __init__(
        self,
        most: int = MOST_FAULTS,
        first_s: float = _FIRST_S,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._most, self._first_s, self._now = most, first_s, now
        self._in_a_row = 0
        self._faults: dict[str, int] = {}
        self._until: dict[str, float] = {}

    @property
    def resting(self) -> list[str]:
        """Tasks to be left alone now."""
        return [task for task, until in self._until.items() if self._now() < until]

    def failed(self, task: str, why: str) -> float:
        """Have a task rest; for how long, in seconds.

        Raises:
            ClusterError: The worker has failed too often.
        """
        self._in_a_row += 1
        if self._in_a_row >= self._most:
            raise ClusterError(
                f"this worker's engines failed {self._in_a_row} times in a row (--max-faults), the"
                f" last time for task {task}: {why}. Its batches are left to other workers; see to"
                " that and start the worker again"
            )
        pause_s = min(_LONGEST_S, self._first_s * 2 ** min(self._faults.get(task, 0), 10))
        self._faults[task] = self._faults.get(task, 0) + 1
        self._until[task] = self._now() + pause_s
        return pause_s

    def busy(self, task: str) -> float:
        """Have a task rest whose batch another process here still works on; no fault is counted."""
        self._until[task] = self._now() + self._first_s
        return self._first_s

    def worked(self, task: str) -> None:
        """An engine of the task is up."""
        self._in_a_row = 0
        self._faults.pop(task, None)
