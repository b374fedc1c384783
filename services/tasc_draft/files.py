"""Folders for a user's files, and files that replace older ones only once they are complete."""

import glob
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

_OURS = "tasc-serve"
_LEFT_S = 86_400  # a file that was not written to for this long was left by a killed process


@contextmanager
def whole_file(path: Path, *, sync: bool = True) -> Iterator[IO[bytes]]:
    """Opens a file for writing. It replaces ``path`` when the block ends without an error.

    Until then, and if the process is killed, ``path`` keeps its content. Several processes may
    write the same file: each process writes its own copy, and the last process to finish wins. The
    copies are hidden, so that readers of the folder leave them out.

    Args:
        sync: Whether the file is on disk when the block ends, so that it survives a power failure.
    """
    for left in unfinished_files(path):
        with suppress(OSError):  # the file is gone, or belongs to another user
            if left.stat().st_mtime < time.time() - _LEFT_S:
                left.unlink()
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
    try:
        with partial.open("wb") as file:
            yield file
        if sync:
            flush(partial)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    if sync:
        flush(path.parent)


def unfinished_files(path: Path) -> list[Path]:
    """Files of `whole_file` for ``path``, being written or left by killed processes."""
    return list(path.parent.glob(f".{glob.escape(path.name)}.*.partial"))


def flush(path: Path) -> None:
    """Flushes a file, or the entries of a folder, to the disk.

    Raises:
        OSError: The file or folder cannot be written.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def cache_folder() -> Path:
    """Folder for files that can be recreated: in XDG_CACHE_HOME, by default ``~/.cache``."""
    return _home("XDG_CACHE_HOME", ".cache") / _OURS


def data_folder() -> Path:
    """Folder for permanent files: in XDG_DATA_HOME, by default ``~/.local/share``."""
    return _home("XDG_DATA_HOME", ".local/share") / _OURS


def _home(variable: str, usual: str) -> Path:
    # By the XDG specification, an empty variable counts as unset and a relative path is ignored.
    chosen = Path(os.environ.get(variable, ""))
    return chosen if chosen.is_absolute() else Path.home() / usual
