"""Compiled lookup and drafting over flat arrays. No objects, no allocation.

Row state, one line per row: ``text[row]`` the prompt and the answer so far, ``previous[row, i]``
the last place before i with the same token, ``last[row, t]`` the last place of token t, and
``matched[row, k]`` the trie node of the answer's last k tokens (SEP in front of it), or -1.
"""

from typing import Any

import numba
import numpy as np

# The most earlier occurrences of one token that are looked at; bounds the time of a draft step.
MAX_OCCURRENCES = 128
ROOT = 0
NONE = -1

compiled = numba.njit(cache=True, nogil=True, boundscheck=False)


@compiled
def child(tokens: Any, first_child: Any, node: int, token: int) -> int:
    """The child of ``node`` by ``token``, or -1: a binary search."""
    low, high = first_child[node], first_child[node + 1]
    end = high
    while low < high:
        middle = (low + high) >> 1
        if tokens[middle] < token:
            low = middle + 1
        else:
            high = middle
    if low < end and tokens[low] == token:
        return low
    return NONE


@compiled
def advance(matched: Any, tokens: Any, first_child: Any, token: int) -> None:
    """Move every matched context length on by one token."""
    for k in range(len(matched) - 1, 0, -1):
        shorter = matched[k - 1]
        matched[k] = child(tokens, first_child, shorter, token) if shorter >= 0 else NONE
    matched[0] = ROOT


@compiled
def append(
    text: Any, previous: Any, last: Any, length: int, new: Any, matched: Any, tokens: Any,
    first_child: Any, in_answer: bool,
) -> None:  # fmt: skip
    """Append ``new`` to a row; prompt tokens do not move the corpus context."""
    for token in new:
        text[length] = token
        previous[length] = last[token]
        last[token] = length
        length += 1
        if in_answer:
            advance(matched, tokens, first_child, token)


@compiled
def match_again(
    matched: Any, tokens: Any, first_child: Any, text: Any, begin: int, length: int, sep: int
) -> None:
    """Find the contexts of an answer ``text[begin:length]`` in another trie."""
    matched[:] = NONE
    matched[0] = ROOT
    since = max(begin, length - len(matched) + 1)
    if since == begin:
        advance(matched, tokens, first_child, sep)
    for i in range(since, length):
        advance(matched, tokens, first_child, text[i])


@compiled
def forget(last: Any, text: Any, length: int) -> None:
    """Clear a row's occurrence table by the tokens it touched, not by the whole vocabulary."""
    for i in range(length):
        last[text[i]] = NONE


@compiled
def prompt_counts(
    text: Any, previous: Any, last: Any, committed: int, length: int, longest: int,
    found: Any, counts: Any,
) -> tuple[int, int]:  # fmt: skip
    """Continuations of the longest match of the text's end among earlier committed places.

    ``text[committed:length]`` is a draft not yet verified. Fills ``found`` and ``counts``; returns
    how many continuations there are and the sum of their counts.
    """
    at = last[text[length - 1]]
    best, size, total = 0, 0, 0
    newest = max(committed - 2, NONE)  # the last place that a committed token follows
    for _ in range(MAX_OCCURRENCES):
        while at > newest:
            at = previous[at]
        if at < 0:
            break
        match = 1
        while match < longest and at >= match and text[at - match] == text[length - 1 - match]:
            match += 1
        if match > best:
            best, size, total = match, 0, 0
        if match == best:
            following, place = text[at + 1], 0
            while place < size and found[place] != following:
                place += 1
            if place == size:
                found[size], counts[size] = following, 0
                size += 1
            counts[place] += 1
            total += 1
        at = previous[at]
    return size, total


@compiled
def longest_match(matched: Any, first_child: Any) -> int:
    """The node of the longest matched context that has a continuation, at least one token long."""
    for k in range(len(matched) - 1, 0, -1):
        node = matched[k]
        if node >= 0 and first_child[node + 1] > first_child[node]:
            return node
    return NONE


@compiled
def choose(
    node: int, size: int, total: int, found: Any, counts: Any, weight: float,
    tokens: Any, node_counts: Any, first_child: Any, best_child: Any,
) -> tuple[int, float, int]:  # fmt: skip
    """The likeliest next token of the mixture: (token, probability, source).

    p(x|c) = weight * p_corpus(x|c) + (1 - weight) * p_prompt(x|c); a source that does not match
    leaves all weight to the other; where none does, the corpus's most frequent token. Only the
    corpus's best child and the prompt's continuations can be the argmax.
    """
    if node < 0 and size == 0:
        best = best_child[ROOT]
        if best < 0:
            return NONE, 0.0, 0
        return tokens[best], node_counts[best] / node_counts[ROOT], 0
    if node < 0:
        weight = 0.0
    elif size == 0:
        weight = 1.0
    token, probability, source = NONE, -1.0, 0
    if node >= 0:
        best = best_child[node]
        token, probability = tokens[best], weight * node_counts[best] / node_counts[node]
    for i in range(size):
        by_prompt = (1.0 - weight) * counts[i] / total
        by_corpus = 0.0
        if node >= 0:
            known = child(tokens, first_child, node, found[i])
            if known >= 0:
                by_corpus = weight * node_counts[known] / node_counts[node]
        both = by_corpus + by_prompt
        if both > probability or (both == probability and found[i] <= token):
            token, probability, source = found[i], both, 1 if by_prompt > by_corpus else 0
    return token, probability, source


@compiled
def draft_chains(
    rows: Any, budget: Any, text: Any, previous: Any, last: Any, lengths: Any, all_matched: Any,
    tokens: Any, node_counts: Any, first_child: Any, best_child: Any, is_eos: Any,
    vocab_size: int, limit: int, weight: float, min_prob: float,
    out_tokens: Any, out_parents: Any, out_depths: Any, out_offsets: Any, out_logp: Any,
    out_source: Any, matched: Any, found: Any, counts: Any,
) -> int:  # fmt: skip
    """Draft one chain for each row into the flat output arrays; returns how many tokens.

    A draft ends before an id at or above ``vocab_size``, which the target does not have.
    """
    n = 0
    longest = len(matched) - 1
    for i in range(len(rows)):
        row = rows[i]
        out_offsets[i] = n
        matched[:] = all_matched[row]
        committed = lengths[row]
        path = 1.0
        for depth in range(min(budget[i], limit)):
            end = committed + depth
            size, total = 0, 0
            if weight < 1.0:
                size, total = prompt_counts(
                    text[row], previous[row], last[row], committed, end, longest, found, counts
                )
            node = longest_match(matched, first_child) if weight > 0.0 else NONE
            token, probability, source = choose(
                node, size, total, found, counts, weight,
                tokens, node_counts, first_child, best_child,
            )  # fmt: skip
            path *= probability
            if token < 0 or token >= vocab_size or path < min_prob:
                break
            text[row, end] = token
            out_tokens[n] = token
            out_parents[n] = depth - 1
            out_depths[n] = depth + 1
            out_logp[n] = np.log(path)
            out_source[n] = source
            n += 1
            if is_eos[token]:
                break
            advance(matched, tokens, first_child, token)
    out_offsets[len(rows)] = n
    return n
