"""Tasks, corpora and versioned draft indexes in Redis. It knows no tokens, no model, no service."""

from tasc_store.api_keys import ApiKey, ApiKeys
from tasc_store.artifacts import Artifact, ArtifactStore
from tasc_store.cache import ArtifactCache
from tasc_store.client import connect, redact, translated
from tasc_store.collected import CollectedRow, CollectedRows
from tasc_store.corpora import Appended, CorpusRow, CorpusStore
from tasc_store.embedded import EmbeddedRedis, open_url
from tasc_store.errors import (
    CorruptArtifact,
    FingerprintMismatch,
    IndexChanged,
    StoreError,
    StoreFull,
    StoreReadOnly,
    StoreTooOld,
    StoreUnreachable,
    TaskChanged,
    TaskInUse,
    UnknownKey,
    UnknownTask,
    UnknownVersion,
)
from tasc_store.first_tries import FirstTries
from tasc_store.job_results import JobResults
from tasc_store.neural_drafting import NeuralDrafting
from tasc_store.sampling_defaults import SamplingDefaults
from tasc_store.task_record import TaskRecord
from tasc_store.tasks import Newest, TaskStore

__all__ = [
    "ApiKey",
    "ApiKeys",
    "Appended",
    "Artifact",
    "ArtifactCache",
    "ArtifactStore",
    "CollectedRow",
    "CollectedRows",
    "CorpusRow",
    "CorpusStore",
    "CorruptArtifact",
    "EmbeddedRedis",
    "FingerprintMismatch",
    "FirstTries",
    "IndexChanged",
    "JobResults",
    "NeuralDrafting",
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
    "UnknownKey",
    "UnknownTask",
    "UnknownVersion",
    "connect",
    "open_url",
    "redact",
    "translated",
]
