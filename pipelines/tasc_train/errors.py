"""Errors of training. Each message has the value and a solution."""

from tasc_jobs.errors import JobError


class FinetuneError(JobError):
    """A training cannot start, continue or be saved. Files saved earlier are not changed."""


class FamilyError(JobError):
    """With new tokens, a tokenizer of this kind would not decode texts back unchanged."""
