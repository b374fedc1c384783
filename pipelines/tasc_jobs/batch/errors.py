"""How a batch job may end before it is done. Its state is kept each time; it is resumed by name."""

from tasc_jobs.errors import ClusterError, JobError


class JobBusy(JobError):
    """Another process works on the same job."""


class JobChanged(JobError):
    """The job was begun with another input or other settings."""


class JobStalled(JobError):
    """No row was finished for longer than it may take, or no engine came up."""


class NoEngine(JobStalled, ClusterError):
    """No engine came up in all that time."""


class EngineFailed(ClusterError):
    """Engines fail before they have seen a row, or lose the store: its machine is to blame."""


class TooManyErrors(JobError):
    """More rows were refused or failed than the job may have."""
