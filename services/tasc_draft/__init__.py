"""N-gram drafts: corpus index, prompt index, their mixture. Token ids only; numpy and numba."""

from tasc_draft.codec import read_index, write_index
from tasc_draft.drafts import Drafts, Int32, Proposer
from tasc_draft.errors import DraftError, IndexFileError
from tasc_draft.index import CorpusIndex, Documents, build_index
from tasc_draft.settings import DraftSettings
from tasc_draft.sources import SOURCES
from tasc_draft.tasc import TascProposer

__all__ = [
    "SOURCES",
    "CorpusIndex",
    "Documents",
    "DraftError",
    "DraftSettings",
    "Drafts",
    "IndexFileError",
    "Int32",
    "Proposer",
    "TascProposer",
    "build_index",
    "read_index",
    "write_index",
]
