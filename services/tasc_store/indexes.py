"""Fetches, maps and checks the draft indexes of one task on this node.

Drafting works without an index, so a damaged index reduces speed but fails no answer.
"""

import logging
from typing import TYPE_CHECKING

from tasc_draft import DraftError, DraftIndex, IndexFileError, IndexFormatError, read_index
from tasc_store.errors import CorruptArtifact, IndexRefused
from tasc_text import TaskTokenizer

if TYPE_CHECKING:  # needs redis, which the check of an index from a file does without
    from tasc_store.artifacts import Artifact, ArtifactCache, ArtifactStore

log = logging.getLogger(__name__)


def empty_index(tokenizer: TaskTokenizer) -> DraftIndex:
    """The index of a task without one: drafts then come only from prompts and answers."""
    return DraftIndex.empty(tokenizer.fingerprint, tokenizer.vocab_size)


def require_own(index: DraftIndex, tokenizer: TaskTokenizer, name: str, way_out: str) -> None:
    """Raises IndexRefused if the index holds another tokenizer's ids; the message has ``name``."""
    ours = (tokenizer.fingerprint, tokenizer.vocab_size)
    if (index.fingerprint, index.vocab_size) != ours:
        raise IndexRefused(
            f"{name} was built with tokenizer {index.fingerprint} of {index.vocab_size} ids, but "
            f"the model has tokenizer {ours[0]} of {ours[1]} ids; {way_out}"
        )


class DraftIndexes:
    """Indexes of ``store`` for a target's tokenizer."""

    def __init__(
        self, task: str, store: "ArtifactStore", cache: "ArtifactCache", tokenizer: TaskTokenizer
    ) -> None:
        self.store = store
        self._task = task
        self._cache = cache
        self._tokenizer = tokenizer

    def fetch(self, artifact: "Artifact") -> DraftIndex:
        """Downloads an index to this node if needed, maps it and checks it.

        A damaged file in the cache is downloaded once more.

        Raises:
            IndexRefused: The index holds another tokenizer's ids.
            IndexFileError: The index is damaged, or in an unknown format.
            DraftError: The index's arrays are inconsistent.
            StoreError: Redis fails, or its content is damaged.
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
        name, way_out = f"index version {artifact.version}", f"run `tasc build-index {self._task}`"
        require_own(index, self._tokenizer, f"task {self._task}: {name}", way_out)
        index.check_integrity()
        return index

    def current(self) -> "tuple[Artifact | None, DraftIndex]":
        """Returns the current index, or an empty index if there is none or it is damaged.

        Raises:
            IndexRefused: The current index holds another tokenizer's ids.
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
        return None, empty_index(self._tokenizer)

    def pinned(self, version: int | None) -> "tuple[Artifact | None, DraftIndex]":
        """Returns the index of a version, current or not; for None, an empty index.

        Raises:
            IndexRefused, DraftError, StoreError, OSError: This exact version cannot be loaded.
        """
        if version is None:
            return None, empty_index(self._tokenizer)
        artifact = self.store.get(version)
        return artifact, self.fetch(artifact)

    def _warn(self) -> None:
        others = self.store.other_fingerprints()
        found = f"; indexes exist for tokenizers {', '.join(others)}" if others else ""
        log.warning(
            "task %s has no draft index for tokenizer %s%s; drafting from prompts only until "
            "`tasc build-index %s` has run",
            self._task,
            self._tokenizer.fingerprint,
            found,
            self._task,
        )
