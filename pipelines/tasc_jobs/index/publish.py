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
    *,
    forecast: float | None = None,
    after: int | None = None,
    keep: int = KEPT_VERSIONS,
) -> Artifact:
    """Store an index as the next version, make it current and let go of old versions.

    Args:
        corpus_rows: It was built from rows ``[0, corpus_rows)``.
        stored: Called when the version is whole in the store and not yet current.
        forecast: Tokens per step that it brought on rows it did not hold.
        after: The version that must be current until then, 0 for none; unset: any.
        keep: How many of the newest versions stay.

    Raises:
        IndexChanged: Another version is current by now; the new one is stored all the same.
        StoreError: Redis fails.
    """
    with tempfile.TemporaryDirectory(prefix="tasc-index-") as folder:
        path = Path(folder) / "index"
        write_index(index, path)
        artifact = store.publish(path, corpus_rows, forecast=forecast)
    stored()
    store.announce(artifact.version, after=after)
    store.prune(keep)
    return artifact
