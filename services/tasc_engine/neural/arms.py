"""Which of two ways to draft is the faster one here, found out by trying both now and then.

What a step takes depends on machine, target and load, so both are timed where they run: tokens a
second of steps with and without the drafter. It knows no drafts.
"""

import time
from collections.abc import Callable

TRIAL = 16  # steps of one way before the other is tried, at first and again and again
LONGEST = 2048  # steps between two trials of the slower one
_FADE = 0.5  # of what earlier trials said


class Arms:
    """Says before each step whether to take the costly way (True) or the cheap one.

    Args:
        clock: Seconds from anywhere.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._rates: dict[bool, float] = {}
        self._costly, self._best = True, True
        self._tries, self._left, self._stretch = True, TRIAL, TRIAL
        self._began: float | None = None
        self._tokens, self._seconds = 0, 0.0

    def begin(self) -> bool:
        """A step begins now, behind the one before; whether it goes the costly way."""
        self._end()
        self._began = self._clock()
        return self._costly

    def emitted(self, tokens: int) -> None:
        """Tokens that steps brought."""
        self._tokens += tokens

    def idle(self) -> None:
        """Nobody waits for an answer any more: the step ends now, and the next is still to come."""
        self._end()
        self._began = None

    def _end(self) -> None:
        if self._began is None:
            return
        self._seconds += self._clock() - self._began
        self._left -= 1
        if self._left == 0:
            self._turn()

    def _turn(self) -> None:
        """A stretch of one way has ended; what comes next."""
        rate = self._tokens / max(self._seconds, 1e-9)
        before = self._rates.get(self._costly, rate)
        self._rates[self._costly] = _FADE * before + (1 - _FADE) * rate
        self._tokens, self._seconds = 0, 0.0
        if not self._tries or len(self._rates) < 2:
            self._costly, self._left, self._tries = not self._costly, TRIAL, True
            return
        best = self._rates[True] >= self._rates[False]
        self._stretch = min(2 * self._stretch, LONGEST) if best == self._best else TRIAL
        self._costly, self._left, self._tries = best, self._stretch, False
        self._best = best


class Always:
    """Takes the costly way at every step: for who measures it."""

    def begin(self) -> bool:
        return True

    def emitted(self, tokens: int) -> None:
        pass

    def idle(self) -> None:
        pass
