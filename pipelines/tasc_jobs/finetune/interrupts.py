"""Keeps Ctrl-C and SIGTERM from what must be whole. It ends nothing."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

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
    before = {each: signal.signal(each, lambda signum, _: came.append(signum)) for each in _SIGNALS}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
        for signum in came:
            signal.raise_signal(signum)
