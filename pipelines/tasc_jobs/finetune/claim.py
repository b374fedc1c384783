"""One run at a time in a folder: a second is refused, and so is what another kind of run made.

The system forgets a dead one's claim. It knows nothing of what runs there but its names.
"""

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tasc_jobs.finetune.errors import FinetuneError

LOCK = ".lock"
_LOOK_S = 0.1


@dataclass(frozen=True)
class Kind:
    """What runs in a folder.

    Attributes:
        name: Of one, in words; it stands in the folder's `LOCK`.
        writes: Names that its result has there. A folder that has one of these, and no lock, is
            somebody's own.
    """

    name: str
    writes: tuple[str, ...]


@contextmanager
def claimed(output: Path, kind: Kind, wait_s: float = 0.0) -> Iterator[None]:
    """Hold a folder for the block; it is made.

    Args:
        wait_s: For a process that ends just now.

    Raises:
        FinetuneError: Another process holds it, it has what would be written over, or it cannot be
            made, written to or locked.
    """
    try:
        output.mkdir(parents=True, exist_ok=True)
        if not (output / LOCK).is_file():
            _require_room(output, kind)
        lock = (output / LOCK).open("a+", encoding="utf-8")
    except OSError as error:
        raise FinetuneError(f"{output} cannot be written to ({error}); name another") from error
    with lock:
        until = time.monotonic() + wait_s
        while not _taken(lock, output):
            if time.monotonic() >= until:
                raise FinetuneError(
                    f"another process trains in {output}; wait until it ends, or name another "
                    "output"
                )
            time.sleep(_LOOK_S)
        _sign(lock, output, kind)
        yield


def _require_room(output: Path, kind: Kind) -> None:
    if there := [name for name in kind.writes if (output / name).exists()]:
        raise FinetuneError(
            f"{output} has {', '.join(there)} of something else, which {kind.name} would write "
            "over; name another output"
        )


def _taken(lock: IO[str], output: Path) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:  # network file systems without locks
        raise FinetuneError(
            f"the file system of {output} has no locks ({error}); name an output on another"
        ) from error
    return True


def _sign(lock: IO[str], output: Path, kind: Kind) -> None:
    lock.seek(0)
    signed = lock.read().strip()
    if signed and signed != kind.name:
        raise FinetuneError(f"{output} is the output of {signed}; name another for {kind.name}")
    if not signed:
        lock.write(kind.name + "\n")
        lock.flush()
