"""Errors of the store. Messages name the server, never its password, and a way out."""


class StoreError(Exception):
    """Root of this package's errors."""


class StoreUnreachable(StoreError):
    """No Redis answers at the URL, it is loading or cut off, refuses the login, or went away."""


class StoreReadOnly(StoreError):
    """Redis answers but refuses writes: it is a replica, cannot save, or has too few replicas."""


class StoreFull(StoreError):
    """Redis has reached its ``maxmemory`` and may not evict."""


class StoreBusy(StoreError):
    """The store does not answer in time, is left alone after a failure, or has too many callers."""


class StoreTooOld(StoreError):
    """The Redis server is older than the commands used here."""


class UnknownTask(StoreError):
    """No task of that name; the message lists those there are."""


class UnknownVersion(StoreError):
    """The task or index is known, that version of it is not."""


class UnknownKey(StoreError):
    """No API key has that id."""


class TaskInUse(StoreError):
    """The task cannot be deleted: the tasks named draft from its corpus."""


class TaskChanged(StoreError):
    """Somebody else put another version of the task since it was read."""


class IndexChanged(StoreError):
    """Somebody else made another index version current since it was read."""


class CorruptArtifact(StoreError):
    """An artifact's bytes are missing, or are not those its record describes."""


class FingerprintMismatch(StoreError):
    """An artifact was made for another tokenizer (or another task)."""


class UnknownFile(StoreError):
    """No file has that id: there was none, it was deleted, or it has expired."""


class FileInUse(StoreError):
    """The file cannot be deleted: a batch that has not ended reads it."""


class FilesFull(StoreError):
    """There are as many files as are kept, or as many bytes of them."""


class UnknownBatch(StoreError):
    """No batch has that id."""


class BatchEnded(StoreError):
    """The batch cannot be cancelled: it has ended, or is about to."""


class BatchesFull(StoreError):
    """There are as many batches as are kept."""


class LinesFull(StoreError):
    """An owner's batches that have not ended would have too many lines together."""


class LeaseLost(StoreError):
    """The batch is another worker's by now; this one must not write about it any more."""
