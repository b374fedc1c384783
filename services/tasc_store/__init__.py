"""Tasks, corpora, versioned draft indexes, batches and API keys in Redis."""

from tasc_store.access import ApiKey, ApiKeys, IdempotencyStore
from tasc_store.artifacts import Artifact, ArtifactCache, ArtifactStore
from tasc_store.client import StoreClient, connect, redact, translated
from tasc_store.corpus import Appended, CollectedRow, CollectedRows, CorpusRow, CorpusStore
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
from tasc_store.tasks.record import NeuralDrafting, TaskRecord
from tasc_store.tasks.task_store import Newest, TaskStore

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
    "IdempotencyStore",
    "IndexChanged",
    "NeuralDrafting",
    "Newest",
    "StoreClient",
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
