"""What each source says at a node of the draft tree, entered as votes. Compiled; no allocation.

Every source has the same small shape: a node's state in it follows from its parent's by one token
(`descend`, or `root` for the first), and the state names continuations, each with its share.
"""

import math
from typing import Any

from tasc_draft.compiled import borrowing
from tasc_draft.drafts import ALIGNED, BIGRAMS, CORPUS, NEIGHBOURS, PROMPT, RECENT
from tasc_draft.index import weights as cells
from tasc_draft.index.aligned import KINDS, context_keys, find
from tasc_draft.index.lookup import COUNT, TOKEN, continuations
from tasc_draft.mixture import contexts, occurrences
from tasc_draft.mixture.candidates import MIXED, NONE, candidate, clear, vote
from tasc_draft.mixture.row_state import begins_word

_END = 1 << 30  # behind every place


@borrowing
def root(state: Any, x: int, row: int) -> None:
    """Node ``x`` is the end of a row's text."""
    node, it, own = state.nodes[x], state.rows[row], state.own
    mixed = state.growth[0].rule == MIXED
    text, keys, end = state.texts[row], own.tokens[row], it.length - 1
    node.row = row
    node.parent = NONE
    node.depth = 0
    node.token = text[end]
    node.path = 1.0
    node.words = it.begun
    node.num_contexts = contexts.pick(
        it.contexts, it.num_contexts, 2 if mixed else 1,
        cells.CONTEXTS if mixed else contexts.MOST, node.contexts,
    )  # fmt: skip
    node.num_known[:] = NONE
    node.num_own = occurrences.find(
        keys, own.previous[row], own.last[row], end, keys, end, node.own
    )
    if mixed:
        near, recent = state.near, state.recent
        node.num_near = occurrences.find(
            near.tokens[row], near.previous[row], near.last[row], it.near_length - 1, text, end,
            node.near,
        )  # fmt: skip
        node.num_recent = occurrences.find(
            recent.tokens[0], recent.previous[0], recent.last[0], state.growth[0].recent_end - 1,
            text, end, node.recent,
        )  # fmt: skip


@borrowing
def descend(state: Any, x: int) -> None:
    """Node ``x`` has a row, a parent, a depth, a token and a path; fill what the sources need."""
    node, growth, own = state.nodes[x], state.growth[0], state.own
    parent, row, token = state.nodes[node.parent], node.row, node.token
    it, mixed = state.rows[row], growth.rule == MIXED
    first = it.length == it.begin + 1 and node.depth == 1
    node.words = parent.words + begins_word(state.word_starts, token, first)
    node.num_contexts = contexts.extend_context(
        state.corpus, state.starts, parent, token, growth.depth - 1,
        cells.CONTEXTS if mixed else contexts.MOST, node,
    )  # fmt: skip
    node.num_known[:] = NONE
    node.num_own = occurrences.extend(
        own.tokens[row], own.previous[row], own.last[row], it.length - 1, parent.own,
        parent.num_own, state.canonical[token], node.own,
    )  # fmt: skip
    if mixed:
        near, recent = state.near, state.recent
        node.num_near = occurrences.extend(
            near.tokens[row], near.previous[row], near.last[row], it.near_length - 1,
            parent.near, parent.num_near, token, node.near,
        )  # fmt: skip
        node.num_recent = occurrences.extend(
            recent.tokens[0], recent.previous[0], recent.last[0], growth.recent_end - 1,
            parent.recent, parent.num_recent, token, node.recent,
        )  # fmt: skip


@borrowing
def gather(state: Any, x: int) -> None:
    """Enter every source's votes at a node."""
    node, scratch, asked = state.nodes[x], state.scratch[0], state.growth[0].asked
    row = node.row
    clear(node)
    node.other = cells.other_cell(0, 0, 0.0)
    if asked[CORPUS]:
        _corpus(state.corpus, node)
    if node.num_near and asked[NEIGHBOURS]:
        likeness = state.rows[row].likeness
        _near(state.near.tokens[row], state.near_weight[row], likeness, node, scratch)
    if node.num_own and asked[PROMPT]:
        begin = state.rows[row].begin
        _counted(
            state.texts[row], node.own, node.num_own, 0, begin - 1, node, cells.PROMPT, scratch
        )
        _counted(state.texts[row], node.own, node.num_own, begin, _END, node, cells.ANSWER, scratch)
    if node.num_recent and asked[RECENT]:
        text = state.recent.tokens[0]
        _counted(text, node.recent, node.num_recent, 0, _END, node, cells.RECENT, scratch)
    if len(state.aligned.keys) and asked[ALIGNED]:
        _aligned(state, node, scratch)
    if node.token < len(state.bigrams.tokens) and asked[BIGRAMS]:
        _bigrams(state.bigrams, node)


@borrowing
def _corpus(corpus: Any, node: Any) -> None:
    for slot in range(node.num_contexts):
        tokens, whole, known = node.contexts[slot, 0], node.contexts[slot, 3], node.known[slot]
        lo, hi = node.contexts[slot, 1], node.contexts[slot, 2]
        n = continuations(corpus, lo, hi, tokens, known)
        node.num_known[slot] = n
        if n == 0:
            continue
        node.bases[slot] = cells.corpus_base(slot, tokens, whole)
        for i in range(n):
            vote(node, slot, known[i, TOKEN], cells.share_level(known[i, COUNT] / whole))
        if slot == 0:
            node.other = cells.other_cell(tokens, whole, known[0, COUNT] / whole)


@borrowing
def _near(text: Any, weight: Any, likeness: int, node: Any, scratch: Any) -> None:
    """Votes of the neighbours by their similarity: all places, and those where most agrees."""
    places, sums, n = node.near, scratch.sums, node.num_near
    longest = _longest(places, n)
    sums[:] = 0.0
    of_all, of_longest = 0.0, 0.0
    for i in range(n):
        w = weight[places[i, 0]]
        best = w if places[i, 1] == longest else 0.0
        of_all += w
        of_longest += best
        j = candidate(node, text[places[i, 0] + 1])
        if j >= 0:
            sums[0, j] += w
            sums[1, j] += best
    slot = cells.NEIGHBOURS
    node.bases[slot] = cells.near_base(slot, longest, likeness)
    node.bases[slot + 1] = cells.near_base(slot + 1, longest, likeness)
    for j in range(node.width):
        if sums[0, j] > 0.0:
            node.levels[j, slot + 1] = cells.share_level(sums[0, j] / of_all)
        if sums[1, j] > 0.0:
            node.levels[j, slot] = cells.share_level(sums[1, j] / of_longest)


@borrowing
def _counted(
    text: Any, places: Any, n: int, begin: int, end: int, node: Any, slot: int, scratch: Any
) -> None:
    """Votes of the places in ``text[begin:end]`` where most tokens agree, each place the same."""
    sums, longest, whole = scratch.sums, 0, 0
    for i in range(n):
        if begin <= places[i, 0] < end:
            longest = max(longest, places[i, 1])
    if longest == 0:
        return
    sums[0, :] = 0.0
    for i in range(n):
        if places[i, 1] == longest and begin <= places[i, 0] < end:
            whole += 1
            j = candidate(node, text[places[i, 0] + 1])
            if j >= 0:
                sums[0, j] += 1.0
    node.bases[slot] = cells.counted_base(slot, longest, whole)
    for j in range(node.width):
        if sums[0, j] > 0.0:
            node.levels[j, slot] = cells.share_level(sums[0, j] / whole)


@borrowing
def _longest(places: Any, n: int) -> int:
    longest = 0
    for i in range(n):
        longest = max(longest, places[i, 1])
    return longest


@borrowing
def _aligned(state: Any, node: Any, scratch: Any) -> None:
    """Votes of the words that the prompt has beside the answer's next one."""
    table, row = state.aligned, node.row
    context_keys(
        state.words.hashes[row], state.words.lasts[row], state.rows[row].words,
        state.growth[0].head + node.words, node.token, _before(state, node), scratch.keys,
    )  # fmt: skip
    for kind in range(KINDS):
        record = find(table, scratch.keys[kind])
        if record < 0:
            continue
        slot, whole = cells.ALIGNED + kind, table.totals[record]
        node.bases[slot] = cells.aligned_base(kind, whole)
        for i in range(table.first[record], table.first[record + 1]):
            vote(node, slot, table.tokens[i], cells.share_level(table.counts[i] / whole))


@borrowing
def _before(state: Any, node: Any) -> int:
    """The answer's token in front of a node's, SEP for the first; -1 in front of that."""
    if node.parent != NONE:
        return int(state.nodes[node.parent].token)
    it = state.rows[node.row]
    if it.length - 1 > it.begin:
        return int(state.texts[node.row, it.length - 2])
    return -1


@borrowing
def _bigrams(bigrams: Any, node: Any) -> None:
    """Votes of the target's own table for the last token."""
    node.bases[cells.BIGRAM] = cells.BIGRAM_BASE
    for i in range(bigrams.tokens.shape[1]):
        share = math.exp(bigrams.logp[node.token, i])
        vote(node, cells.BIGRAM, bigrams.tokens[node.token, i], cells.share_level(share))
