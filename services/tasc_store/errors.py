"""What can go wrong with the store. Messages name the server, never its password, and a way out."""


class StoreError(Exception):
    """Root of this package's errors."""


class StoreUnreachable(StoreError):
    """No Redis answers at the URL, it refuses the login, or it went away."""


class StoreReadOnly(StoreError):
    """Redis answers but refuses writes: a replica, or a server that cannot save to its disk."""


class StoreFull(StoreError):
    """Redis has reached its ``maxmemory`` and may not evict."""


class StoreTooOld(StoreError):
    """The Redis server is older than the commands used here."""


class UnknownTask(StoreError):
    """No task of that name; the message lists those there are."""


class UnknownVersion(StoreError):
    """The task or index is known, that version of it is not."""


class TaskInUse(StoreError):
    """The task cannot be deleted: the tasks named draft from its corpus."""


class TaskChanged(StoreError):
    """Somebody else put another version of the task since it was read."""


class CorruptArtifact(StoreError):
    """An artifact's bytes are missing, or are not those its record describes."""


class FingerprintMismatch(StoreError):
    """An artifact was made for another tokenizer (or another task)."""
