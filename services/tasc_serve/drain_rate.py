"""How fast requests end here, and so when one that finds no place should come again."""

import math
import time
from collections import deque
from collections.abc import Callable

_KEPT = 64  # endings that the rate is measured over
_LONGEST_S = 60


class DrainRate:
    """The rate at which places become free, over the last endings."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ends: deque[float] = deque(maxlen=_KEPT)

    def ended(self) -> None:
        """A place has become free."""
        self._ends.append(self._clock())

    def idle(self) -> None:
        """There is nothing left to end: time until more comes says nothing about the rate."""
        self._ends.clear()

    def per_second(self) -> float:
        """0 while nothing is known; it falls while nothing ends."""
        if len(self._ends) < 2:
            return 0.0
        spent = self._clock() - self._ends[0]
        return (len(self._ends) - 1) / spent if spent > 0 else math.inf

    def retry_after_s(self, ahead: int) -> int:
        """Whole seconds until as many as ``ahead`` have ended: at least 1, at most 60.

        1 where nothing has ended yet: nothing speaks for waiting longer.
        """
        rate = self.per_second()
        if rate == 0:
            return 1
        return max(1, min(math.ceil(ahead / rate), _LONGEST_S))
