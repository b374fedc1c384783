"""Following guides through a step: forbidden nodes go, everything else stays as it was."""

from dataclasses import fields

import numpy as np
from draft_trees import forest
from guide_walks import ids, path_to, tokens_of
from hypothesis import given, settings
from hypothesis import strategies as st

from tasc_draft import Drafts
from tasc_engine.guides import Guide, follow
from tasc_engine.guides.choices import ChoiceGuide, Choices
from tasc_engine.guides.trie import Trie

EOS, WORDS = 0, 2
sets = st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=4), min_size=1, max_size=5)
trees = st.integers(0, 7).flatmap(
    lambda n: st.tuples(
        st.tuples(*(st.integers(-1, i - 1) for i in range(n))),
        st.tuples(*(st.integers(0, 4) for _ in range(n))),
    )
)
rows = st.tuples(st.none() | sets, trees)


def guide_of(sequences: list[list[int]] | None) -> Guide | None:
    if sequences is None:
        return None
    return ChoiceGuide(Choices(Trie.of([[*s, EOS] for s in sequences]), WORDS, 9, ""))


def numbered(step: list) -> Drafts:
    """Drafts whose log-probabilities and sources tell nodes apart."""
    drafts = forest([tree[0] for _, tree in step], [tree[1] for _, tree in step])
    drafts.logp[:] = -np.arange(len(drafts.tokens))
    drafts.source[:] = np.arange(len(drafts.tokens)) % 5
    return drafts


def begins(sequences: list[list[int]], path: list[int]) -> bool:
    return any([*s, EOS][: len(path)] == path for s in sequences)


@settings(deadline=None)  # the first example compiles
@given(st.lists(rows, max_size=5))
def test_nodes_that_no_choice_has_go_and_the_rest_keeps_its_place(step) -> None:
    drafts = numbered(step)
    left = follow([guide_of(s) for s, _ in step], drafts).drafts
    assert left.offsets[0] == 0
    for i, (sequences, (parents, tokens)) in enumerate(step):
        paths = [path_to(tokens, parents, x) for x in range(len(tokens))]
        stay = [x for x, p in enumerate(paths) if sequences is None or begins(sequences, p)]
        mine = slice(left.offsets[i], left.offsets[i + 1])
        was = drafts.offsets[i] + ids(stay)
        new_place = {-1: -1, **{x: place for place, x in enumerate(stay)}}
        assert left.tokens[mine].tolist() == [tokens[x] for x in stay]
        assert left.parents[mine].tolist() == [new_place[parents[x]] for x in stay]
        for name in ("depths", "logp", "source"):
            assert getattr(left, name)[mine].tolist() == getattr(drafts, name)[was].tolist()


@settings(deadline=None)
@given(st.lists(rows, min_size=1, max_size=5))
def test_each_place_of_a_guided_row_has_its_mask(step) -> None:
    drafts = numbered(step)
    guided = follow([guide_of(s) for s, _ in step], drafts)
    left, found = guided.drafts, guided.allowed
    assert len(found.mask_of) == len(left.tokens) + len(step)
    for i, (sequences, _) in enumerate(step):
        begin, end = left.offsets[i], left.offsets[i + 1]
        places = found.mask_of[begin + i : end + i + 1]
        if sequences is None:
            assert (places == -1).all()
            continue
        parents, tokens = left.parents[begin:end], left.tokens[begin:end]
        for place, mask in enumerate(places):
            path = path_to(tokens.tolist(), parents.tolist(), place - 1) if place else []
            expected = [t for t in range(32 * WORDS) if begins(sequences, [*path, t])]
            assert tokens_of(found.masks[mask]) == expected


def test_a_step_without_guides_stays_as_it_is() -> None:
    drafts = numbered([(None, ((-1, 0), (1, 2))), (None, ((), ()))])
    guided = follow([None, None], drafts)
    for field in fields(Drafts):
        assert getattr(guided.drafts, field.name) is getattr(drafts, field.name)
    assert guided.allowed.mask_of.tolist() == [-1] * 4
    assert not guided.allowed.masks.size


def test_a_guide_that_cannot_go_on_allows_nothing() -> None:
    guide = guide_of([[1]])
    assert guide is not None
    guide.advance(ids([2]))
    guided = follow([guide], numbered([(None, ((-1,), (1,)))]))
    assert guide.error
    assert not len(guided.drafts.tokens)
    assert not guided.allowed.masks[guided.allowed.mask_of].any()
