"""A guest's tree in the n-grams' own: mixed as said, the likeliest paths, and trust that is learnt.

The reference mixes in plain Python: dictionaries of chances by path, no code of the kernels.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

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
from draft_reference import Chances, Path, TascReference, followers
from hypothesis import given, settings
from hypothesis import strategies as st

from tasc_draft import (
    SOURCES,
    DraftIndex,
    Drafts,
    DraftSettings,
    NgramProposer,
    Tokens,
    build_index,
)
from tasc_draft.mixture.guests import FIRST_TRUST, LEAST, MOST_TRUST, RATE, UNNAMED

Guests = dict[Path, float]  # the chance of each path's last token behind the others
Own = Callable[[Path], dict[int, float]]
SLACK = 1e-4  # float32 of products, powers and their sums

few = settings(deadline=None, max_examples=150)
tasc = st.builds(
    DraftSettings,
    mixture=st.just("tasc"),
    n_max=st.integers(2, 4),
    corpus_weight=st.sampled_from([0.0, 0.4, 1.0]),
    num_speculative_tokens=st.integers(1, 10),
    min_prob=st.just(0.0),
)


@st.composite
def guests(draw: st.DrawFn) -> Guests:
    paths: list[Path] = [()]
    found: Guests = {}
    for _ in range(draw(st.integers(0, 8))):
        path = (*draw(st.sampled_from(paths)), draw(st.integers(0, 8)))
        if path not in found:
            left = 1 - sum(said_by(found, path[:-1]).values())
            found[path] = left * draw(st.integers(1, 99)) / 100  # sure ones, too
            paths.append(path)
    return found


def drafts_of(rows: Sequence[Guests]) -> Drafts:
    tokens, parents, depths, logp, offsets = [], [], [], [], [0]
    for row in rows:
        places: dict[Path, int] = {(): -1}
        for path in sorted(row, key=len):
            places[path] = len(places) - 1
            tokens.append(path[-1])
            parents.append(places[path[:-1]])
            depths.append(len(path))
            logp.append(sum(math.log(row[path[: i + 1]]) for i in range(len(path))))
        offsets.append(len(tokens))
    return Drafts(
        ids(tokens), ids(parents), np.array(depths, np.int16), ids(offsets),
        np.array(logp, np.float32), np.full(len(tokens), SOURCES.index("neural"), np.int8),
    )  # fmt: skip


def said_by(guest: Guests, path: Path) -> dict[int, float]:
    return {p[-1]: chance for p, chance in guest.items() if p[:-1] == path}


def both(
    own: dict[int, float], others: dict[int, float], trust: tuple[float, float]
) -> tuple[dict[int, float], float]:
    """The chance of each token, and of none of them."""
    if not own:
        return others, 1 - sum(others.values())
    raw, none = dict.fromkeys(own | others, 1.0), 1.0
    for side, by in zip((own, others), trust, strict=True):
        left, unnamed = 1 - sum(side.values()), len(raw) - len(side)
        shared = UNNAMED * left if unnamed else 0.0
        for token in raw:
            named = side.get(token) or shared / unnamed
            raw[token] *= max(named, LEAST) ** by
        none *= max(left - shared, LEAST) ** by
    whole = sum(raw.values()) + none
    return {token: chance / whole for token, chance in raw.items()}, none / whole


def mixture(own: Own, guest: Guests) -> Callable[[Path], Chances]:
    def rule(path: Path) -> Chances:
        chances, others = own(path), said_by(guest, path)
        if others:
            chances, _ = both(chances, others, (FIRST_TRUST, FIRST_TRUST))
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
    outputs, prompts, st.lists(st.integers(0, 5), max_size=6), tasc, guests(), st.integers(1, 40)
)
def test_the_likeliest_paths_of_n_grams_and_guest_are_drafted(
    outputs: list[list[int]], prompt: list[int], answer: list[int], setting: DraftSettings,
    guest: Guests, most: int,
) -> None:  # fmt: skip
    reference = TascReference(setting, followers(outputs, SEP, EOS, setting.n_max - 1), SEP)

    def own(path: Path) -> dict[int, float]:
        chances = reference.chances(prompt, answer, path)
        return {token: sum(parts) for token, parts in chances.items()}

    proposer = make_proposer(make_index(outputs), setting, nodes=40)
    begun(proposer, 0, prompt, answer)
    drafts = proposer.propose(ids([0]), ids([most]), None, drafts_of([guest]))
    limits = beside_guest(setting, most) if guest else limits_of(setting, most)
    assert_likeliest(tree(drafts), mixture(own, guest), limits, setting.num_speculative_tokens)


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


def ngrams(mixture: str = "mixed") -> NgramProposer:
    setting = DraftSettings(
        mixture=mixture, min_prob=0.0, recent_tokens=0, num_speculative_tokens=12
    )
    return make_proposer(make_index([[1, 2, 3], [4, 5, 1]] * 9), setting)


def with_guest(proposer: NgramProposer, *rows: Guests) -> Drafts:
    return proposer.propose(ids(range(len(rows))), ids([12] * len(rows)), None, drafts_of(rows))


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


@pytest.mark.parametrize("mixture", ["mixed", "tasc"])
def test_a_guest_that_is_right_is_trusted_and_one_that_is_wrong_is_not(mixture: str) -> None:
    """The corpus says 1, prompts say nothing, and the guest says 7 and is as sure each time."""
    chance = {}
    for said in (7, 1):
        proposer = ngrams(mixture)
        for _ in range(40):
            begun(proposer, 0, [], [])
            chance[said] = math.exp(tree(with_guest(proposer, {(7,): 0.5}))[(7,)].logp)
            proposer.observe(0, ids([said]))
            proposer.finish(0)
    assert chance[7] > chance[1] + 0.1


def test_what_is_learnt_is_the_gradient_of_the_likelihood() -> None:
    proposer, guest = ngrams("tasc"), {(1,): 0.2, (7,): 0.7}
    begun(proposer, 0, [], [])
    with_guest(proposer, guest)
    proposer.observe(0, ids([7]))
    before = trust(proposer)
    proposer.propose(ids([0]), ids([0]))  # takes in what the target said
    moved = np.flatnonzero(trust(proposer) != before)
    own = {1: 0.5, 4: 0.5}

    def likelihood(a: float, b: float) -> float:
        return math.log(both(own, said_by(guest, ()), (a, b))[0][7])

    step = 1e-5
    by = [(likelihood(FIRST_TRUST + step * (side == 0), FIRST_TRUST + step * (side == 1))
           - likelihood(FIRST_TRUST, FIRST_TRUST)) / step for side in (0, 1)]  # fmt: skip
    wanted = [FIRST_TRUST + RATE * g / math.sqrt(1 + g * g) for g in by]
    assert trust(proposer)[moved].tolist() == pytest.approx(wanted, rel=1e-3)
    assert len(moved) == 2


def trust(proposer: NgramProposer) -> np.ndarray:
    return proposer._learnt.trust.copy()


def told(proposer: NgramProposer, guest: Guests, *said: int) -> None:
    """One answer, drafted for once."""
    begun(proposer, 0, [], [])
    with_guest(proposer, guest)
    proposer.observe(0, ids(said))
    proposer.finish(0)


@pytest.mark.parametrize(
    ("guest", "said", "bounds"),
    [({(7,): 0.6}, 7, (0.0, MOST_TRUST)), ({(7,): 0.5, (1,): 0.4}, 4, (None, 0.0))],
)
def test_trust_ends_at_its_bounds(
    guest: Guests, said: int, bounds: tuple[float | None, float]
) -> None:
    proposer = ngrams("tasc")
    for _ in range(4000):
        told(proposer, guest, said)
    for found, bound in zip(trust(proposer), bounds, strict=False):
        assert bound in (None, found)
    proposer.check_integrity()


def test_each_depth_and_sureness_has_an_exponent_of_its_own() -> None:
    proposer, guest = ngrams("tasc"), {(1,): 0.5, (1, 2): 0.3}
    told(proposer, guest, 9)  # SEP is followed by 1 or 4
    first = np.flatnonzero(trust(proposer) != FIRST_TRUST)
    before = trust(proposer)
    told(proposer, guest, 1, 9)  # 1 by 2, surely
    both_levels = np.flatnonzero(trust(proposer) != before)
    assert len(first) == 2
    assert set(first.tolist()) < set(both_levels.tolist())
    assert len(both_levels) == 4


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


def test_nothing_of_a_guest_is_learnt_at_rate_zero() -> None:
    setting = DraftSettings(min_prob=0.0, learning_rate=0.0)
    proposer = make_proposer(make_index([[1, 2, 3]] * 9), setting)
    told(proposer, {(7,): 0.5}, 7)
    assert (trust(proposer) == FIRST_TRUST).all()


def test_another_index_leaves_trust_as_it_is() -> None:
    proposer = ngrams()
    told(proposer, {(7,): 0.5}, 7)
    before = trust(proposer)
    proposer.set_index(make_index([[3, 2, 1]] * 4))
    assert (trust(proposer) == before).all()
    assert (before != FIRST_TRUST).any()


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
