"""Errors of the store. Messages name the server and a remedy, but never the server's password."""


class StoreError(Exception):
    """Base class of this package's errors."""


class StoreUnreachable(StoreError):
    """Redis does not answer, is loading, is a replica without its primary, or refuses the login."""


class StoreReadOnly(StoreError):
    """Redis answers but refuses writes: it is a replica, cannot save, or has too few replicas."""


class StoreFull(StoreError):
    """Redis has reached its ``maxmemory`` and may not evict."""


class StoreBusy(StoreError):
    """The store does not answer in time, has failed recently, or has too many callers."""


class StoreTooOld(StoreError):
    """The Redis server lacks commands that this package uses."""


class UnknownTask(StoreError):
    """No task has that name; the message lists the existing ones."""


class UnknownVersion(StoreError):
    """The task or index exists, but this version of it does not."""


class UnknownKey(StoreError):
    """No API key has that id."""


class TaskInUse(StoreError):
    """The task cannot be deleted, because the named tasks draft from its corpus."""


class TaskChanged(StoreError):
    """Another version of the task was added after the caller read the task."""


class IndexChanged(StoreError):
    """Another index version became current after the caller read the current version."""


class CorruptArtifact(StoreError):
    """An artifact's bytes are missing, or differ from its record."""


class FingerprintMismatch(StoreError):
    """An artifact was made for another tokenizer (or another task)."""


class IndexRefused(StoreError):
    """A draft index does not fit the target's tokenizer; the message names both fingerprints."""


class UnknownFile(StoreError):
    """No file has that id: it never existed, was deleted, or has expired."""


class FileInUse(StoreError):
    """The file cannot be deleted: a batch that has not ended reads it."""


class FilesFull(StoreError):
    """The maximum number of files, or of their bytes, is reached."""


class FilesNotShared(StoreError):
    """This process does not see the files of other processes that use the same Redis."""


class UnknownBatch(StoreError):
    """No batch has that id."""


class BatchEnded(StoreError):
    """The batch cannot be cancelled, because it has ended or is about to end."""


class BatchesFull(StoreError):
    """The maximum number of batches is reached."""


class LinesFull(StoreError):
    """An owner's unfinished batches would have too many lines together."""


class LeaseLost(StoreError):
    """Another worker holds the batch; the caller must not write to it any more."""
