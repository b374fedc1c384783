"""Keeps Ctrl-C and SIGTERM from what must be whole. It ends nothing."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def held() -> Iterator[None]:
    """Signals that come while the block runs do behind it what they would have done in it.

    In a thread that is not the main one nothing is held: signals end none of its work in the
    middle.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before: dict[signal.Signals, Any] = {}
    try:
        for each in _SIGNALS:
            before[each] = signal.signal(each, lambda signum, _: came.append(signum))
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, signal.SIG_DFL if handler is None else handler)
        for signum in came:
            signal.raise_signal(signum)
