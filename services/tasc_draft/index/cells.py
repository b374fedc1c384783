"""Which cell of the weight table a piece of evidence falls into. It knows no source and no row.

A candidate token's score is the sum of one weight for each *slot*, a way in which a source speaks
of it; the weight is looked up by how much evidence there is (the *base*) and by which share of it
stands for the candidate (the *level*; 0: none). Levels and bases are coarse on purpose, so that a
few thousand weights are learnt from a few hundred answers.
"""

from tasc_draft import sources
from tasc_draft.compiled import borrowing
from tasc_draft.index.aligned_keys import KINDS

LEVELS = 10
ORDERS = 7
AMOUNTS = 6
LENGTHS = 6
GROUPS = 4  # of a local text's evidence: by similarity, or by how many places agree
CONTEXTS = 3  # corpus contexts of different length that are looked at for each node

# Slots, in the order of their tables: corpus by context, neighbours (where most agrees, and all),
# prompt, answer so far, recent answers, the target's bigrams, aligned words by kind.
CORPUS, NEIGHBOURS, PROMPT = 0, CONTEXTS, CONTEXTS + 2
ANSWER, RECENT, BIGRAM, ALIGNED = PROMPT + 1, PROMPT + 2, PROMPT + 3, PROMPT + 4
SLOTS = ALIGNED + KINDS

CORPUS_SIZE = ORDERS * AMOUNTS * LEVELS
LOCAL_SIZE = LENGTHS * GROUPS * LEVELS
ALIGNED_SIZE = AMOUNTS * LEVELS

# The source that each slot speaks for.
SOURCE_OF_SLOT = (
    *(sources.CORPUS,) * CONTEXTS,
    *(sources.NEIGHBOURS,) * 2,
    *(sources.PROMPT,) * 2,
    sources.RECENT,
    sources.BIGRAMS,
    *(sources.ALIGNED,) * KINDS,
)

LOCAL_BASE = CONTEXTS * CORPUS_SIZE
BIGRAM_BASE = LOCAL_BASE + (BIGRAM - NEIGHBOURS) * LOCAL_SIZE
ALIGNED_BASE = BIGRAM_BASE + LEVELS
OTHER_BASE = ALIGNED_BASE + KINDS * ALIGNED_SIZE
CELLS = OTHER_BASE + (ORDERS + 1) * AMOUNTS * LEVELS


@borrowing
def share_level(share: float) -> int:
    """Level 1 to 9 of the share of a source's evidence that stands for a candidate."""
    if share >= 0.5:
        if share >= 0.9:
            return 9 if share >= 0.97 else 8
        return 7 if share >= 0.75 else 6
    if share >= 0.15:
        return 5 if share >= 0.3 else 4
    if share >= 0.05:
        return 3
    return 2 if share >= 0.01 else 1


@borrowing
def amount_class(count: int) -> int:
    """0 to 5 for how often a context was seen: 1, 2, 3-4, 5-8, 9-32, more."""
    if count <= 2:
        return count - 1
    if count <= 4:
        return 2
    if count <= 8:
        return 3
    return 4 if count <= 32 else 5


@borrowing
def order_class(tokens: int) -> int:
    """0 to 6 for the tokens of a corpus context: 1, 2, 3, 4, 5-6, 7-9, more."""
    if tokens <= 4:
        return tokens - 1
    if tokens <= 6:
        return 4
    return 5 if tokens <= 9 else 6


@borrowing
def length_class(tokens: int) -> int:
    """0 to 5 for the tokens that agree in front of an occurrence: 1, 2, 3, 4, 5-7, more."""
    if tokens <= 4:
        return tokens - 1
    return 4 if tokens <= 7 else 5


@borrowing
def likeness_class(similarity: float) -> int:
    """0 to 3 for the cosine of the nearest training prompt."""
    if similarity < 0.45:
        return 0 if similarity < 0.25 else 1
    return 2 if similarity < 0.7 else 3


@borrowing
def corpus_base(slot: int, tokens: int, count: int) -> int:
    cell = slot * ORDERS * AMOUNTS + order_class(tokens) * AMOUNTS + amount_class(count)
    return cell * LEVELS


@borrowing
def near_base(slot: int, agreeing: int, likeness: int) -> int:
    cell = ((slot - NEIGHBOURS) * LENGTHS + length_class(agreeing)) * GROUPS + likeness
    return LOCAL_BASE + cell * LEVELS


@borrowing
def counted_base(slot: int, agreeing: int, places: int) -> int:
    """Of prompt, answer and recent answers: by how many places agree so far."""
    return near_base(slot, agreeing, min(places, GROUPS) - 1)


@borrowing
def aligned_base(kind: int, count: int) -> int:
    return ALIGNED_BASE + (kind * AMOUNTS + amount_class(count)) * LEVELS


@borrowing
def other_cell(tokens: int, count: int, share: float) -> int:
    """The cell of "none of the candidates", by the longest corpus context (0 tokens: none)."""
    if tokens == 0:
        return OTHER_BASE + ORDERS * AMOUNTS * LEVELS
    cell = order_class(tokens) * AMOUNTS + amount_class(count)
    return OTHER_BASE + cell * LEVELS + share_level(share)
