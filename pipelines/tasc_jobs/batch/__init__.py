"""Batch jobs over rows, with engines in Ray actors, that survive the end of any process."""

from tasc_jobs.batch.runner import discard, preview_job, run_job
from tasc_jobs.batch.start import Finish
from tasc_jobs.batch.work import JobProgress, JobReport, JobSpec, Record, Row, Strategy

__all__ = [
    "Finish",
    "JobProgress",
    "JobReport",
    "JobSpec",
    "Record",
    "Row",
    "Strategy",
    "discard",
    "preview_job",
    "run_job",
]
