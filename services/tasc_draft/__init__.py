"""N-gram drafts from a task's index: sources of evidence, their mixture, and draft trees.

The package handles only token ids and needs only numpy and numba. Modules that need numba are
imported at their first use, since commands and gateways need only the settings.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tasc_draft.drafts import (
    NGRAM_SOURCES,
    SOURCES,
    DraftError,
    Drafts,
    IndexFileError,
    IndexFormatError,
    Int32,
    Proposer,
    Tokens,
)
from tasc_draft.settings import DraftSettings

if TYPE_CHECKING:
    from tasc_draft.index.bigrams import BigramTable
    from tasc_draft.index.draft_index import DraftIndex, build_index, read_index, write_index
    from tasc_draft.mixture.proposer import NgramProposer
    from tasc_draft.replaying import Replay, build_learnt_index, replay

_NEEDS_NUMBA = {
    "BigramTable": "tasc_draft.index.bigrams",
    "DraftIndex": "tasc_draft.index.draft_index",
    "NgramProposer": "tasc_draft.mixture.proposer",
    "Replay": "tasc_draft.replaying",
    "build_index": "tasc_draft.index.draft_index",
    "build_learnt_index": "tasc_draft.replaying",
    "read_index": "tasc_draft.index.draft_index",
    "replay": "tasc_draft.replaying",
    "write_index": "tasc_draft.index.draft_index",
}

__all__ = [
    "NGRAM_SOURCES",
    "SOURCES",
    "BigramTable",
    "DraftError",
    "DraftIndex",
    "DraftSettings",
    "Drafts",
    "IndexFileError",
    "IndexFormatError",
    "Int32",
    "NgramProposer",
    "Proposer",
    "Replay",
    "Tokens",
    "build_index",
    "build_learnt_index",
    "read_index",
    "replay",
    "write_index",
]

if not TYPE_CHECKING:  # otherwise a type checker would accept any name

    def __getattr__(name: str) -> Any:
        if name not in _NEEDS_NUMBA:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(_NEEDS_NUMBA[name]), name)
