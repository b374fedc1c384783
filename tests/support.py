"""Waiting for what another thread or process does."""

import time
from collections.abc import Callable

# It only ends a broken test: a machine at a third of the usual speed stays far below.
DEADLINE_S = 300.0


def eventually(holds: Callable[[], object], pause_s: float = 0.02) -> None:
    """Poll until a condition holds."""
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline, f"did not come to hold within {DEADLINE_S} s"
        time.sleep(pause_s)
