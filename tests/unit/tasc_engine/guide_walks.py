"""Walks through guides for tests; the allowed tokens are sets and lists."""

import re
from collections.abc import Callable, Sequence

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray
from tree_layouts import parents_of

from tasc_draft.labels import LabelTrie
from tasc_engine.guided import Guide
from tasc_engine.guided.choices import ChoiceGuide, Choices
from tasc_protocol import GuideSpec

GuideMaker = Callable[[], Guide]
EOS, VOCAB, WORDS = 0, 70, 3  # the last word of a mask is not full

# Tokens of neighbouring words of a mask, and of its last word.
some_tokens = st.sampled_from([1, 2, 31, 32, VOCAB - 1])
label_sets = st.lists(st.lists(some_tokens, min_size=1, max_size=5), min_size=1, max_size=8)
trees = parents_of(9).flatmap(
    lambda parents: st.tuples(
        st.tuples(*(some_tokens | st.just(EOS) for _ in parents)), st.just(parents)
    )
)


def next_tokens(labels: Sequence[Sequence[int]], path: Sequence[int]) -> list[int]:
    """Returns the tokens after a path in labels, which end with `EOS`."""
    ended, n = [[*label, EOS] for label in labels], len(path)
    return sorted({label[n] for label in ended if label[:n] == [*path] and len(label) > n})


def guide_of(labels: Sequence[Sequence[int]]) -> ChoiceGuide:
    return ChoiceGuide(Choices(LabelTrie.of([[*label, EOS] for label in labels]), WORDS, 99, ""))


def regex(*texts: str) -> GuideSpec:
    """Returns a guide for one of some texts, as a regular expression."""
    return GuideSpec("regex", text="|".join(re.escape(text) for text in texts))


def ids(tokens: Sequence[int]) -> NDArray[np.int32]:
    return np.array(tokens, np.int32)


def tokens_of(mask: NDArray[np.uint32]) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def look(
    guide: Guide, tokens: Sequence[int], parents: Sequence[int]
) -> tuple[list[int], list[bool], list[list[int]]]:
    """Returns the allowed next tokens, the kept nodes, and the allowed tokens after each node."""
    kept = np.ones(len(tokens), bool)
    masks = np.full((1 + len(tokens), guide.words), 2**32 - 1, np.uint32)
    guide.look(ids(tokens), ids(parents), kept, masks)
    below = [tokens_of(m) if k else [] for m, k in zip(masks[1:], kept, strict=True)]
    return tokens_of(masks[0]), kept.tolist(), below


def allowed(guide: Guide) -> list[int]:
    return look(guide, [], [])[0]


def guide_after(make: GuideMaker, path: Sequence[int]) -> Guide:
    """Returns a new guide after it has accepted a path."""
    guide = make()
    guide.advance(ids(path))
    return guide


def path_to(tokens: Sequence[int], parents: Sequence[int], node: int) -> list[int]:
    """Returns the tokens from the current one to a node of a draft."""
    above = path_to(tokens, parents, parents[node]) if parents[node] >= 0 else []
    return [*above, tokens[node]]


def answers(make: GuideMaker, eos: int, most: int = 12) -> set[tuple[int, ...]]:
    """Returns every answer that a guide allows, with at most ``most`` tokens, without its end."""
    found: set[tuple[int, ...]] = set()
    pending: list[tuple[int, ...]] = [()]
    while pending:
        path = pending.pop()
        for token in allowed(guide_after(make, path)):
            if token == eos:
                found.add(path)
            elif len(path) < most:
                pending.append((*path, token))
    return found


def random_answer(guide: Guide, seed: int, most: int = 200) -> list[int]:
    """Returns a random walk over allowed tokens, up to the end of sequence."""
    rng = np.random.default_rng(seed)
    emitted: list[int] = []
    while len(emitted) < most and (tokens := allowed(guide)):
        emitted.append(int(rng.choice(tokens)))
        guide.advance(ids(emitted[-1:]))
    return emitted
