"""The state of each row of a batch, and its update by new tokens.

A row's own text is ``prompt SEP answer``. New tokens are only appended to this text. When the row
next gets a draft, `catch_up` derives everything else from these tokens: where tokens occurred
before, the contexts of the answer's end in the corpus, and the number of words begun.

A *local text* is a row's own text by canonical ids, the outputs of the training rows whose prompts
are most similar (its neighbours), or the recent answers that all rows share. ``previous[i]`` is the
last place before i with the same token and ``last[t]`` the last place of token t; ``NONE`` means
that no such place exists. The token after a place is a continuation.

A *context* is ``(tokens, lo, hi, count)``: its length, its interval in the suffix array and how
often it occurs. A context that occurs exactly as often as a longer context adds no evidence, now or
later, so only contexts with different counts are kept, the longest first.
"""

from typing import Any, NamedTuple

import numpy as np

from tasc_draft.compiled import borrowing, compiled
from tasc_draft.drafts import Int32
from tasc_draft.index import weights as cells
from tasc_draft.index.aligned import begins, words
from tasc_draft.index.inputs import nearest
from tasc_draft.index.lookup import COUNT, HI, LO, TOKEN, WIDEST, count, follow

NONE = -1
END = -1  # after each answer or output of a local text
COLUMNS = 4  # number of columns of a context
MAX_CONTEXT = 12  # maximum tokens of a row's context, and so the maximum contexts of a row
SHORTENED = 8  # a context of MAX_CONTEXT tokens is cut to its last SHORTENED before it grows
MAX_WALK = 128  # places of one token that a search visits; bounds the time of a draft
MAX_AGREEING = 8  # maximum tokens compared up to a place
OUTPUT_TOKENS = 512  # maximum number of used tokens of one neighbour's output


def int32(*names: str) -> list[tuple[str, type[np.int32]]]:
    """int32 fields of a structured type."""
    return [(name, np.int32) for name in names]


# A row.
#   length: number of tokens of the own text; begin: place of SEP in the own text
#   caught: number of tokens of the own text that the derived state covers
#   root: node of the row's root in the previous step, or NONE
#   near_length: number of tokens of the neighbours' outputs
#   similarity: class of the similarity of the nearest prompt
#   words: number of words of the prompt; begun: number of words begun in the answer
#   label_root, label: states in the forest of labels at the answer's beginning and at its end;
#     UNLIMITED if the row has no labels (see `tasc_draft.labels`)
ROW = np.dtype(
    [
        *int32("length", "begin", "caught", "root", "num_contexts"),
        ("contexts", np.int32, (MAX_CONTEXT, COLUMNS)),
        *int32("near_length", "similarity", "words", "begun", "label_root", "label"),
    ],
    align=True,
)


@borrowing
def catch_up(state: Any, row: int) -> None:
    """Bring a row's derived state up to date with its text."""
    row_state, text, n = state.rows[row], state.texts[row], state.rows[row].num_contexts
    for at in range(row_state.caught, row_state.length):
        if not 0 <= text[at] < len(state.canonical):
            text[at] = state.growth[0].sep  # an unknown id matches nothing
        append(state.own, row, at, state.canonical[text[at]])
        if at >= row_state.begin:
            n = advance_contexts(state, row_state.contexts, n, text, at)
            if at > row_state.begin:
                row_state.begun += begins_word(
                    state.word_starts, text[at], at == row_state.begin + 1
                )
    row_state.num_contexts = n
    row_state.caught = row_state.length


@borrowing
def reset(state: Any, row: int) -> None:
    """Drop a row's derived state, so that `catch_up` derives it again, from another index."""
    row_state = state.rows[row]
    forget(state.own, row, row_state.caught)
    row_state.caught = row_state.num_contexts = row_state.begun = 0
    row_state.root = NONE


@borrowing
def begins_word(word_starts: Any, token: int, first: bool) -> int:
    """1 if a token begins a word of the answer, else 0. The first token always begins a word."""
    return 1 if first or begins(word_starts, token) else 0


@borrowing
def append_tokens(state: Any, ends: Any, lanes: Any, tokens: Any, offsets: Any) -> int:
    """Append tokens to the texts of several lanes; writes nothing to a lane without enough room.

    Args:
        ends: ``int32[lanes]``, number of tokens of each text; updated.
        lanes: ``int32[m]``; NONE for a row without a lane.
        tokens, offsets: The tokens of lane i are ``tokens[offsets[i]:offsets[i + 1]]``.

    Returns:
        The largest number of tokens of a text, including tokens without room.
    """
    longest = 0
    for i in range(len(lanes)):
        lane = lanes[i]
        if lane == NONE:
            continue
        begin, n = ends[lane], offsets[i + 1] - offsets[i]
        longest = max(longest, begin + n)
        if begin + n <= state.texts.shape[1]:
            for j in range(n):
                state.texts[lane, begin + j] = tokens[offsets[i] + j]
            ends[lane] = begin + n
            if state.rows[lane].length:
                state.rows[lane].length = begin + n
    return longest


@compiled
def begin_row(state: Any, row: int, begin: int, length: int, label: int) -> None:
    """Begin a row whose text is written, and analyse its prompt; see `ROW` for the arguments."""
    row_state = state.rows[row]
    row_state.begin, row_state.length = begin, length
    row_state.label_root = row_state.label = label
    row_state.caught = row_state.num_contexts = row_state.begun = 0
    row_state.root = NONE
    analyse(state, row)


@compiled
def analyse(state: Any, row: int) -> None:
    """Find the words of a row's prompt, and its neighbours."""
    row_state, prompt = state.rows[row], state.texts[row, : state.rows[row].begin]
    hashes, lasts = state.words.hashes[row], state.words.lasts[row]
    row_state.similarity = row_state.words = 0
    if len(state.aligned.keys):
        row_state.words = words(prompt, state.word_starts, hashes, lasts)
    if len(state.found):
        _find_neighbours(state, row, prompt)


# Places in local texts.


class LocalTexts(NamedTuple):
    """One local text for each row.

    Attributes:
        tokens: ``int32[rows, capacity]``.
        previous: ``int32[rows, capacity]``.
        last: ``int32[rows, ids]``.
    """

    tokens: Int32
    previous: Int32
    last: Int32

    @classmethod
    def empty(cls, rows: int, capacity: int, ids: int) -> "LocalTexts":
        tokens = np.zeros((rows, capacity), np.int32)
        return cls(tokens, np.full_like(tokens, NONE), np.full((rows, ids), NONE, np.int32))


@borrowing
def append(local: Any, row: int, at: int, token: int) -> None:
    """Write ``token`` to place ``at`` of a row's text."""
    local.tokens[row, at] = token
    local.previous[row, at] = local.last[row, token]
    local.last[row, token] = at


@borrowing
def forget(local: Any, row: int, length: int) -> None:
    """Clear ``last`` of a row for the tokens of its text; other tokens have no last place."""
    tokens, last = local.tokens[row], local.last[row]
    for i in range(length):
        if tokens[i] >= 0:
            last[tokens[i]] = NONE


@borrowing
def find_places(local: Any, row: int, followed: int, text: Any, end: int, found: Any) -> int:
    """Fill ``found[i] = (place, agreeing tokens)`` for the end of ``text``, newest places first.

    Only places below ``followed`` count, since they have a continuation. Returns the number found.
    """
    tokens, n = local.tokens[row], _places_of(local, row, followed, text[end], found)
    for i in range(n):
        found[i, 1] = _agreeing(tokens, found[i, 0], text, end)
    return n


@borrowing
def _places_of(local: Any, row: int, followed: int, token: int, found: Any) -> int:
    """Fill ``found[i] = (place, 1)`` for the places of a token, the newest first."""
    previous, place = local.previous[row], local.last[row, token]
    n, walked = 0, 0
    while place >= 0 and n < len(found) and walked < MAX_WALK:
        if place < followed:
            found[n, 0], found[n, 1] = place, 1
            n += 1
        place = previous[place]
        walked += 1
    return n


@borrowing
def _agreeing(tokens: Any, place: int, text: Any, end: int) -> int:
    """How many tokens up to ``place`` equal those up to ``end`` of ``text``, up to MAX_AGREEING."""
    n = 1
    longest = min(MAX_AGREEING, place + 1, end + 1)
    while n < longest and tokens[place - n] == text[end - n]:
        n += 1
    return n


@borrowing
def extend_places(
    local: Any, row: int, followed: int, parents: Any, num_parents: int, token: int, found: Any
) -> int:
    """Fill ``found`` for the context of ``parents`` extended by ``token``.

    If ``token`` follows no place of the parents, all places of the token count. Returns the number
    found.
    """
    tokens, n = local.tokens[row], 0
    for i in range(num_parents):
        place = parents[i, 0] + 1
        if tokens[place] == token and place < followed:
            found[n, 0], found[n, 1] = place, parents[i, 1] + 1
            n += 1
    return n if n else _places_of(local, row, followed, token, found)


# Contexts in the corpus.


@borrowing
def advance_contexts(state: Any, contexts: Any, n: int, text: Any, end: int) -> int:
    """Extend a row's contexts by the token ``text[end]``, in place; returns their new number."""
    corpus, token = state.corpus, text[end]
    kept, seen = 0, 0
    for i in range(n):
        tokens, lo, hi = contexts[i, 0], contexts[i, 1], contexts[i, 2]
        if tokens >= MAX_CONTEXT:
            tokens, lo, hi = _shortened(state, text, end - 1)
        lo, hi, occurs = follow(corpus, lo, hi, tokens, token)
        if occurs > seen:  # else the context is empty, or adds nothing to the previous context
            _set_context(contexts, kept, tokens + 1, lo, hi, occurs)
            kept, seen = kept + 1, occurs
    lo, hi = state.starts[token], state.starts[token + 1]
    occurs = count(corpus, lo, hi)
    if occurs > seen:
        _set_context(contexts, kept, 1, lo, hi, occurs)
        kept += 1
    return kept


@borrowing
def _shortened(state: Any, text: Any, end: int) -> tuple[int, int, int]:
    """The context of the last SHORTENED tokens up to ``end``. The corpus has these tokens."""
    begin = end - SHORTENED + 1
    lo, hi = state.starts[text[begin]], state.starts[text[begin] + 1]
    for k in range(1, SHORTENED):
        lo, hi, _ = follow(state.corpus, lo, hi, k, text[begin + k])
    return SHORTENED, lo, hi


@borrowing
def pick_contexts(contexts: Any, n: int, times: int, max_contexts: int, picked: Any) -> int:
    """Pick the longest context and some shorter ones, at most ``max_contexts`` together.

    A context is picked if it occurs at least ``times`` times as often as the one picked before it.
    """
    m, seen = 0, 0
    for i in range(n):
        if m < max_contexts and contexts[i, 3] >= times * seen:
            seen = contexts[i, 3]
            _set_context(picked, m, contexts[i, 0], contexts[i, 1], contexts[i, 2], seen)
            m += 1
    return m


@borrowing
def extend_contexts(state: Any, parent: Any, token: int, max_contexts: int, node: Any) -> int:
    """Fill a tree node's contexts: its parent's contexts, each extended by ``token``.

    If the node then has fewer than ``max_contexts`` contexts, the context of the token alone is
    added. Returns the number of contexts.
    """
    corpus, longest = state.corpus, state.growth[0].depth - 1  # suffixes are sorted by depth tokens
    m = 0
    for i in range(parent.num_contexts):
        tokens = parent.contexts[i, 0]
        if tokens >= longest:
            continue
        lo, hi, occurs = _extended(corpus, parent, i, token)
        if hi > lo:
            _set_context(node.contexts, m, tokens + 1, lo, hi, occurs)
            m += 1
    lo, hi = state.starts[token], state.starts[token + 1]
    if m < max_contexts and hi > lo:
        _set_context(node.contexts, m, 1, lo, hi, count(corpus, lo, hi))
        m += 1
    return m


@borrowing
def _extended(corpus: Any, parent: Any, i: int, token: int) -> tuple[int, int, int]:
    """The interval and the count of a node's i-th context extended by ``token``."""
    n = parent.num_known[i] if i < cells.CONTEXTS else -1
    for j in range(n):
        known = parent.known[i, j]
        if known[TOKEN] == token:
            return known[LO], known[HI], known[COUNT]
    if 0 <= n < WIDEST:
        return 0, 0, 0
    lo, hi = parent.contexts[i, 1], parent.contexts[i, 2]
    return follow(corpus, lo, hi, parent.contexts[i, 0], token)


@borrowing
def _set_context(contexts: Any, i: int, tokens: int, lo: int, hi: int, occurs: int) -> None:
    contexts[i, 0], contexts[i, 1] = tokens, lo
    contexts[i, 2], contexts[i, 3] = hi, occurs


# Neighbours.


@compiled
def _find_neighbours(state: Any, row: int, prompt: Any) -> None:
    """Fill a row's text of neighbours with their outputs, as many as fit, the most similar last."""
    row_state, text, weights = state.rows[row], state.corpus.text, state.near_weight[row]
    inputs, offsets, found, similarity = state.inputs, state.offsets, state.found, state.similarity
    n = nearest(inputs, prompt, state.search, found, similarity)
    row_state.similarity = cells.similarity_class(similarity[0] if n else 0.0)
    at = 0
    for i in range(_fitting(offsets, inputs.documents, found, n, len(weights)) - 1, -1, -1):
        document = inputs.documents[found[i]]
        begin, length = offsets[document], _length(offsets, document)
        for j in range(length - 1):
            append(state.near, row, at, text[begin + j])
            weights[at] = similarity[i] ** 2
            at += 1
        state.near.tokens[row, at] = END
        at += 1
    row_state.near_length = at


@compiled
def forget_neighbours(state: Any, row: int) -> None:
    forget(state.near, row, state.rows[row].near_length)
    state.rows[row].near_length = 0


@compiled
def _fitting(offsets: Any, documents: Any, rows: Any, n: int, space: int) -> int:
    """How many of the nearest rows' outputs fit into ``space`` tokens."""
    for i in range(n):
        space -= _length(offsets, documents[rows[i]])
        if space < 0:
            return i
    return n


@compiled
def _length(offsets: Any, document: int) -> int:
    """Number of used tokens of a neighbour's output, with SEP, EOS and END."""
    return min(offsets[document + 1] - offsets[document], OUTPUT_TOKENS + 3)
