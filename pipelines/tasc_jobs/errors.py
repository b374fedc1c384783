"""What can go wrong with a job. Every message names the value and the way out."""

import re

_LINE_END = re.compile(r"\s*\n\s*")


class JobError(Exception):
    """Root of this package's own errors."""


class UsageError(JobError):
    """What a command was given will not do, and nothing was done; its exit code is 2."""

    def __init__(self, message: str) -> None:
        super().__init__(_LINE_END.sub(" ", message))  # one line, whatever a library said


class EmptyCorpusError(JobError):
    """A task's corpus has no rows, or fewer than it had when the job began."""


class ClusterError(JobError):
    """The cluster or its machines cannot work now, whatever rows they are given."""


class RaySetupError(ClusterError):
    """No Ray is running where a job needs one, or it would be open to the network."""
