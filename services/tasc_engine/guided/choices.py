"""Guided choice: an answer is one of some texts, in the tokens that the tokenizer writes it in.

Other ways to write the same text are not allowed: the corpus, and so what is drafted, has this one.

The choices form a trie in flat arrays, walked by compiled code. Nodes are numbered level by level
with siblings by token, so that children are neighbours: those of node i are ``first[i]`` to
``first[i + 1] - 1``, and node 0 is the root.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from tasc_draft.tokens import Tokens
from tasc_engine.errors import GuideError
from tasc_engine.guided.following import Guide, Masks
from tasc_text import TaskTokenizer

Int32 = NDArray[np.int32]
NOWHERE = -1  # the state behind a token that no sequence has


@dataclass(frozen=True)
class Trie:
    """Token sequences that share what they begin with.

    Attributes:
        token: ``int32[nodes]`` what leads to a node.
        first: ``int32[nodes + 1]`` where each node's children begin.
    """

    token: Int32
    first: Int32

    @classmethod
    def of(cls, sequences: Sequence[Sequence[int]]) -> "Trie":
        """The trie of sequences, which may come in any order and more than once."""
        texts = Tokens.of(sorted({tuple(s) for s in sequences}))
        size = len(texts.ids) + 1
        token, parent, depth = (np.zeros(size, np.int32) for _ in range(3))
        path = np.zeros(int(texts.lengths.max(initial=0)) + 1, np.int32)
        n = _grow(texts.ids, texts.offsets, token, parent, depth, path)
        by_level = np.argsort(depth[:n], kind="stable")
        place = np.empty(n, np.int32)
        place[by_level] = np.arange(n, dtype=np.int32)
        above = place[parent[by_level[1:]]]
        first = 1 + np.searchsorted(above, np.arange(n + 1))
        return cls(token[by_level], first.astype(np.int32))

    def look(
        self,
        state: int,
        tokens: Int32,
        parents: Int32,
        kept: NDArray[np.bool_],
        masks: NDArray[np.uint32],
    ) -> None:
        """See `Guide.look`, from a state on."""
        _look(self.token, self.first, state, tokens, parents, kept, masks)

    def behind(self, state: int, tokens: Int32) -> int:
        """The state behind some tokens; `NOWHERE` where none of the sequences goes."""
        return int(_behind(self.token, self.first, state, tokens))

    def forced(self, state: int, most: int) -> Int32:
        """``int32[n]`` the stretch of single children, at most so many."""
        found = np.empty(most, np.int32)
        return found[: _forced(self.token, self.first, state, found)]


def warm_up() -> None:
    """Compile, or load what is compiled, before the first request waits for it."""
    trie, one = Trie.of([[0]]), np.zeros(1, np.int32)
    trie.look(0, one, one - 1, np.zeros(1, bool), np.zeros((2, 1), np.uint32))
    trie.behind(0, one)
    trie.forced(0, 1)


@numba.njit(cache=True, nogil=True)
def _grow(ids: Any, offsets: Any, token: Any, parent: Any, depth: Any, path: Any) -> int:
    """Nodes of sorted sequences, each in front of those below it; ``path`` is scratch."""
    n, before = 1, ids[:0]
    for i in range(len(offsets) - 1):
        now = ids[offsets[i] : offsets[i + 1]]
        shared = 0
        while shared < min(len(now), len(before)) and now[shared] == before[shared]:
            shared += 1
        for level in range(shared, len(now)):
            token[n], parent[n], depth[n] = now[level], path[level], level + 1
            path[level + 1] = n
            n += 1
        before = now
    return n


@numba.njit(cache=True, nogil=True)
def _child(token: Any, first: Any, state: int, wanted: int) -> int:
    low, high = first[state], first[state + 1]
    end = high
    while low < high:
        middle = (low + high) // 2
        if token[middle] < wanted:
            low = middle + 1
        else:
            high = middle
    return low if low < end and token[low] == wanted else NOWHERE


@numba.njit(cache=True, nogil=True)
def _fill(token: Any, first: Any, state: int, mask: Any) -> None:
    mask[:] = 0
    for child in range(first[state], first[state + 1]):
        mask[token[child] >> 5] |= np.uint32(1) << np.uint32(token[child] & 31)


@numba.njit(cache=True, nogil=True)
def _look(
    token: Any, first: Any, state: int, tokens: Any, parents: Any, kept: Any, masks: Any
) -> None:
    kept[:] = False
    if state < 0:
        masks[0] = 0
        return
    states = np.empty(len(tokens), np.int32)
    _fill(token, first, state, masks[0])
    for x in range(len(tokens)):
        above = parents[x]
        if above < 0 or kept[above]:
            states[x] = _child(token, first, state if above < 0 else states[above], tokens[x])
            if states[x] >= 0:
                kept[x] = True
                _fill(token, first, states[x], masks[1 + x])


@numba.njit(cache=True, nogil=True)
def _behind(token: Any, first: Any, state: int, tokens: Any) -> int:
    for i in range(len(tokens)):
        if state < 0:
            break
        state = _child(token, first, state, tokens[i])
    return state


@numba.njit(cache=True, nogil=True)
def _forced(token: Any, first: Any, state: int, found: Any) -> int:
    n = 0
    while state >= 0 and n < len(found) and first[state + 1] - first[state] == 1:
        state = first[state]
        found[n] = token[state]
        n += 1
    return n


_SHOWN = 40  # characters of a choice in an error


@dataclass(frozen=True)
class Choices:
    """Texts as a trie of their tokens, each with an end of sequence behind it.

    A text that another one begins with may end with any end of sequence. Behind the others, where
    nothing else may follow, there is only the tokenizer's first end, which is then forced.

    Attributes:
        longest: Tokens of the longest, its end included.
        name: That one, for errors.
    """

    trie: Trie
    words: int
    longest: int
    name: str

    @classmethod
    def of(cls, texts: Sequence[str], tokenizer: TaskTokenizer, vocab_size: int) -> "Choices":
        """Compile choices.

        Raises:
            GuideError: A text is empty, has no tokens, one the model does not know or one that
                ends an answer, or is not what its tokens say.
        """
        ids = tokenizer.encode_outputs(texts)
        ends = [end for end in tokenizer.eos_ids if end < vocab_size]
        _require_sayable(texts, ids, tokenizer, vocab_size)
        lengths = [len(tokens) for tokens in ids]
        at = int(np.argmax(lengths))
        begun = _begun(ids)
        trie = Trie.of(
            [
                [*tokens, end]
                for tokens in ids
                for end in (ends if tuple(tokens) in begun else ends[:1])
            ]
        )
        return cls(trie, -(-vocab_size // 32), lengths[at] + 1, _name(at, texts[at]))

    def guide(self, max_tokens: int) -> Guide:
        """A guide for one answer.

        Raises:
            GuideError: A choice does not fit ``max_tokens``.
        """
        if self.longest > max_tokens:
            raise GuideError(
                f"{self.name} takes {self.longest} tokens, its end included, and max_tokens is "
                f"{max_tokens}; raise max_tokens, shorten the prompt, or leave the choice out"
            )
        return ChoiceGuide(self)


class ChoiceGuide:
    """Where one answer is in the trie; see `Guide`."""

    def __init__(self, choices: Choices) -> None:
        self.words = choices.words
        self.error = ""
        self._trie = choices.trie
        self._state = 0

    def look(self, tokens: Int32, parents: Int32, kept: NDArray[np.bool_], masks: Masks) -> None:
        self._trie.look(self._state, tokens, parents, kept, masks)

    def advance(self, tokens: Int32) -> None:
        self._state = self._trie.behind(self._state, tokens)
        if self._state == NOWHERE and not self.error:
            self.error = f"no choice goes on with tokens {tokens.tolist()}"

    def forced(self, most: int) -> Int32:
        return self._trie.forced(self._state, most)


def _require_sayable(
    texts: Sequence[str], ids: Sequence[Sequence[int]], tokenizer: TaskTokenizer, vocab_size: int
) -> None:
    ends = set(tokenizer.eos_ids)
    decoded = tokenizer.backend.decode_batch(list(ids), skip_special_tokens=True)
    if min(ends) >= vocab_size:
        raise GuideError(
            f"the end of sequence is token {min(ends)}, and the model knows {vocab_size}; "
            "set eos_token_id to the model's own"
        )
    for at, (text, tokens, back) in enumerate(zip(texts, ids, decoded, strict=True)):
        if not text or not tokens:
            raise GuideError(f"{_name(at, text)} has no tokens; leave it out")
        if max(tokens) >= vocab_size or not ends.isdisjoint(tokens):
            raise GuideError(
                f"{_name(at, text)} has a token that the model (of {vocab_size}) does not know, or "
                f"that ends an answer, among {list(tokens)[:8]}; write it in other words"
            )
        if back != text:
            raise GuideError(
                f"{_name(at, text)} would be answered as {back[:_SHOWN]!r}: the tokenizer does not "
                "give it back; write it as it comes back"
            )


def _begun(sequences: Sequence[Sequence[int]]) -> set[tuple[int, ...]]:
    """Those sequences that others begin with."""
    known = sorted({tuple(sequence) for sequence in sequences})
    return {one for one, other in pairwise(known) if other[: len(one)] == one}


def _name(at: int, text: str) -> str:
    return f"choice {at} ({text[:_SHOWN]!r})"
