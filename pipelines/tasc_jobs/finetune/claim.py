"""One run at a time in a folder of its own: a second is refused, and so is anybody else's folder.

The system forgets a dead one's claim. It knows nothing of what runs there.
"""

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from tasc_jobs.finetune.errors import FinetuneError

LOCK = ".lock"
_LOOK_S = 0.1


@contextmanager
def claimed(output: Path, wait_s: float = 0.0) -> Iterator[None]:
    """Hold a folder for the block; it is made, unless it has files and no run has made them.

    Args:
        wait_s: For a process that ends just now.

    Raises:
        FinetuneError: Another process holds it, it is no run's, or it cannot be made or written to.
    """
    try:
        output.mkdir(parents=True, exist_ok=True)
        if any(output.iterdir()) and not (output / LOCK).is_file():
            raise FinetuneError(f"{output} has files of something else; name a new or empty folder")
        lock = (output / LOCK).open("a")
    except OSError as error:
        raise FinetuneError(f"{output} cannot be written to ({error}); name another") from error
    with lock:
        until = time.monotonic() + wait_s
        while not _taken(lock):
            if time.monotonic() >= until:
                raise FinetuneError(
                    f"another process trains in {output}; wait until it ends, or name another "
                    "output"
                )
            time.sleep(_LOOK_S)
        yield


def _taken(lock: IO[str]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
