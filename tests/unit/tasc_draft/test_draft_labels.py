"""Tests drafts of rows limited to labels: branches, allowed tokens and forced tokens."""

import dataclasses
from collections.abc import Sequence

import draft_cases as dc
import numpy as np
import pytest
from draft_checks import trees
from hypothesis import given
from hypothesis import strategies as st

from tasc_draft import DraftSettings, NgramProposer, replay
from tasc_draft.labels import NO_BRANCH, LabelTrie, RowLabels

Label = tuple[int, ...]

token = st.integers(1, 5)
label = st.lists(token, min_size=1, max_size=5).map(tuple)
label_sets = st.lists(label, min_size=1, max_size=7).map(lambda labels: sorted(set(labels)))
SETTINGS = DraftSettings(min_prob=0.0, neighbours=2, neighbour_tokens=64, recent_tokens=48)


def trie_of(labels: Sequence[Label]) -> LabelTrie:
    return LabelTrie.of([[*one, dc.EOS] for one in labels])


def following(labels: Sequence[Label], path: Sequence[int]) -> set[int]:
    """The tokens that may follow a path, by looking through all labels."""
    whole = [(*one, dc.EOS) for one in labels]
    return {w[len(path)] for w in whole if len(w) > len(path) and w[: len(path)] == tuple(path)}


def saves_a_forward(labels: Sequence[Label], path: Sequence[int]) -> bool:
    """Whether the target still has a choice at the end of a path or after it."""
    return any(
        len(following(labels, one[:n])) > 1
        for one in labels
        if one[: len(path)] == tuple(path)
        for n in range(len(path), len(one) + 1)
    )


@given(label_sets, st.lists(label, max_size=12), st.sampled_from([(), (1,) * 20]), st.booleans())
def test_rows_by_label_equal_a_plain_count(labels, outputs, stem, ended) -> None:
    """With an end, an output is a whole label. Otherwise, it begins with one; the longest counts.

    The stem makes labels longer than the n-grams of the index.
    """
    labels, outputs = ([(*stem, *one) for one in some] for some in (labels, outputs))
    wanted = [0] * len(labels)
    for output in outputs:
        held = [one for one in labels if output == one or (output[: len(one)] == one and not ended)]
        if held:
            wanted[labels.index(max(held, key=len))] += 1
    trie = trie_of(labels) if ended else LabelTrie.of(labels)
    ends = np.full(len(trie.token), -1, np.int32)
    for number, one in enumerate(labels):
        ends[trie.after(0, dc.ids((*one, dc.EOS) if ended else one))] = number
    index = dc.make_index(outputs, [[number % 3] for number in range(len(outputs))])
    assert index.rows_by_label(trie, ends).tolist() == wanted
    assert not dc.make_index(outputs).rows_by_label(trie, ends).any()


@given(label_sets)
def test_label_trie_knows_its_branches(labels) -> None:
    trie = trie_of(labels)
    for one in labels:
        whole = (*one, dc.EOS)
        branches = [n for n in range(len(whole)) if len(following(labels, whole[:n])) > 1]
        free = np.flatnonzero(~trie.forced_in(dc.ids(whole))).tolist()
        assert free == branches
        for n in range(len(whole) + 1):
            state = trie.after(0, dc.ids(whole[:n]))
            later = [b for b in branches if b >= n]
            ahead = int(trie.ahead[state])
            if ahead != NO_BRANCH:
                forced = trie.forced(state, 99).tolist()
                assert len(forced) == ahead
                assert len(following(labels, [*whole[:n], *forced])) > 1
            assert later or ahead == NO_BRANCH or saves_a_forward(labels, whole[:n])


@dc.examples(60, 400)
@given(dc.indexes, label_sets, st.data())
def test_drafts_follow_labels_and_end_at_branches(index, labels, data) -> None:
    settings = dataclasses.replace(
        SETTINGS, mixture=data.draw(st.sampled_from(["mixed", "tasc", "trie"]))
    )
    proposer = dc.make_proposer(index, settings)
    answer = data.draw(st.sampled_from(labels))
    emitted = answer[: data.draw(st.integers(0, len(answer)))]
    proposer.start(0, dc.ids([1, 2, 3]), trie_of(labels))
    proposer.observe(0, dc.ids(emitted))
    limit = data.draw(st.integers(0, 12))
    (tree,) = trees(proposer.propose(dc.ids([0]), dc.ids([limit])))
    assert len(tree) <= limit
    for path in tree:
        whole = (*emitted, *path)
        assert path[-1] in following(labels, whole[:-1])
        forced = len(following(labels, whole)) == 1
        assert not forced or any(p[: len(path)] == path and p != path for p in tree)  # goes on
        assert len(following(labels, whole)) > 0  # no end of sequence: nothing follows it
        assert saves_a_forward(labels, whole)
    proposer.finish(0)


def test_labels_decided_by_the_first_token_are_not_drafted() -> None:
    labels = [(1, 2, 3), (4, 2, 3), (5,)]
    index = dc.make_index([list(one) for one in labels * 3])
    free, limited = (dc.make_proposer(index, SETTINGS) for _ in range(2))
    free.start(0, dc.ids([7]))
    limited.start(0, dc.ids([7]), trie_of(labels))
    assert dc.propose(free)  # the control: without labels there are drafts
    assert dc.propose(limited) == {}


def test_probabilities_of_allowed_tokens_sum_to_one() -> None:
    """Most of the corpus begins with a token that no label has."""
    labels = [(1, 2, 4), (1, 3, 5), (6, 2, 2), (6, 3, 3)]
    index = dc.make_index([[7, 7, 7]] * 20 + [[1, 2, 4]] * 4)
    proposer = dc.make_proposer(index, SETTINGS)
    proposer.start(0, dc.ids([8]), trie_of(labels))
    (tree,) = trees(proposer.propose(dc.ids([0]), dc.ids([12])))
    chances = {path: np.exp(node.logp) for path, node in tree.items()}
    assert chances[(1,)] > 0.5
    assert sum(chances[path] for path in ((1,), (6,))) == pytest.approx(1, abs=1e-4)


@dc.examples(20, 100)
@given(st.lists(label_sets, min_size=2, max_size=3), st.randoms(use_true_random=False))
def test_rows_of_different_labels_are_independent(sets, rng) -> None:
    """Rows start, emit tokens and end in any order, and their tries are created and freed."""
    index = dc.full_index()
    frozen = dataclasses.replace(SETTINGS, learning_rate=0.0, recent_tokens=0)
    together = dc.make_proposer(index, frozen)
    emitted: dict[int, tuple[Sequence[Label], list[int]]] = {}
    for _ in range(12):
        row = rng.randrange(3)
        if row not in emitted:
            labels = rng.choice(sets)
            together.start(row, dc.ids([2, row]), trie_of(labels))
            emitted[row] = labels, []
        elif rng.random() < 0.3:
            together.finish(row)
            del emitted[row]
        else:
            labels, so_far = emitted[row]
            may = sorted(following(labels, so_far))
            if may:
                so_far.append(rng.choice(may))
                together.observe(row, dc.ids(so_far[-1:]))
        for other, (labels, so_far) in emitted.items():
            alone = dc.make_proposer(index, frozen)
            alone.start(0, dc.ids([2, other]), trie_of(labels))
            alone.observe(0, dc.ids(so_far))
            (expected,) = trees(alone.propose(dc.ids([0]), dc.ids([12])))
            (found,) = trees(together.propose(dc.ids([other]), dc.ids([12])))
            assert found.keys() == expected.keys()


CHANGING = [trie_of([(1, n % 5 + 1, *[2] * (n % 3)), (6, 2)]) for n in range(60)]


def test_label_state_is_kept_while_other_rows_change() -> None:
    proposer = dc.make_proposer(dc.full_index(), SETTINGS)
    rows = proposer.memory.rows
    proposer.start(0, dc.ids([7]), CHANGING[0])
    proposer.start(1, dc.ids([7]), CHANGING[1])
    for n, trie in enumerate(CHANGING[2:]):
        row, other = n % 2, 1 - n % 2
        before = rows[other].copy()
        proposer.finish(row)
        proposer.start(row, dc.ids([7]), trie)
        assert rows[other] == before


def test_memory_of_released_tries_is_reused() -> None:
    labels, sizes = RowLabels(), []
    for n, trie in enumerate(CHANGING):
        begin = labels.start(n % 3, trie)
        np.testing.assert_array_equal(labels.forest.token[begin:][: len(trie.token)], trie.token)
        sizes.append(len(labels.forest.token))
    assert sizes[20] == sizes[-1] <= 8 * max(len(trie.token) for trie in CHANGING)


def test_label_trie_computes_nothing_after_its_creation() -> None:
    trie = trie_of([(1, 2, 3), (1, 4, 5)])
    made = {*vars(trie)}
    proposer = dc.make_proposer(dc.full_index(), SETTINGS)
    proposer.start(0, dc.ids([7]), trie)
    proposer.propose(dc.ids([0]), dc.ids([12]))
    assert {*vars(trie)} == made


MANY = 100  # ids of an index with many labels
# Two branches follow each first token, so that first tokens are worth drafting.
WIDE = [(first, *rest) for first in range(20, 60) for rest in ((1, 3), (1, 4), (2, 3), (2, 4))]
WIDER = [(first, *rest) for first in range(20, 80) for rest in ((1, 3), (1, 4), (2, 3), (2, 4))]


def limited_to(outputs: Sequence[Label], labels: Sequence[Label] | None) -> NgramProposer:
    """A proposer of a corpus, whose row 0 is limited to labels."""
    index = dc.make_index([list(one) for one in outputs], vocab_size=MANY)
    settings = dataclasses.replace(SETTINGS, recent_tokens=0, num_speculative_tokens=64)
    proposer = dc.make_proposer(index, settings, vocab_size=MANY + 1)
    proposer.start(0, dc.ids([7]), None if labels is None else trie_of(labels))
    return proposer


def first_chances(proposer: NgramProposer) -> dict[int, float]:
    """The chance of each drafted first token."""
    tree = dc.propose(proposer)
    return {path[0]: np.exp(node.logp) for path, node in tree.items() if len(path) == 1}


def test_first_tokens_without_evidence_share_the_remaining_probability() -> None:
    """Labels that allow all tokens of the corpus do not change the probabilities of the tokens."""
    outputs = [WIDE[n] for n in (0, 0, 0, 0, 4, 4, 8)]
    free, limited = (limited_to(outputs, labels) for labels in (None, WIDE))
    known = {20, 21, 22}
    expected, found = first_chances(free), first_chances(limited)
    assert {*expected} == known
    assert {*found} == set(range(20, 60))
    assert {t: found[t] for t in known} == pytest.approx(expected, rel=1e-4)
    assert sum(found.values()) == pytest.approx(1, abs=1e-4)
    assert len({found[t] for t in {*found} - known}) == 1


@pytest.mark.parametrize("emitted", [20, 22, 59])
def test_labelled_rows_teach_like_other_rows(emitted) -> None:
    outputs = [WIDE[n] for n in (0, 0, 0, 0, 4, 4, 8)]
    taught = []
    for labels in (None, WIDE):
        proposer = limited_to(outputs, labels)
        before = proposer.weights.values
        dc.propose(proposer)
        proposer.observe(0, dc.ids([emitted]))
        proposer.finish(0)
        taught.append(proposer.weights.values)
        assert (taught[-1] != before).any()
    np.testing.assert_allclose(taught[1], taught[0], rtol=1e-5)


@pytest.mark.parametrize("labels", [WIDE, WIDER])
def test_frequent_forbidden_tokens_do_not_hide_evidence_for_labels(labels) -> None:
    """The most frequent tokens, more than a context keeps, are in no label."""
    own = [labels[0]] * 4 + [labels[4]]
    foreign = [(token, 2) for token in range(6, 18)] * 5
    alone, mixed = (first_chances(limited_to(corpus, labels)) for corpus in (own, foreign + own))
    assert mixed == pytest.approx(alone, rel=1e-4)
    assert mixed[20] > 0.5


def test_weights_are_learnt_after_forced_tokens() -> None:
    labels = [(1, 2, 3, *rest) for rest in ((4, 7), (4, 8), (5, 7), (5, 8))] + [(6, 2)]
    index = dc.make_index([[1, 2, 3, 4, 7], [6, 2]] * 5)
    proposer = dc.make_proposer(index, dataclasses.replace(SETTINGS, recent_tokens=0))
    trie = trie_of(labels)

    def learn(answer: list[int]) -> float:
        """The summed gradients of one answer, by a draft that has its first token."""
        before = float(proposer.moved.sum())
        proposer.start(0, dc.ids([7]), trie)
        assert 1 in proposer.propose(dc.ids([0]), dc.ids([12])).tokens
        proposer.observe(0, dc.ids(answer))
        proposer.finish(0)
        return float(proposer.moved.sum()) - before

    # Both begin alike; the whole answer surprises at the second branch, after forced tokens.
    assert learn([1, 2, 3, 5, 7]) > 0.1 + learn([1]) > 0.1


def test_replay_counts_forwards_of_guided_rows() -> None:
    labels = [(1, 2, 3, 4), (1, 2, 3, 5), (6, 2)]
    rows = [(dc.ids([7]), dc.ids([*one, dc.EOS])) for one in labels]
    proposer = dc.make_proposer(dc.make_index([[1, 2, 3, 4]] * 9), SETTINGS)
    found = replay(proposer, rows, 12, labels=trie_of(labels))
    # Two branches in each of the first two labels, one in the last.
    assert found.plain_steps == 5
    assert found.steps == 3  # each first branch's draft reaches the second branch
    assert found.tokens == 5 + 5 + 3
    assert (found.carried, found.forced) == (4, 4)  # two tokens between the branches, twice
    assert found.charged == found.nodes - 4
    free = replay(dc.make_proposer(dc.make_index([[1, 2, 3, 4]] * 9), SETTINGS), rows, 0)
    assert free.plain_steps == free.steps == free.tokens == 13


@pytest.mark.parametrize(
    ("forced", "nodes", "carried", "plain_steps"),
    [
        ([0, 0, 1, 1, 1], 1, 0, 2),  # nothing is decided after the second token
        ([0, 1, 1, 0, 1], 3, 2, 2),  # the draft reaches the second decision, and not beyond
        ([0, 1, 1, 1, 1], 0, 0, 1),
        ([0, 0, 0, 0, 0], 4, 0, 5),  # a guide that forces nothing; an end saves no forward
    ],
)
def test_replay_leaves_out_the_same_drafts_as_an_engine(
    forced, nodes, carried, plain_steps
) -> None:
    index = dc.make_index([[1, 2, 3, 4]] * 9)
    proposer = dc.make_proposer(index, SETTINGS, branching=False)
    rows = [(dc.ids([7]), dc.ids([1, 2, 3, 4, dc.EOS]))]
    found = replay(proposer, rows, 12, forced=[np.array(forced, bool)])
    positions = nodes - carried
    assert found.accepted == found.reached == [1] * positions
    assert (found.nodes, found.carried, found.plain_steps) == (nodes, carried, plain_steps)
    assert (found.steps, found.tokens) == (1, 5)
    proposer = dc.make_proposer(index, SETTINGS, branching=False)
    free = replay(proposer, rows, 12, forced=[None])
    assert (free.accepted[:4], free.plain_steps) == ([1] * 4, 5)
