"""Draft indexes as versions in the store: the current one, and the next. It builds nothing."""

import tempfile
from collections.abc import Callable
from pathlib import Path

from tasc_draft import DraftIndex, read_index, write_index
from tasc_store import Artifact, ArtifactStore

KEPT_VERSIONS = 5


def current_index(store: ArtifactStore) -> DraftIndex | None:
    """The announced index; None where there is none.

    Raises:
        DraftError: It is damaged, or of a format this program does not read.
        StoreError: Redis fails.
    """
    artifact = store.current()
    if artifact is None:
        return None
    with tempfile.TemporaryDirectory(prefix="tasc-index-") as folder:
        path = Path(folder) / "index"
        store.download(artifact, path)
        index = read_index(path)  # the mapped file lives on when its name is gone
    index.check_integrity()
    return index


def publish_index(
    store: ArtifactStore,
    index: DraftIndex,
    corpus_rows: int,
    stored: Callable[[], None] = lambda: None,
) -> Artifact:
    """Store an index as the next version, make it current and let go of old versions.

    Args:
        corpus_rows: It was built from rows ``[0, corpus_rows)``.
        stored: Called when the version is whole in the store and not yet current.

    Raises:
        StoreError: Redis fails.
    """
    with tempfile.TemporaryDirectory(prefix="tasc-index-") as folder:
        path = Path(folder) / "index"
        write_index(index, path)
        artifact = store.publish(path, corpus_rows)
    stored()
    store.announce(artifact.version)
    store.prune(KEPT_VERSIONS)
    return artifact
