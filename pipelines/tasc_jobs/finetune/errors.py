"""What can go wrong with a fine-tune."""

from tasc_jobs.errors import JobError


class FinetuneError(JobError):
    """A fine-tune cannot begin, go on or be saved; what was saved before stays as it is."""
