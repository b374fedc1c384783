"""N-gram drafts: a task's index, sources, their mixture, trees. Token ids only; numpy and numba."""

from tasc_draft.drafts import NGRAM_SOURCES, SOURCES, Drafts, Proposer
from tasc_draft.errors import DraftError, IndexFileError, IndexFormatError
from tasc_draft.index.bigrams import BigramTable
from tasc_draft.index.draft_index import DraftIndex, build_index, read_index, write_index
from tasc_draft.learning import build_learnt_index
from tasc_draft.mixture.proposer import NgramProposer
from tasc_draft.replay import Replay, replay
from tasc_draft.settings import DraftSettings
from tasc_draft.tokens import Int32, Tokens

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
