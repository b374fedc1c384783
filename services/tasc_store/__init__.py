"""Tasks, corpora and versioned draft indexes in Redis. It knows no tokens, no model, no service."""

from tasc_store.artifacts import Artifact, ArtifactStore
from tasc_store.cache import ArtifactCache
from tasc_store.client import connect, redact, translated
from tasc_store.corpora import Appended, CorpusRow, CorpusStore
from tasc_store.embedded import EmbeddedRedis, open_url
from tasc_store.errors import (
    CorruptArtifact,
    FingerprintMismatch,
    StoreError,
    StoreFull,
    StoreReadOnly,
    StoreTooOld,
    StoreUnreachable,
    TaskChanged,
    TaskInUse,
    UnknownTask,
    UnknownVersion,
)
from tasc_store.sampling_defaults import SamplingDefaults
from tasc_store.task_record import TaskRecord
from tasc_store.tasks import Newest, TaskStore

__all__ = [
    "Appended",
    "Artifact",
    "ArtifactCache",
    "ArtifactStore",
    "CorpusRow",
    "CorpusStore",
    "CorruptArtifact",
    "EmbeddedRedis",
    "FingerprintMismatch",
    "Newest",
    "SamplingDefaults",
    "StoreError",
    "StoreFull",
    "StoreReadOnly",
    "StoreTooOld",
    "StoreUnreachable",
    "TaskChanged",
    "TaskInUse",
    "TaskRecord",
    "TaskStore",
    "UnknownTask",
    "UnknownVersion",
    "connect",
    "open_url",
    "redact",
    "translated",
]
