"""Errors of training. Each message names the faulty value and a solution."""

from tasc_jobs.errors import JobError


class FinetuneError(JobError):
    """A training cannot start, continue or be saved. Files saved earlier are not changed."""


class FamilyError(JobError):
    """New tokens cannot be added to this tokenizer.

    With them, texts would not decode unchanged, or transformers would encode texts differently.
    """
