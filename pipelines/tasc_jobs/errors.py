"""Errors of jobs, and how a command reports them.

Each message names the refused value and a solution.
"""

import os
import re
import sys
from pathlib import Path

_LINE_END = re.compile(r"\s*\n\s*")


class JobError(Exception):
    """Base class of this package's errors."""


class UsageError(JobError):
    """A command was used incorrectly and did nothing; the exit code is 2."""

    def __init__(self, message: str) -> None:
        super().__init__(_LINE_END.sub(" ", message))  # always one line


def require_writable(option: str, path: Path) -> None:
    """Raises UsageError if the file cannot be written. Call this before anything slow begins."""
    folder = path.absolute().parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise UsageError(
            f"{option} is {path}, where no file can be written; name a file in an existing folder "
            "that you may write to"
        )


class EmptyCorpusError(JobError):
    """A task's corpus has no rows, or fewer than at the start of the job."""


class ClusterError(JobError):
    """The cluster or its machines do not work now, regardless of the rows."""


class RaySetupError(ClusterError):
    """Ray is needed but not running, does not start, or would be open to the network."""


def known_errors() -> tuple[type[Exception], ...]:
    """Returns the base classes of known errors, those of Ray only if Ray Data was imported."""
    from tasc_draft import DraftError
    from tasc_runtime.errors import ServiceError
    from tasc_store import StoreError
    from tasc_text import TextError

    roots = (JobError, StoreError, ServiceError, DraftError, TextError, ValueError, OSError)
    if "ray.data" not in sys.modules:
        return roots
    from ray.data.exceptions import ExecutionTimeoutError
    from ray.exceptions import RayError

    return (*roots, RayError, ExecutionTimeoutError)


def in_short(error: Exception) -> str:
    """Returns the message of an error; for errors in a Ray worker, the traceback's last line."""
    if type(error).__module__.startswith("ray."):
        return str(error).strip().splitlines()[-1]
    return str(error)


def exit_code(error: Exception) -> int:
    """Returns 2 if a command was used incorrectly, 1 if it failed."""
    return 2 if isinstance(error, UsageError) else 1
