"""Artifacts as files of this machine, each downloaded once whoever asks. It opens none of them."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tasc_store.artifacts.artifact_store import Artifact, ArtifactStore
from tasc_store.errors import StoreError

_SUFFIX = ".index"
_PARTIAL = ".partial"
_LOCK_POLL_S = 0.05


class ArtifactCache:
    """A folder of artifacts, shared by the processes of a machine.

    A file is unlinked when ``keep`` others of its task and tokenizer were fetched after it.
    Whoever has it mapped keeps it: POSIX frees the bytes with the last mapping.

    Args:
        keep: Files kept per task and tokenizer; at least 1.
        lock_timeout_s: Longest wait for another process's download.

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
        """The file with an artifact's bytes; downloaded unless it is here with the right size.

        Raises:
            FingerprintMismatch: The artifact is not one of this store's.
            CorruptArtifact: The downloaded bytes are not the artifact's.
            StoreError: Redis fails, or another process held the lock too long.
        """
        store.require_own(artifact)
        folder = self._directory / artifact.task / artifact.fingerprint
        # With the checksum in its name a file is not taken for one of the same number that was
        # published after Redis lost its data.
        path = folder / f"{artifact.version:08d}-{artifact.sha256[:16]}{_SUFFIX}"
        if not _is_here(path, artifact):
            folder.mkdir(parents=True, exist_ok=True)
            with _locked(folder / "lock", self._lock_timeout_s):
                if not _is_here(path, artifact):
                    _download(store, artifact, path)
                    self._evict(folder, path)
        return path

    def _evict(self, folder: Path, newest: Path) -> None:
        others = (p for p in folder.glob(f"*{_SUFFIX}") if p != newest)
        by_use = sorted(others, key=lambda p: (p.stat().st_mtime_ns, p.name), reverse=True)
        for path in by_use[self._keep - 1 :]:
            path.unlink()


def _is_here(path: Path, artifact: Artifact) -> bool:
    try:
        if path.stat().st_size != artifact.size_bytes:
            return False
        os.utime(path)  # in use again, say after a roll-back: the last to be evicted
    except FileNotFoundError:
        return False
    return True


def _download(store: ArtifactStore, artifact: Artifact, path: Path) -> None:
    # The lock is ours, so any such file is what a killed process left.
    for stale in path.parent.glob(f"*{_PARTIAL}"):
        stale.unlink()
    partial = path.with_suffix(_PARTIAL)
    store.download(artifact, partial)
    partial.replace(path)


@contextmanager
def _locked(path: Path, timeout_s: float) -> Iterator[None]:
    """Hold a file's lock; the system drops it when the process ends, however it ends."""
    deadline = time.monotonic() + timeout_s
    with path.open("w") as file:
        while not _try_lock(file.fileno()):
            if time.monotonic() > deadline:
                raise StoreError(
                    f"another process has held {path} for {timeout_s} s; see what hangs there, or"
                    " use another cache directory"
                )
            time.sleep(_LOCK_POLL_S)
        yield


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
