"""Which errors are ours to explain, and how to say them in one line. It ends nothing."""

import sys

from tasc_jobs.errors import JobError, UsageError
from tasc_store import StoreError


def known_errors() -> tuple[type[Exception], ...]:
    """The roots of our error trees, without importing torch for a command that needs none."""
    from tasc_draft import DraftError
    from tasc_runtime.errors import ServiceError
    from tasc_text import TextError

    roots = (JobError, StoreError, ServiceError, DraftError, TextError, ValueError, OSError)
    if "ray.data" not in sys.modules:
        return roots
    from ray.data.exceptions import ExecutionTimeoutError
    from ray.exceptions import RayError

    return (*roots, RayError, ExecutionTimeoutError)


def in_short(error: Exception) -> str:
    """What failed inside a Ray worker comes with its traceback; the last line says enough."""
    if type(error).__module__.startswith("ray."):
        return str(error).strip().splitlines()[-1]
    return str(error)


def exit_code(error: Exception) -> int:
    """2 where a command was used wrongly, 1 where it failed."""
    return 2 if isinstance(error, UsageError) else 1
