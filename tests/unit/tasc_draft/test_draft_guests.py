"""A guest's tree in the n-grams' own: mixed as said, and the likeliest paths within the limits."""

import dataclasses
import math
from collections.abc import Callable

import numpy as np
import pytest
from draft_cases import (
    EOS,
    SEP,
    TARGET,
    answers,
    begun,
    full_index,
    ids,
    limits_of,
    make_index,
    make_proposer,
    mixed,
    outputs,
    prompts,
)
from draft_checks import Limits, Tree, assert_valid, left_out, tree
from draft_examples import examples
from draft_reference import Chances, Path, TascReference, followers
from guest_cases import (
    Guests,
    both,
    drafts_of,
    guests,
    ngrams,
    numbers_at,
    said_by,
    set_trust,
    trust,
    with_guest,
)
from hypothesis import given
from hypothesis import strategies as st

from tasc_draft import (
    DraftIndex,
    DraftSettings,
    Tokens,
    build_index,
)
from tasc_draft.mixture.guests import CELLS, TRUST

Own = Callable[[Path], dict[int, float]]
SLACK = 1e-4  # float32 of products, powers and their sums

few = examples(50, 150)
tasc = st.builds(
    DraftSettings,
    mixture=st.just("tasc"),
    n_max=st.integers(2, 4),
    corpus_weight=st.sampled_from([0.0, 0.4, 1.0]),
    num_speculative_tokens=st.integers(1, 10),
    min_prob=st.just(0.0),
)
numbers = st.tuples(
    st.floats(-0.5, 1.5), st.floats(-0.5, 1.5), *(st.floats(-3.0, 3.0),) * (len(TRUST) - 2)
)
learnt = st.lists(numbers, min_size=CELLS, max_size=CELLS).map(lambda x: np.array(x, np.float32))


def mixture(own: Own, guest: Guests, trusted: np.ndarray) -> Callable[[Path], Chances]:
    def rule(path: Path) -> Chances:
        chances, others = own(path), said_by(guest, path)
        if chances and others:
            chances, _ = both(chances, others, numbers_at(trusted, chances, len(path)))
        chances = chances or others
        return {token: (chance, 0.0) for token, chance in chances.items()}

    return rule


def assert_likeliest(
    nodes: Tree, rule: Callable[[Path], Chances], limits: Limits, depth: int
) -> None:
    drafted: dict[Path, float] = {(): 1.0}
    for path, node in nodes.items():
        drafted[path] = drafted[path[:-1]] * rule(path[:-1])[path[-1]][0]
        assert math.exp(node.logp) == pytest.approx(drafted[path], rel=SLACK)
    least = min(drafted.values())
    for path, chance in left_out(nodes, drafted, rule, limits).items():
        full = len(nodes) == limits.most
        if len(path) <= depth:
            assert chance <= (least if full else limits.min_prob) * (1 + SLACK), path


@few
@given(
    outputs, prompts, st.lists(st.integers(0, 5), max_size=6), tasc, guests(), st.integers(1, 40),
    learnt,
)  # fmt: skip
def test_the_likeliest_paths_of_n_grams_and_guest_are_drafted(
    outputs: list[list[int]], prompt: list[int], answer: list[int], setting: DraftSettings,
    guest: Guests, most: int, trusted: np.ndarray,
) -> None:  # fmt: skip
    reference = TascReference(setting, followers(outputs, SEP, EOS, setting.n_max - 1), SEP)

    def own(path: Path) -> dict[int, float]:
        chances = reference.chances(prompt, answer, path)
        return {token: sum(parts) for token, parts in chances.items()}

    proposer = make_proposer(make_index(outputs), setting, nodes=40)
    set_trust(proposer, trusted)
    begun(proposer, 0, prompt, answer)
    drafts = proposer.propose(ids([0]), ids([most]), None, drafts_of([guest]))
    limits = beside_guest(setting, most) if guest else limits_of(setting, most)
    assert_likeliest(
        tree(drafts), mixture(own, guest, trusted), limits, setting.num_speculative_tokens
    )


@few
@given(
    st.integers(1, 2).map(full_index), mixed,
    st.lists(st.tuples(prompts, answers, st.integers(-1, 12), guests()), min_size=1, max_size=3),
    st.integers(0, 30), st.booleans(),
)  # fmt: skip
def test_a_draft_with_a_guest_is_a_tree_within_its_limits(
    index: DraftIndex, setting: DraftSettings,
    rows: list[tuple[list[int], list[int], int, Guests]], budget: int, branching: bool,
) -> None:  # fmt: skip
    proposer = make_proposer(index, setting, branching=branching)
    for row, (prompt, answer, _, _) in enumerate(rows):
        begun(proposer, row, prompt, answer)
    for _ in range(2):  # from what the first draft led to something may be learnt
        drafts = proposer.propose(
            ids(range(len(rows))), ids([limit for _, _, limit, _ in rows]),
            np.zeros(budget, np.float32), drafts_of([guest for *_, guest in rows]),
        )  # fmt: skip
        limits = [
            beside_guest(setting, limit, branching) if guest
            else limits_of(setting, limit, branching)
            for _, _, limit, guest in rows
        ]  # fmt: skip
        assert_valid(drafts, limits, budget)
        assert all(drafts.depths <= setting.num_speculative_tokens)
        for row in range(len(rows)):
            proposer.observe(row, ids([1, 2]))
        proposer.check_integrity()


def beside_guest(setting: DraftSettings, limit: int, branching: bool = True) -> Limits:
    """Of a row with a guest's draft: as many as the caller allows, however unlikely."""
    most = limit if setting.num_speculative_tokens else 0
    return Limits(most, TARGET, SEP, (EOS,), 0.0, branching)


def test_each_goes_on_behind_tokens_of_the_other() -> None:
    proposer = ngrams()
    begun(proposer, 0, [], [])
    nodes = tree(with_guest(proposer, {(4,): 0.3, (7,): 0.6, (7, 4): 0.9, (4, 9): 0.9}))
    assert nodes[(7, 4)].source == "neural"
    assert nodes[(7, 4, 5)].source == "corpus"  # n-grams behind what the guest alone knew
    assert nodes[(4, 9)].source == "neural"  # the guest behind what n-grams found


def test_no_guest_and_one_that_says_nothing_are_the_same() -> None:
    one, other = ngrams(), ngrams()
    for proposer in (one, other):
        begun(proposer, 0, [1, 2], [1])
        begun(proposer, 1, [4], [])
    alone = one.propose(ids([0, 1]), ids([12, 12]))
    beside = with_guest(other, {}, {})
    assert [tree(alone, i) for i in (0, 1)] == [tree(beside, i) for i in (0, 1)]


def test_where_n_grams_say_nothing_the_guest_is_heard_as_it_is() -> None:
    proposer = ngrams("trie")  # there is no prompt
    begun(proposer, 0, [], [])
    before = trust(proposer)
    nodes = tree(with_guest(proposer, {(7,): 0.9, (7, 8): 0.9, (6,): 0.05}))
    chances = {path: math.exp(node.logp) for path, node in nodes.items()}
    assert chances == pytest.approx({(7,): 0.9, (7, 8): 0.81, (6,): 0.05})
    proposer.observe(0, ids([7]))
    proposer.finish(0)
    assert (trust(proposer) == before).all()


def test_a_node_full_of_n_grams_has_room_for_the_guest() -> None:
    many = [[token, token] for token in range(2, 2 + 60)]
    index = build_index(Tokens.of(many), None, fingerprint="f" * 32, vocab_size=99, eos_id=EOS)
    setting = DraftSettings(min_prob=0.0, num_speculative_tokens=40)
    proposer = make_proposer(index, setting, vocab_size=99)
    for token in range(2, 62):  # places in the row's own text are candidates, too
        begun(proposer, 0, [99 - token], [token])
        proposer.finish(0)
    begun(proposer, 0, list(range(2, 62)), [])
    guest = {(98,): 0.8, **{(70 + i,): 0.01 for i in range(8)}}
    nodes = tree(proposer.propose(ids([0]), ids([40]), None, drafts_of([guest])))
    assert nodes[(98,)].source == "neural"
    assert nodes[(98,)].logp == max(node.logp for node in nodes.values())


def test_a_row_with_a_guest_is_bounded_by_its_caller_alone() -> None:
    setting = DraftSettings(min_prob=0.9, num_speculative_tokens=2)
    proposer = make_proposer(make_index([[1, 2, 3], [4, 5, 1]] * 9), setting)
    for row in (0, 1):
        begun(proposer, row, [], [])
    guest = {(7,): 0.3, (8,): 0.2, (6,): 0.2, (7, 7): 0.4, (7, 7, 7): 0.4}
    drafts = proposer.propose(ids([0, 1]), ids([5, 5]), None, drafts_of([guest, {}]))
    assert len(tree(drafts, 0)) == 5
    assert max(len(path) for path in tree(drafts, 0)) == 2  # as deep as it may get
    assert len(tree(drafts, 1)) <= 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"parents": ids([-1, 1])}, "no trees"),
        ({"parents": ids([-2, 0])}, "no trees"),
        ({"parents": ids([-1])}, "no trees"),
        ({"offsets": ids([0, 3])}, "no trees"),
        ({"logp": np.array([-1, np.nan], np.float32)}, "no number"),
    ],
)
def test_a_guest_that_is_no_tree_is_refused(change: dict[str, np.ndarray], message: str) -> None:
    proposer = ngrams()
    begun(proposer, 0, [], [])
    guest = dataclasses.replace(drafts_of([{(1,): 0.5, (1, 2): 0.5}]), **change)
    with pytest.raises(ValueError, match=message):
        proposer.propose(ids([0]), ids([12]), None, guest)


@pytest.mark.parametrize("token", [-2, TARGET + 1])
def test_a_guest_with_an_id_of_nobody_is_refused(token: int) -> None:
    proposer = ngrams()
    begun(proposer, 0, [], [])
    with pytest.raises(ValueError, match="the vocabulary has"):
        with_guest(proposer, {(token,): 0.5})


def test_a_guest_of_other_rows_is_refused() -> None:
    proposer = ngrams()
    begun(proposer, 0, [], [])
    with pytest.raises(ValueError, match="2 rows"):
        proposer.propose(ids([0]), ids([12]), None, drafts_of([{}, {}]))
