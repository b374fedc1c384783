"""Tasks, corpora, versioned draft indexes, batches and API keys in Redis.

Modules that need redis are imported at their first use, since a draft index in a file is checked
without it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tasc_store.errors import (
    CorruptArtifact,
    FingerprintMismatch,
    IndexChanged,
    IndexRefused,
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

if TYPE_CHECKING:
    from tasc_store.access import ApiKey, ApiKeys, IdempotencyStore
    from tasc_store.artifacts import Artifact, ArtifactCache, ArtifactStore
    from tasc_store.client import StoreClient, connect, redact, translated
    from tasc_store.corpus import Appended, CollectedRow, CollectedRows, CorpusRow, CorpusStore
    from tasc_store.embedded import EmbeddedRedis, open_url
    from tasc_store.tasks.record import NeuralDrafting, TaskRecord
    from tasc_store.tasks.task_store import Newest, TaskStore

_NEEDS_REDIS = {
    "ApiKey": "tasc_store.access",
    "ApiKeys": "tasc_store.access",
    "Appended": "tasc_store.corpus",
    "Artifact": "tasc_store.artifacts",
    "ArtifactCache": "tasc_store.artifacts",
    "ArtifactStore": "tasc_store.artifacts",
    "CollectedRow": "tasc_store.corpus",
    "CollectedRows": "tasc_store.corpus",
    "CorpusRow": "tasc_store.corpus",
    "CorpusStore": "tasc_store.corpus",
    "EmbeddedRedis": "tasc_store.embedded",
    "IdempotencyStore": "tasc_store.access",
    "NeuralDrafting": "tasc_store.tasks.record",
    "Newest": "tasc_store.tasks.task_store",
    "StoreClient": "tasc_store.client",
    "TaskRecord": "tasc_store.tasks.record",
    "TaskStore": "tasc_store.tasks.task_store",
    "connect": "tasc_store.client",
    "open_url": "tasc_store.embedded",
    "redact": "tasc_store.client",
    "translated": "tasc_store.client",
}

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
    "IndexRefused",
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

if not TYPE_CHECKING:  # otherwise a type checker would accept any name

    def __getattr__(name: str) -> Any:
        if name not in _NEEDS_REDIS:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(_NEEDS_REDIS[name]), name)
