"""Nodes of the draft tree: candidates for the next token, their evidence and probabilities.

Each source keeps a state at each node, derived from its state at the parent and the node's token
(`root`, `descend`). From this state, the source supports candidates, each with a share of the
source's evidence (`gather`). A candidate's score is the sum of weight[base + level] over the slots
with evidence, and its probability is p(v) = exp(score(v)) / Z, where Z includes a score for "none
of the candidates".
The weights maximise the likelihood of the tokens that the target emitted (log-linear mixing of
n-gram evidence). So probabilities of paths are calibrated and no mixing constant has to be chosen.

If a row is limited to labels, only tokens that the labels allow are candidates. Candidates without
evidence share the probability of "none of the candidates", so that weights learnt without labels
fit.
"""

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tasc_draft.compiled import borrowing
from tasc_draft.drafts import (
    ALIGNED,
    BIGRAMS,
    CORPUS,
    NEIGHBOURS,
    NGRAM_SOURCES,
    PROMPT,
    RECENT,
    Int32,
)
from tasc_draft.index import lookup
from tasc_draft.index import weights as cells
from tasc_draft.index.aligned import KINDS, context_keys, find
from tasc_draft.index.lookup import (
    COUNT,
    TOKEN,
    WIDEST,
    continuations,
    copy,
    count,
    keep_greatest,
    narrow,
)
from tasc_draft.index.weights import CONTEXTS, SLOTS
from tasc_draft.labels import NOWHERE, UNLIMITED, child
from tasc_draft.mixture.row_state import (
    COLUMNS,
    MAX_CONTEXT,
    NONE,
    begins_word,
    extend_contexts,
    extend_places,
    find_places,
    int32,
    pick_contexts,
)

WIDTH = 48  # maximum candidates of a node
FULL_WIDTH = WIDTH + 32  # including candidates that only an external tree has
PLACES = 48  # maximum places in a local text that a node keeps
RECENT_PLACES = 16  # maximum places in recent answers; more places cost much and add little
SILENT = -1  # base of a slot without evidence at a node
NEGLIGIBLE = 1e-2  # smaller gradients do not move the weights
HOPELESS = 9.0  # a score this far below the best gets probability 0 and needs no exponential
MIXED, TASC, TRIE = 0, 1, 2  # mixtures
_LAST_PLACE = 1 << 30  # larger than every place

# A node of a step's trees. A node that was not expanded has no candidates (full_width is 0).
#   row, batch_row: number of the row, and its position in the batch
#   place: position of the node in the row's draft
#   parent, first_child, sibling: nodes, or NONE; path: probability of the path to the node
#   source: number of the source that contributed most
#   words: number of words begun in the answer up to the node
#   known: continuations of the first contexts; num_known is NONE if they were not looked up
#   near, own, recent: (place, agreeing tokens) in the local texts
#   width: number of the n-grams' candidates; candidates of the external tree follow to full_width
#   supported: number of the n-grams' candidates with evidence, which precede the others
#   bases: cell at which a slot's levels begin, or SILENT; other: cell of "none of the candidates"
#   chance: probability of each candidate, negated once it is a node of the tree
#   next: the candidate whose entry is on the heap, or NONE
# For the next fields, see `external_tree`.
#   external: the node of the external tree at the same path, if it has children, or NONE
#   external_chance: probability of each candidate in the external tree
#   floor, rest: by side, the probability of a candidate that the side does not name, and of all
#     other tokens
#   mixed, none: mixed probability of each candidate (negated like chance), and of other tokens
#   cell: the cell of trust by which both sides were mixed
# For the next fields, see `tasc_draft.labels`.
#   label: the state in the forest of labels, or UNLIMITED
#   others: number of tokens without evidence that the labels allow, or UNLIMITED
#   forced: whether the node's only child is a token that the labels force
NODE = np.dtype(
    [
        *int32("row", "batch_row", "place", "parent", "first_child", "sibling", "depth", "token"),
        ("path", np.float32),
        *int32("source", "words", "num_contexts"),
        ("contexts", np.int32, (MAX_CONTEXT, COLUMNS)),
        ("num_known", np.int32, (CONTEXTS,)),
        ("known", np.int32, (CONTEXTS, WIDEST, lookup.COLUMNS)),
        ("num_near", np.int32),
        ("near", np.int32, (PLACES, 2)),
        ("num_own", np.int32),
        ("own", np.int32, (PLACES, 2)),
        ("num_recent", np.int32),
        ("recent", np.int32, (RECENT_PLACES, 2)),
        ("width", np.int32),
        ("candidates", np.int32, (FULL_WIDTH,)),
        ("bases", np.int32, (SLOTS,)),
        ("levels", np.int8, (FULL_WIDTH, SLOTS)),
        ("chance", np.float32, (FULL_WIDTH,)),
        ("other", np.int32),
        ("other_chance", np.float32),
        *int32("next", "full_width", "external"),
        ("external_chance", np.float32, (FULL_WIDTH,)),
        ("floor", np.float32, (2,)),
        ("rest", np.float32, (2,)),
        ("mixed", np.float32, (FULL_WIDTH,)),
        ("none", np.float32),
        *int32("cell", "label", "supported", "others", "forced"),
    ],
    align=True,
)

# Scalars of the compiled code; see `DraftSettings`. sep, depth and head belong to the index.
# enabled: by number of a source, whether it is in use; child_chance: see OPTIMISTIC_CHILD_PROB.
GROWTH = np.dtype(
    [
        *int32("rule", "n_max", "p_min", "prefix", "max_tokens"),
        *int32("vocab_size", "sep", "depth", "head"),
        *int32("recent_end"),
        ("corpus_weight", np.float64),
        ("branching", np.bool_),
        ("min_prob", np.float32),
        ("child_chance", np.float32),
        ("rate", np.float32),
        ("enabled", np.int8, (len(NGRAM_SOURCES),)),
    ],
    align=True,
)

# Memory for the look-ups of one node.
SCRATCH = np.dtype(
    [
        ("found", np.int32, (WIDEST, lookup.COLUMNS)),
        ("sums", np.float32, (2, WIDTH)),
        ("keys", np.uint32, (KINDS,)),
    ],
    align=True,
)


class Words(NamedTuple):
    """``[rows, words]`` of the prompts: hash and last token of each word."""

    hashes: NDArray[np.uint32]
    lasts: Int32


class Learnt(NamedTuple):
    """``float32[CELLS]`` weights and the summed squares of their gradients (AdaGrad).

    Attributes:
        trust, trust_squares: ``float32[external_tree.CELLS, 5]``, the same for `external_tree`.
    """

    weights: NDArray[np.float32]
    squares: NDArray[np.float32]
    trust: NDArray[np.float32]
    trust_squares: NDArray[np.float32]


@borrowing
def clear(node: Any) -> None:
    node.width = node.supported = node.forced = 0
    node.others = UNLIMITED
    node.bases[:] = SILENT


@borrowing
def candidate(node: Any, token: int) -> int:
    """Like `enter`, for n-grams' candidates; NONE for END, which may follow a cut output."""
    if token < 0:
        return NONE
    i = enter(node, token, node.width, WIDTH)
    if i == node.width:
        node.width = i + 1
    return i


@borrowing
def enter(node: Any, token: int, n: int, most: int) -> int:
    """The number of ``token`` among a node's first ``n`` candidates, to which it is added if new.

    NONE if the token is new and the node already has ``most`` candidates.
    """
    for i in range(n):
        if node.candidates[i] == token:
            return i
    if n == most:
        return NONE
    node.candidates[n] = token
    node.levels[n, :] = 0
    node.chance[n] = 0.0
    return n


@borrowing
def score(weights: Any, node: Any) -> None:
    """Fill the probabilities of a node's candidates and of all other tokens; they sum to one.

    All tokens without evidence together have one probability. If the row's labels determine which
    tokens these are, they share this probability equally.
    """
    n, other = node.supported, -math.inf if node.others == 0 else weights[node.other]
    greatest = other
    node.chance[:n] = 0.0
    for slot in range(SLOTS):
        base = node.bases[slot]
        if base >= 0:
            for i in range(n):
                node.chance[i] += weights[base + node.levels[i, slot]]
    for i in range(n):
        greatest = max(greatest, node.chance[i])
    none = 0.0 if node.others == 0 else math.exp(other - greatest)
    whole = none
    for i in range(n):
        below = node.chance[i] - greatest
        node.chance[i] = math.exp(below) if below > -HOPELESS else 0.0
        whole += node.chance[i]
    for i in range(n):
        node.chance[i] /= whole
    node.other_chance = none / whole
    for i in range(n, node.width):
        node.chance[i] = node.other_chance / node.others


@borrowing
def learn(weights: Any, squares: Any, node: Any, token: int, rate: float) -> None:
    """One step of gradient ascent on the likelihood of ``token`` after this node (AdaGrad)."""
    missed = 1.0
    for i in range(node.supported):
        hit = 0.0
        if node.candidates[i] == token:
            hit, missed = 1.0, 0.0
        gradient = hit - abs(node.chance[i])
        if abs(gradient) < NEGLIGIBLE:
            continue
        for slot in range(SLOTS):
            if node.bases[slot] >= 0:
                _climb(weights, squares, node.bases[slot] + node.levels[i, slot], gradient, rate)
    if node.others != 0:
        _climb(weights, squares, node.other, missed - node.other_chance, rate)


@borrowing
def _climb(weights: Any, squares: Any, cell: int, gradient: float, rate: float) -> None:
    squares[cell] += gradient * gradient
    weights[cell] += rate * gradient / math.sqrt(squares[cell])


@borrowing
def dominant_slot(weights: Any, node: Any, i: int) -> int:
    """The slot that adds most to a candidate's score, compared with a candidate without support."""
    best, best_gain = 0, -math.inf
    for slot in range(SLOTS):
        base, level = node.bases[slot], node.levels[i, slot]
        if base >= 0 and level > 0:
            gain = weights[base + level] - weights[base]
            if gain > best_gain:
                best, best_gain = slot, gain
    return best


@borrowing
def root(state: Any, x: int, row: int) -> None:
    """Make node ``x`` the root of a row's tree, which is the end of the row's text."""
    node, row_state, mixed = state.nodes[x], state.rows[row], state.growth[0].rule == MIXED
    text, end = state.texts[row], row_state.length - 1
    node.row = row
    node.parent = NONE
    node.depth = 0
    node.token = text[end]
    node.path = 1.0
    node.words = row_state.begun
    node.label = row_state.label
    times, max_contexts = (2, CONTEXTS) if mixed else (1, MAX_CONTEXT)
    contexts, found = row_state.contexts, row_state.num_contexts
    node.num_contexts = pick_contexts(contexts, found, times, max_contexts, node.contexts)
    node.num_known[:] = NONE
    node.num_own = find_places(state.own, row, end, state.own.tokens[row], end, node.own)
    if mixed:
        last = row_state.near_length - 1
        node.num_near = find_places(state.near, row, last, text, end, node.near)
        recent_end = state.growth[0].recent_end - 1
        node.num_recent = find_places(state.recent, 0, recent_end, text, end, node.recent)


@borrowing
def descend(state: Any, x: int) -> None:
    """Fill the sources' states at node ``x``, whose row, parent, depth, token and path are set."""
    node, growth = state.nodes[x], state.growth[0]
    parent, row, token = state.nodes[node.parent], node.row, node.token
    row_state, mixed = state.rows[row], growth.rule == MIXED
    first = row_state.length == row_state.begin + 1 and node.depth == 1
    node.words = parent.words + begins_word(state.word_starts, token, first)
    node.num_contexts = extend_contexts(
        state, parent, token, CONTEXTS if mixed else MAX_CONTEXT, node
    )
    node.num_known[:] = NONE
    own, end = state.canonical[token], row_state.length - 1
    node.num_own = extend_places(state.own, row, end, parent.own, parent.num_own, own, node.own)
    if mixed:
        end = row_state.near_length - 1
        node.num_near = extend_places(
            state.near, row, end, parent.near, parent.num_near, token, node.near
        )
        end = growth.recent_end - 1
        node.num_recent = extend_places(
            state.recent, 0, end, parent.recent, parent.num_recent, token, node.recent
        )


@borrowing
def gather(state: Any, x: int, labels: Any) -> None:
    """Enter the evidence of all sources at a node, for tokens that the row's labels allow."""
    node, scratch, enabled = state.nodes[x], state.scratch[0], state.growth[0].enabled
    row = node.row
    clear(node)
    node.other = cells.other_cell(0, 0, 0.0)
    if enabled[CORPUS]:
        _corpus(labels, state.corpus, node, scratch.found)
    if node.num_near and enabled[NEIGHBOURS]:
        group = state.rows[row].similarity
        _near(state.near.tokens[row], state.near_weight[row], group, labels, node, scratch)
    if node.num_own and enabled[PROMPT]:
        text, n, begin = state.texts[row], node.num_own, state.rows[row].begin
        _counted(text, node.own, n, 0, begin - 1, labels, node, cells.PROMPT, scratch)
        _counted(text, node.own, n, begin, _LAST_PLACE, labels, node, cells.ANSWER, scratch)
    if node.num_recent and enabled[RECENT]:
        text, n = state.recent.tokens[0], node.num_recent
        _counted(text, node.recent, n, 0, _LAST_PLACE, labels, node, cells.RECENT, scratch)
    if len(state.aligned.keys) and enabled[ALIGNED]:
        _aligned(labels, state, node, scratch)
    if node.token < len(state.bigrams.tokens) and enabled[BIGRAMS]:
        _bigrams(labels, state.bigrams, node)
    node.supported = node.width
    if node.label >= 0:
        _name_others(labels, node)


@borrowing
def _allows(labels: Any, node: Any, token: int) -> bool:
    """Whether a token may follow a node, by the labels of its row."""
    label = node.label
    return label < 0 or child(labels.token, labels.first, label, token) != NOWHERE


@borrowing
def _name_others(labels: Any, node: Any) -> None:
    """Append the allowed tokens without evidence to the candidates, if all of them fit."""
    begin, end = labels.first[node.label], labels.first[node.label + 1]
    node.others = end - begin - node.supported
    if end - begin <= WIDTH:
        for state in range(begin, end):
            candidate(node, labels.token[state])


@borrowing
def _allowed(labels: Any, node: Any, token: int) -> int:
    """`candidate` for a token that may follow; NONE for another token."""
    return candidate(node, token) if _allows(labels, node, token) else NONE


@borrowing
def _support(labels: Any, node: Any, slot: int, token: int, level: int) -> None:
    """Record that ``slot`` supports ``token`` with this level, if the token may follow."""
    i = _allowed(labels, node, token)
    if i >= 0:
        node.levels[i, slot] = level


@borrowing
def _corpus(labels: Any, corpus: Any, node: Any, found: Any) -> None:
    """Enter the evidence of the corpus. With labels, only continuations that they allow count."""
    slot = 0
    for i in range(node.num_contexts):
        tokens, whole, known = node.contexts[i, 0], node.contexts[i, 3], node.known[i]
        lo, hi = node.contexts[i, 1], node.contexts[i, 2]
        n = continuations(corpus, lo, hi, tokens, known)
        node.num_known[i] = n
        if node.label < 0:
            _continued(labels, node, i, tokens, whole, known, n)
        else:
            n, whole = _allowed_continuations(labels, corpus, node, i, found)
            _continued(labels, node, slot, tokens, whole, found, n)
            slot += n > 0


@borrowing
def _continued(
    labels: Any, node: Any, slot: int, tokens: int, whole: int, known: Any, n: int
) -> None:
    """Enter the continuations of a context, each by its share of the count ``whole``."""
    if n == 0:
        return
    node.bases[slot] = cells.corpus_base(slot, tokens, whole)
    for i in range(n):
        level = cells.share_level(known[i, COUNT] / whole)
        _support(labels, node, slot, known[i, TOKEN], level)
    if slot == 0:
        node.other = cells.other_cell(tokens, whole, known[0, COUNT] / whole)


@borrowing
def _allowed_continuations(
    labels: Any, corpus: Any, node: Any, context: int, found: Any
) -> tuple[int, int]:
    """Fill ``found`` with the most frequent continuations that the row's labels allow.

    If the context may have more continuations than ``node.known``, each allowed token is looked up
    in the corpus.

    Returns:
        The number of lines filled, and the sum of the counts of all allowed continuations.
    """
    tokens, lo, hi = node.contexts[context, 0], node.contexts[context, 1], node.contexts[context, 2]
    known, kept, whole = node.known[context], 0, 0
    if node.num_known[context] < WIDEST:
        for i in range(node.num_known[context]):
            if _allows(labels, node, known[i, TOKEN]):
                copy(known, i, found, kept)
                whole += known[i, COUNT]
                kept += 1
        return kept, whole
    for state in range(labels.first[node.label], labels.first[node.label + 1]):
        token = labels.token[state]
        begin, end = narrow(corpus, lo, hi, tokens, token)
        if begin < end:
            # Labels and continuations are sorted by token, so later ones begin after ``end``.
            occurs, lo = count(corpus, begin, end), end
            kept = keep_greatest(found, kept, token, occurs, begin, end)
            whole += occurs
    return kept, whole


@borrowing
def _near(text: Any, weight: Any, group: int, labels: Any, node: Any, scratch: Any) -> None:
    """Enter the neighbours' evidence, weighed by similarity, for two slots.

    One slot has the places with the longest agreement, the other has all places.
    """
    places, sums, n = node.near, scratch.sums, node.num_near
    longest = _longest(places, n)
    sums[:] = 0.0
    of_all, of_longest = 0.0, 0.0
    for i in range(n):
        w = weight[places[i, 0]]
        best = w if places[i, 1] == longest else 0.0
        of_all += w
        of_longest += best
        j = _allowed(labels, node, text[places[i, 0] + 1])
        if j >= 0:
            sums[0, j] += w
            sums[1, j] += best
    slot = cells.NEIGHBOURS
    node.bases[slot] = cells.near_base(slot, longest, group)
    node.bases[slot + 1] = cells.near_base(slot + 1, longest, group)
    for j in range(node.width):
        if sums[0, j] > 0.0:
            node.levels[j, slot + 1] = cells.share_level(sums[0, j] / of_all)
        if sums[1, j] > 0.0:
            node.levels[j, slot] = cells.share_level(sums[1, j] / of_longest)


@borrowing
def _counted(
    text: Any, places: Any, n: int, begin: int, end: int,
    labels: Any, node: Any, slot: int, scratch: Any,
) -> None:  # fmt: skip
    """Enter the places in ``text[begin:end]`` with the longest agreement, with equal weights."""
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
            j = _allowed(labels, node, text[places[i, 0] + 1])
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
def _aligned(labels: Any, state: Any, node: Any, scratch: Any) -> None:
    """Enter the evidence of the prompt's word that is aligned with the answer's next word."""
    table, row, before = state.aligned, node.row, _before(state, node)
    hashes, lasts, n = state.words.hashes[row], state.words.lasts[row], state.rows[row].words
    aligned = state.growth[0].head + node.words
    context_keys(hashes, lasts, n, aligned, node.token, before, scratch.keys)
    for kind in range(KINDS):
        record = find(table, scratch.keys[kind])
        if record < 0:
            continue
        slot, whole = cells.ALIGNED + kind, table.totals[record]
        node.bases[slot] = cells.aligned_base(kind, whole)
        for i in range(table.first[record], table.first[record + 1]):
            level = cells.share_level(table.counts[i] / whole)
            _support(labels, node, slot, table.tokens[i], level)


@borrowing
def _before(state: Any, node: Any) -> int:
    """The token before a node's token; SEP before the answer's first token, -1 before SEP."""
    if node.parent != NONE:
        return int(state.nodes[node.parent].token)
    row_state = state.rows[node.row]
    if row_state.length - 1 > row_state.begin:
        return int(state.texts[node.row, row_state.length - 2])
    return -1


@borrowing
def _bigrams(labels: Any, bigrams: Any, node: Any) -> None:
    """Enter the target's own continuations of the node's token."""
    node.bases[cells.BIGRAM] = cells.BIGRAM_BASE
    for i in range(bigrams.tokens.shape[1]):
        share = math.exp(bigrams.logp[node.token, i])
        token, level = bigrams.tokens[node.token, i], cells.share_level(share)
        _support(labels, node, cells.BIGRAM, token, level)
