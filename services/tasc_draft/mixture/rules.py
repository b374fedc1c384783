"""The two published rules for the probabilities of a node's candidates, TASC-spec and N-Gram Trie.

Both use corpus counts and the places where the same tokens occurred in the prompt and the answer.
`evidence` has this project's own rule.
"""

from typing import Any

from tasc_draft.compiled import borrowing
from tasc_draft.index import weights as cells
from tasc_draft.index.lookup import COUNT, TOKEN, continuations, count, narrow
from tasc_draft.mixture.evidence import candidate, clear
from tasc_draft.mixture.row_state import NONE


@borrowing
def tasc(state: Any, x: int) -> None:
    """TASC-spec (Tsur et al. 2026, arXiv 2602.24174, section 5.2).

    p(v) = lambda * p_corpus(v) + (1 - lambda) * p_prompt(v). Each source uses its longest matching
    context of fewer than ``n_max`` tokens. If one source has no matching context, the other gets
    all the weight. If neither has, the corpus's most frequent token is drafted. N-grams of the
    corpus are used if they occur at least ``p_min`` times.
    """
    node, scratch, growth, corpus = state.nodes[x], state.scratch[0], state.growth[0], state.corpus
    clear(node)
    longest, whole, context = 0, 0, NONE
    if growth.corpus_weight < 1.0:
        longest, whole = _agreement(node.own, node.num_own, growth.n_max - 1)
    if growth.corpus_weight > 0.0:
        context = _longest_kept(corpus, node, scratch, growth.n_max, growth.p_min)
    if context == NONE and whole == 0:
        _most_frequent(corpus, node, scratch, growth.sep)
        return
    by_corpus = growth.corpus_weight if whole else 1.0
    if context == NONE:
        by_corpus = 0.0
    if by_corpus > 0.0:
        _by_corpus(corpus, node, context, scratch, growth.p_min, by_corpus)
    if by_corpus < 1.0:
        _by_prompt(state, node, context, longest, whole, by_corpus)


@borrowing
def trie(state: Any, x: int) -> None:
    """The N-Gram Trie: continuations by their count in the prompt after the matched prefix.

    The prefix is the longest suffix of the answer, of at most ``prefix`` tokens, that occurs in the
    prompt. A path's probability is its count divided by the prefix's count, so that the most
    frequent paths are drafted first. Prefix and path together have at most ``n_max`` tokens.
    """
    node, growth = state.nodes[x], state.growth[0]
    clear(node)
    places, text = node.own, state.texts[node.row]
    last = state.rows[node.row].begin - 1
    longest = min(_longest_in_prompt(state.nodes, x, last), growth.prefix)
    if longest < 1 or longest + node.depth >= growth.n_max:
        return
    whole = 0
    for i in range(node.num_own):
        if places[i, 0] <= last and places[i, 1] >= longest + node.depth:
            whole += 1
            j = candidate(node, text[places[i, 0] + 1]) if places[i, 0] < last else NONE
            if j >= 0:
                node.chance[j] += 1.0
                node.levels[j, cells.PROMPT] = 1
    for j in range(node.width):
        node.chance[j] /= whole


@borrowing
def _longest_in_prompt(nodes: Any, x: int, last: int) -> int:
    """Length of the longest suffix of the answer that ends in the prompt before place ``last``."""
    while nodes[x].parent != NONE:
        x = nodes[x].parent
    longest = 0
    for i in range(nodes[x].num_own):
        if nodes[x].own[i, 0] < last:
            longest = max(longest, nodes[x].own[i, 1])
    return longest


@borrowing
def _agreement(places: Any, n: int, max_tokens: int) -> tuple[int, int]:
    """The longest agreement, up to ``max_tokens`` tokens, and the number of places that have it."""
    longest, whole = 0, 0
    for i in range(n):
        longest = max(longest, min(places[i, 1], max_tokens))
    for i in range(n):
        whole += places[i, 1] >= longest
    return longest, whole


@borrowing
def _longest_kept(corpus: Any, node: Any, scratch: Any, n_max: int, p_min: int) -> int:
    """The number of the longest context that an n-gram with a count of ``p_min`` or more continues.

    NONE without such a context. The context must have fewer than ``n_max`` tokens, but a longer
    context also represents the shorter ones that occur equally often, down to the next context.
    """
    for i in range(node.num_contexts):
        if i + 1 < node.num_contexts and node.contexts[i + 1, 0] >= n_max - 1:
            continue
        tokens, lo, hi = node.contexts[i, 0], node.contexts[i, 1], node.contexts[i, 2]
        n = continuations(corpus, lo, hi, tokens, scratch.found)
        if n and scratch.found[0, COUNT] >= p_min:
            return i
    return NONE


@borrowing
def _by_corpus(
    corpus: Any, node: Any, context: int, scratch: Any, p_min: int, weight: float
) -> None:
    tokens, lo, hi = node.contexts[context, 0], node.contexts[context, 1], node.contexts[context, 2]
    n = continuations(corpus, lo, hi, tokens, scratch.found)
    whole = node.contexts[context, 3]
    for i in range(n):
        if scratch.found[i, COUNT] >= p_min:
            j = candidate(node, scratch.found[i, TOKEN])
            # In a wrong index, the count may exceed the whole.
            node.chance[j] = weight * min(scratch.found[i, COUNT] / whole, 1.0)


@borrowing
def _by_prompt(
    state: Any, node: Any, context: int, longest: int, whole: int, by_corpus: float
) -> None:
    text, p_min = state.texts[node.row], state.growth[0].p_min
    places, by_prompt = node.own, state.scratch[0].sums
    share = (1.0 - by_corpus) / whole
    by_prompt[0, :] = 0.0
    for i in range(node.num_own):
        if places[i, 1] < longest:
            continue
        known = node.width
        j = candidate(node, text[places[i, 0] + 1])
        if j < 0:
            continue
        if j == known and context != NONE:
            node.chance[j] = by_corpus * _corpus_share(state.corpus, node, context, j, p_min)
        node.chance[j] += share
        by_prompt[0, j] += share
    for j in range(node.width):
        if 2.0 * by_prompt[0, j] > node.chance[j]:
            node.levels[j, cells.PROMPT] = 1


@borrowing
def _corpus_share(corpus: Any, node: Any, context: int, j: int, p_min: int) -> float:
    """p_corpus of a candidate that is not among the most frequent continuations."""
    tokens, lo, hi = node.contexts[context, 0], node.contexts[context, 1], node.contexts[context, 2]
    whole = node.contexts[context, 3]
    lo, hi = narrow(corpus, lo, hi, tokens, node.candidates[j])
    occurs = count(corpus, lo, hi)
    return occurs / whole if occurs >= p_min else 0.0


@borrowing
def _most_frequent(corpus: Any, node: Any, scratch: Any, sep: int) -> None:
    everything = len(corpus.order)
    n = continuations(corpus, 0, everything, 0, scratch.found)
    for i in range(n):
        if scratch.found[i, TOKEN] != sep:
            j = candidate(node, scratch.found[i, TOKEN])
            node.chance[j] = scratch.found[i, COUNT] / count(corpus, 0, everything)
            return
