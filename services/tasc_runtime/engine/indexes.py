"""The draft indexes of one task on this node: fetched, mapped and checked before use.

Drafting can do without an index, so a damaged one costs speed and never an answer.
"""

import logging
from pathlib import Path

from tasc_draft import DraftError, DraftIndex, IndexFileError, IndexFormatError, read_index
from tasc_runtime.errors import IndexRefused
from tasc_store import Artifact, ArtifactCache, ArtifactStore, CorruptArtifact
from tasc_text import TaskTokenizer

log = logging.getLogger(__name__)


def default_cache_dir() -> Path:
    """Of indexes on this node."""
    return Path.home() / ".cache" / "tasc-serve" / "indexes"


class DraftIndexes:
    """Indexes of ``store`` for a target's tokenizer."""

    def __init__(
        self, task: str, store: ArtifactStore, cache: ArtifactCache, tokenizer: TaskTokenizer
    ) -> None:
        self.store = store
        self._task = task
        self._cache = cache
        self._tokenizer = tokenizer

    def fetch(self, artifact: Artifact) -> DraftIndex:
        """Download an index to this node if need be, map it and check it.

        A file of the cache that has been damaged is downloaded once more.

        Raises:
            IndexRefused: It holds another tokenizer's ids.
            IndexFileError: It is damaged, or of a format this program does not read.
            DraftError: Its arrays are inconsistent.
            StoreError: Redis fails, or what it holds is damaged.
        """
        path = self._cache.fetch(self.store, artifact)
        try:
            index = read_index(path)
        except IndexFormatError:
            raise
        except IndexFileError:
            log.warning("%s cannot be used; it is fetched once more", path)
            path.unlink(missing_ok=True)
            index = read_index(self._cache.fetch(self.store, artifact))
        self._require_own(index, artifact)
        index.check_integrity()
        return index

    def current(self) -> tuple[Artifact | None, DraftIndex]:
        """The announced index, or an empty one when there is none or it is damaged.

        Raises:
            IndexRefused: The announced index holds another tokenizer's ids.
            StoreError: Redis fails.
        """
        artifact = self.store.current()
        if artifact is None:
            self._warn()
        else:
            try:
                return artifact, self.fetch(artifact)
            except (DraftError, CorruptArtifact, OSError):
                log.exception("task %s: index %d cannot be used", self._task, artifact.version)
        return None, self._empty()

    def pinned(self, version: int | None) -> tuple[Artifact | None, DraftIndex]:
        """The index of a version, announced or not; an empty one for None.

        Raises:
            IndexRefused, DraftError, StoreError, OSError: It cannot be had as it was built.
        """
        if version is None:
            return None, self._empty()
        artifact = self.store.get(version)
        return artifact, self.fetch(artifact)

    def _empty(self) -> DraftIndex:
        return DraftIndex.empty(self._tokenizer.fingerprint, self._tokenizer.vocab_size)

    def _require_own(self, index: DraftIndex, artifact: Artifact) -> None:
        ours = (self._tokenizer.fingerprint, self._tokenizer.vocab_size)
        if (index.fingerprint, index.vocab_size) != ours:
            raise IndexRefused(
                f"task {self._task}: index version {artifact.version} was built with tokenizer "
                f"{index.fingerprint} of {index.vocab_size} ids, the model's is {ours[0]} of "
                f"{ours[1]}; run `tasc build-index {self._task}`"
            )

    def _warn(self) -> None:
        others = self.store.other_fingerprints()
        found = f"; there are some for tokenizers {', '.join(others)}" if others else ""
        log.warning(
            "task %s has no draft index for tokenizer %s%s; drafting from prompts only until "
            "`tasc build-index %s` has run",
            self._task,
            self._tokenizer.fingerprint,
            found,
            self._task,
        )
