"""What can go wrong while a tokenizer is enriched."""

from tasc_jobs.errors import JobError


class FamilyError(JobError):
    """A tokenizer of a kind that, with new tokens, would give texts back changed."""
