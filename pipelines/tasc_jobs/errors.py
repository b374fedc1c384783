"""Errors of jobs, and how a command reports them. Every message names the value and the way out."""

import os
import re
import sys
from pathlib import Path

_LINE_END = re.compile(r"\s*\n\s*")


class JobError(Exception):
    """Root of this package's own errors."""


class UsageError(JobError):
    """A command was used wrongly, and nothing was done; the exit code is 2."""

    def __init__(self, message: str) -> None:
        super().__init__(_LINE_END.sub(" ", message))  # one line, whatever a library said


def require_writable(option: str, path: Path) -> None:
    """Raises UsageError where no file can be written; called before anything slow begins."""
    folder = path.absolute().parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise UsageError(
            f"{option} is {path}, where no file can be written; name a file in a folder that is "
            "there and that you may write to"
        )


class EmptyCorpusError(JobError):
    """A task's corpus has no rows, or fewer than it had when the job began."""


class ClusterError(JobError):
    """The cluster or its machines cannot work now, whatever rows they are given."""


class RaySetupError(ClusterError):
    """Ray is not running where a job needs it, does not start, or would be open to the network."""


def known_errors() -> tuple[type[Exception], ...]:
    """The roots of our error trees, without importing torch or redis where nothing needs them."""
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
    """The message of an error; of one inside a Ray worker the last line, without the traceback."""
    if type(error).__module__.startswith("ray."):
        return str(error).strip().splitlines()[-1]
    return str(error)


def exit_code(error: Exception) -> int:
    """2 where a command was used wrongly, 1 where it failed."""
    return 2 if isinstance(error, UsageError) else 1


class FinetuneError(JobError):
    """A fine-tune cannot begin, go on or be saved; what was saved before stays as it is."""


class FamilyError(JobError):
    """A tokenizer of this kind would give texts back changed once it had new tokens."""
