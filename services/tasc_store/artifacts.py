"""Immutable versions of draft indexes and other files, in Redis and on local disks.

A version exists once its record is written, and is *current* once it is announced. Files are stored
in Redis as chunks. Chunks without a record, which a killed process left, expire. Records and the
pointer to the current version are changed in Lua scripts, which are atomic.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import redis
from filelock import FileLock, Timeout

from tasc_draft.files import whole_file
from tasc_store import keys
from tasc_store.client import as_text, url_of
from tasc_store.errors import (
    CorruptArtifact,
    FingerprintMismatch,
    IndexChanged,
    StoreError,
    UnknownVersion,
)

# Chunks that are not made permanent within this time expire.
UNSEALED_S = 3600


def verified(
    blocks: Iterable[bytes], size_bytes: int, sha256: str, damaged: Callable[[str], Exception]
) -> Iterator[bytes]:
    """Yields the blocks, and checks their total size and checksum after the last block.

    Args:
        damaged: Makes an exception from a description of the damage.

    Raises:
        Exception: The size or the checksum differs; the exception is the result of ``damaged``.
    """
    size, digest = 0, hashlib.sha256()
    for block in blocks:
        size += len(block)
        digest.update(block)
        yield block
    if (size, digest.hexdigest()) != (size_bytes, sha256):
        raise damaged(f"{size} bytes, sha256 {digest.hexdigest()}")


# KEYS: records, chunks... ; makes the chunks permanent and writes the record, or neither.
SEAL = """
for i = 2, #KEYS do
  if redis.call('EXISTS', KEYS[i]) == 0 then return 0 end
end
for i = 2, #KEYS do redis.call('PERSIST', KEYS[i]) end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
return 1
"""

# KEYS: records, pointer, fingerprints; ARGV: version, fingerprint and, optionally, the version that
# must be current (0: no version).
ANNOUNCE = """
if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 0 then return 0 end
if ARGV[3] and (redis.call('GET', KEYS[2]) or '0') ~= ARGV[3] then return -1 end
redis.call('SET', KEYS[2], ARGV[1])
redis.call('SADD', KEYS[3], ARGV[2])
return 1
"""

# One script, so that the pointer cannot move between the two reads.
CURRENT = """
local version = redis.call('GET', KEYS[2])
if not version then return false end
return {version, redis.call('HGET', KEYS[1], version) or ''}
"""

# KEYS: records, pointer, chunks...
DELETE = """
if redis.call('GET', KEYS[2]) == ARGV[1] then return 0 end
redis.call('HDEL', KEYS[1], ARGV[1])
for i = 3, #KEYS do redis.call('UNLINK', KEYS[i]) end
return 1
"""


CHUNK_BYTES = 16 * 1024 * 1024
INDEX, VOCABULARY = "index", "vocabulary"  # kinds of files, with separate versions


@dataclass(frozen=True)
class Artifact:
    """The record of one version of a task's index, or of another file, for one tokenizer.

    Attributes:
        version: Number from 1, increasing; numbers of failed `publish` calls are skipped.
        size_bytes: Size of the whole file.
        sha256: SHA-256 of the whole file, hexadecimal.
        chunks: Number of chunks of the file.
        corpus_rows: The file was built from rows ``[0, corpus_rows)``; None: unknown.
        created_at: Time of creation, in seconds since the epoch.
        forecast: Tokens per step, measured on rows that are not in the index; None: unknown.
    """

    task: str
    fingerprint: str
    version: int
    size_bytes: int
    sha256: str
    chunks: int
    corpus_rows: int | None
    created_at: float
    forecast: float | None = None

    @property
    def rows_in_words(self) -> str:
        """The number of rows, for display; never 0, since an index without rows is not built."""
        return f"{self.corpus_rows:,} rows" if self.corpus_rows else "rows unknown"


class ArtifactStore:
    """The versions of a task's index, or of another kind of file, for one tokenizer fingerprint.

    Every method raises `StoreError` when Redis fails.

    Args:
        kind: INDEX or VOCABULARY.
        chunk_bytes: Size of the chunks that `publish` writes; not needed for reading.
    """

    def __init__(
        self,
        client: redis.Redis,
        task: str,
        fingerprint: str,
        *,
        kind: str = INDEX,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        self.task = keys.checked_task(task)
        self.fingerprint = keys.checked_fingerprint(fingerprint)
        self._kind = kind
        self._client = client
        scripts = (SEAL, ANNOUNCE, CURRENT, DELETE)
        self._sealed, self._announce, self._current, self._delete = map(
            client.register_script, scripts
        )
        self._chunk_bytes = chunk_bytes
        self._fingerprints = keys.task_key(task, kind, "fingerprints")
        self._records, self._pointer = self._key("records"), self._key("current")

    def publish(
        self, path: Path, corpus_rows: int | None, *, forecast: float | None = None
    ) -> Artifact:
        """Stores a file as the next version, reads it back, and only then writes its record.

        Args:
            corpus_rows: The file was built from rows ``[0, corpus_rows)``; None: unknown.
            forecast: Expected tokens per step when drafting from the index.

        Raises:
            ValueError: The file is empty.
            CorruptArtifact: The bytes read back differ from the written ones.
            StoreError: Publishing took more than an hour.
        """
        with path.open("rb") as file:
            version = int(self._client.incr(self._key("last")))
            names, size, digest = list[str](), 0, hashlib.sha256()
            # After any error, the written chunks are removed. Otherwise, a server that is full of
            # them would stay full until they expire.
            try:
                while block := file.read(self._chunk_bytes):
                    names.append(self._key("chunk", version, len(names)))
                    self._client.set(names[-1], block, ex=UNSEALED_S)
                    size += len(block)
                    digest.update(block)
                if not names:
                    raise ValueError(f"{path} is empty; there is nothing to publish")
                artifact = Artifact(
                    task=self.task,
                    fingerprint=self.fingerprint,
                    version=version,
                    size_bytes=size,
                    sha256=digest.hexdigest(),
                    chunks=len(names),
                    corpus_rows=corpus_rows,
                    created_at=time.time(),
                    forecast=forecast,
                )
                for _ in self._blocks(artifact):
                    pass
            except BaseException:
                with suppress(StoreError):
                    if names:
                        self._client.unlink(*names)
                raise
            # From here on, nothing is removed: if the server's reply is lost, the record may exist.
            self._seal(artifact)
        return artifact

    def announce(self, version: int, *, after: int | None = None) -> None:
        """Makes a version current. An older version is allowed, as a rollback.

        Args:
            after: The version that must be current (0: no version); unset: any version.

        Raises:
            UnknownVersion: The version does not exist.
            IndexChanged: Another version is current.
        """
        expected = [] if after is None else [after]
        moved = self._announce(
            [self._records, self._pointer, self._fingerprints],
            [version, self.fingerprint, *expected],
        )
        if moved == 0:
            raise self._unknown(version)
        if moved < 0:
            raise IndexChanged(
                f"version {after or 'none'} of {self._name} is not current any more: another "
                f"process announced a version; version {version} is kept, see `tasc index list`"
            )

    def current(self) -> Artifact | None:
        """The current version; None if no version was announced.

        Raises:
            CorruptArtifact: The version's record is missing.
        """
        found = self._current([self._records, self._pointer])
        return None if found is None else self._parsed(int(found[0]), found[1])

    def get(self, version: int) -> Artifact:
        """Returns a version's record; raises UnknownVersion if it does not exist."""
        found = self._client.hget(self._records, str(version))
        if found is None:
            raise self._unknown(version)
        return self._parsed(version, found)

    def versions(self) -> list[int]:
        """Versions with a record, announced or not, oldest first."""
        return sorted(int(version) for version in self._client.hkeys(self._records))

    def other_fingerprints(self) -> list[str]:
        """The fingerprints of other tokenizers for which the task has a current index."""
        found = {as_text(f) for f in self._client.smembers(self._fingerprints)}
        return sorted(found - {self.fingerprint})

    def download(self, artifact: Artifact, path: Path) -> None:
        """Writes an artifact's bytes to a file, which is replaced only if the bytes are correct.

        Raises:
            CorruptArtifact: Chunks are missing, maybe because the version was deleted, or size or
                checksum differ.
            FingerprintMismatch: The artifact is for another task or tokenizer.
        """
        self.require_own(artifact)
        with whole_file(path) as out:
            out.writelines(self._blocks(artifact))

    def head(self, artifact: Artifact, size: int) -> bytes:
        """Returns up to ``size`` first bytes of an artifact's first chunk, without verification."""
        found: Any = self._client.getrange(self._chunks(artifact)[0], 0, size - 1)
        return bytes(found)

    def delete(self, version: int) -> None:
        """Removes a version. Running downloads of it raise `CorruptArtifact`.

        Raises:
            UnknownVersion: The version does not exist.
            StoreError: The version is current.
        """
        names = self._chunks(self.get(version))
        gone = self._delete([self._records, self._pointer, *names], [version])
        if not gone:
            raise StoreError(
                f"version {version} of {self._name} is current; announce another version first"
            )

    def prune(self, keep: int) -> list[int]:
        """Removes all versions but the newest ``keep`` and the current one.

        Returns:
            The removed versions.

        Raises:
            ValueError: ``keep`` is below 1.
        """
        if keep < 1:
            raise ValueError(f"keep is {keep}; it must be at least 1")
        current = self.current()
        pinned = None if current is None else current.version
        removed = [version for version in self.versions()[:-keep] if version != pinned]
        for version in removed:
            self.delete(version)
        return removed

    def require_own(self, artifact: Artifact) -> None:
        """Raises FingerprintMismatch if the artifact is for another task or tokenizer."""
        if (artifact.task, artifact.fingerprint) != (self.task, self.fingerprint):
            raise FingerprintMismatch(
                f"{self._kind} version {artifact.version} of task {artifact.task} is for tokenizer "
                f"{artifact.fingerprint}; {self._name} is wanted: build the {self._kind} for it"
            )

    @property
    def _name(self) -> str:
        return f"task {self.task}, tokenizer {self.fingerprint}"

    def _key(self, *parts: str | int) -> str:
        return keys.task_key(self.task, self._kind, self.fingerprint, *parts)

    def _chunks(self, artifact: Artifact) -> list[str]:
        return [self._key("chunk", artifact.version, i) for i in range(artifact.chunks)]

    def _blocks(self, artifact: Artifact) -> Iterator[bytes]:
        damaged = partial(self._corrupt, artifact.version)

        def read() -> Iterator[bytes]:
            for number, name in enumerate(self._chunks(artifact)):
                block = self._client.get(name)
                if not isinstance(block, bytes):
                    raise damaged(f"no chunk {number}")
                yield block

        return verified(read(), artifact.size_bytes, artifact.sha256, damaged)

    def _seal(self, artifact: Artifact) -> None:
        known = {k: v for k, v in asdict(artifact).items() if v is not None}
        record = json.dumps(known, separators=(",", ":"))
        if not self._sealed([self._records, *self._chunks(artifact)], [artifact.version, record]):
            raise StoreError(
                f"version {artifact.version} of {self._name} lost chunks before its record was"
                f" written; publish again, within {UNSEALED_S} s"
            )

    def _parsed(self, version: int, record: str | bytes) -> Artifact:
        try:
            return Artifact(**{"corpus_rows": None, **json.loads(record)})
        except (TypeError, ValueError) as error:
            raise self._corrupt(version, f"the record {record!r:.80}") from error

    def _corrupt(self, version: int, found: str) -> CorruptArtifact:
        return CorruptArtifact(
            f"{self._kind} version {version} of {self._name} at {url_of(self._client)} is damaged "
            f"or deleted (found {found}); take the current version, or build and announce a new one"
        )

    def _unknown(self, version: int) -> UnknownVersion:
        known = ", ".join(map(str, self.versions())) or "none"
        no = f"no {self._kind} version {version} of {self._name}"
        return UnknownVersion(f"{no}; existing versions: {known}")


_SUFFIX = ".index"


class ArtifactCache:
    """A folder of artifacts, shared by the processes of a machine.

    A file is unlinked when ``keep`` other files of its task and tokenizer were used after it.
    Processes that have mapped the file can still read it, since POSIX frees its bytes with the last
    mapping.

    Args:
        keep: Number of files kept per task and tokenizer; at least 1.
        lock_timeout_s: Maximum wait for another process's download.

    Raises:
        ValueError: ``keep`` is below 1.
    """

    def __init__(self, directory: Path, keep: int = 2, *, lock_timeout_s: float = 600.0) -> None:
        if keep < 1:
            raise ValueError(f"keep is {keep}; it must be at least 1")
        self._directory = directory
        self._keep = keep
        self._lock_timeout_s = lock_timeout_s

    def fetch(self, store: ArtifactStore, artifact: Artifact) -> Path:
        """Returns the file with an artifact's bytes; downloads it if no file has the right size.

        Raises:
            FingerprintMismatch: The artifact does not belong to this store.
            CorruptArtifact: The downloaded bytes differ from the artifact's.
            StoreError: Redis fails, or another process held the lock too long.
        """
        store.require_own(artifact)
        folder = self._directory / artifact.task / artifact.fingerprint
        # The checksum in the name distinguishes versions with the same number: Redis may lose its
        # data and count from 1 again.
        path = folder / f"{artifact.version:08d}-{artifact.sha256[:16]}{_SUFFIX}"
        if not _is_here(path, artifact):
            folder.mkdir(parents=True, exist_ok=True)
            with self._locked(folder / "lock"):
                if not _is_here(path, artifact):
                    # The lock is held, so a killed process left these files.
                    for left in folder.glob("*.partial"):
                        left.unlink()
                    store.download(artifact, path)
                    self._evict(folder, path)
        return path

    @contextmanager
    def _locked(self, path: Path) -> Iterator[None]:
        """Holds a file's lock; the system releases it whenever the process ends."""
        try:
            lock = FileLock(path).acquire(self._lock_timeout_s)
        except Timeout as error:
            raise StoreError(
                f"another process has held {path} for {self._lock_timeout_s} s; end it if "
                "it hangs, or use another cache directory"
            ) from error
        with lock:
            yield

    def _evict(self, folder: Path, newest: Path) -> None:
        others = (p for p in folder.glob(f"*{_SUFFIX}") if p != newest)
        by_use = sorted(others, key=lambda p: (p.stat().st_mtime_ns, p.name), reverse=True)
        for path in by_use[self._keep - 1 :]:
            path.unlink()


def _is_here(path: Path, artifact: Artifact) -> bool:
    try:
        if path.stat().st_size != artifact.size_bytes:
            return False
        os.utime(path)  # marks the file as used, so that it is evicted last
    except FileNotFoundError:
        return False
    return True
