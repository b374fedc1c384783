"""Tests how an external tree is mixed with the n-grams' tree, and how trust is learnt."""

import dataclasses
import math
from collections.abc import Callable, Sequence

import draft_cases as dc
import numpy as np
import pytest
from draft_checks import Limits, Tree, assert_best, assert_valid, trees
from draft_reference import Chances, Path, TascReference, followers
from hypothesis import given
from hypothesis import strategies as st

from proposer_integrity import check_rows
from support import refused
from tasc_draft import SOURCES, DraftError, DraftIndex, Drafts, DraftSettings, NgramProposer
from tasc_draft.mixture.evidence import NODE
from tasc_draft.mixture.external_tree import (
    CELLS,
    CONFIDENCE,
    MAX_ADDED,
    MAX_EXPONENT,
    MIN_PROB,
    RATE,
    TRUST,
    UNNAMED,
    ExternalTree,
    initial_trust,
    mix,
)

Paths = dict[Path, float]  # the probability of each path's last token after the others


@st.composite
def paths(draw: st.DrawFn) -> Paths:
    paths: list[Path] = [()]
    found: Paths = {}
    for _ in range(draw(st.integers(0, 8))):
        path = (*draw(st.sampled_from(paths)), draw(st.integers(0, 8)))
        if path not in found:
            left = 1 - sum(children_of(found, path[:-1]).values())
            found[path] = left * draw(st.integers(1, 99)) / 100  # sure ones, too
            paths.append(path)
    return found


def drafts_of(rows: Sequence[Paths]) -> Drafts:
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
        dc.ids(tokens), dc.ids(parents), np.array(depths, np.int16), dc.ids(offsets),
        np.array(logp, np.float32), np.full(len(tokens), SOURCES.index("neural"), np.int8),
    )  # fmt: skip


def as_read(external: Paths) -> Paths:
    """A tree's chances as a proposer reads them, from sums of logarithms in float32.

    The probability that sure children leave to other tokens is a difference of nearly equal
    numbers, so it depends mostly on the last digit of their chances.
    """
    read = ExternalTree.of(drafts_of([external])).probs[1:].tolist()  # after the row's root
    found = dict(zip(sorted(external, key=len), read, strict=True))
    assert found == pytest.approx(external, rel=SLACK)
    return found


def children_of(external: Paths, path: Path) -> dict[int, float]:
    return {p[-1]: chance for p, chance in external.items() if p[:-1] == path}


def both(
    own: dict[int, float], others: dict[int, float], numbers: Sequence[float]
) -> tuple[dict[int, float], float]:
    """The chance of each token, and of none of them.

    Args:
        numbers: Two exponents, what is added for tokens each did not name, and for all others.
    """
    if not own:
        return others, 1 - sum(others.values())
    raw, none = dict.fromkeys(own | others, 1.0), math.exp(numbers[4])
    for side, by, added in zip((own, others), numbers, numbers[2:], strict=False):
        left, unnamed = 1 - sum(side.values()), len(raw) - len(side)
        shared = UNNAMED * left if unnamed else 0.0
        for token in raw:
            named = side.get(token)
            raw[token] *= max(named or shared / unnamed, MIN_PROB) ** by
            raw[token] *= 1.0 if named else math.exp(added)
        none *= max(left - shared, MIN_PROB) ** by
    whole = sum(raw.values()) + none
    return {token: chance / whole for token, chance in raw.items()}, none / whole


def cell(own: dict[int, float], depth: int) -> int:
    """Returns the index of a node's own numbers, which it has besides those of all nodes."""
    return 1 + 3 * (depth > 0) + sum(max(own.values()) > limit for limit in CONFIDENCE)


def numbers_at(trust: np.ndarray, own: dict[int, float], depth: int) -> list[float]:
    found = trust[0] + trust[cell(own, depth)]
    return [*np.maximum(found[:2], 0.0).tolist(), *found[2:].tolist()]


def ngrams(mixture: str = "mixed", **setting: float) -> NgramProposer:
    """Returns a proposer with an index in which 1 and 4 start outputs equally often."""
    settings = {"min_prob": 0.0, "recent_tokens": 0, "num_speculative_tokens": 12} | setting
    index = dc.make_index([[1, 2, 3], [4, 5, 1]] * 9)
    return dc.make_proposer(index, DraftSettings(mixture=mixture, **settings))


def with_external(proposer: NgramProposer, *rows: Paths, limit: int = 12) -> list[Tree]:
    asked = dc.ids(range(len(rows))), dc.ids([limit] * len(rows))
    return trees(proposer.propose(*asked, None, drafts_of(rows)))


def trust(proposer: NgramProposer) -> np.ndarray:
    return proposer.learnt.trust.copy()


def trusting(mixture: str, trust: np.ndarray) -> NgramProposer:
    proposer = ngrams(mixture)
    proposer.learnt.trust[:] = trust
    return proposer


def answer_once(proposer: NgramProposer, external: Paths, *emitted: int) -> Tree:
    """One answer, drafted for once; returns the draft."""
    dc.begun(proposer, 0, [], [])
    (nodes,) = with_external(proposer, external)
    proposer.observe(0, dc.ids(emitted))
    proposer.finish(0)
    return nodes


Own = Callable[[Path], dict[int, float]]
SLACK = 1e-4  # float32 of products, powers and their sums

few = dc.examples(50, 150)
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


def mixture(own: Own, external: Paths, trusted: np.ndarray) -> Callable[[Path], Chances]:
    def rule(path: Path) -> Chances:
        chances, others = own(path), children_of(external, path)
        if chances and others:
            chances, _ = both(chances, others, numbers_at(trusted, chances, len(path)))
        chances = chances or others
        return {token: (chance, 0.0) for token, chance in chances.items()}

    return rule


@few
@given(
    dc.outputs, dc.prompts, st.lists(st.integers(0, 5), max_size=6), tasc, paths(),
    st.integers(1, 40), learnt,
)  # fmt: skip
def test_likeliest_paths_of_n_grams_and_external_tree_are_drafted(
    outputs: list[list[int]], prompt: list[int], answer: list[int], setting: DraftSettings,
    external: Paths, most: int, trusted: np.ndarray,
) -> None:  # fmt: skip
    reference = TascReference(
        setting, followers(outputs, dc.SEP, dc.EOS, setting.n_max - 1), dc.SEP
    )

    def own(path: Path) -> dict[int, float]:
        chances = reference.chances(prompt, answer, path)
        return {token: sum(parts) for token, parts in chances.items()}

    proposer = dc.started(dc.make_index(outputs), setting, (prompt, answer), nodes=40)
    proposer.learnt.trust[:] = trusted
    (nodes,) = with_external(proposer, external, limit=most)
    limits = limits_beside(setting, most) if external else dc.limits_of(setting, most)
    rule = mixture(own, as_read(external), trusted)
    assert_best(nodes, rule, limits, SLACK, setting.num_speculative_tokens)


@few
@given(
    dc.indexes, dc.mixed, dc.rows, st.lists(paths() | st.just({}), min_size=3, max_size=3),
    st.integers(0, 30), st.booleans(),
)  # fmt: skip
def test_drafts_stay_within_limits_with_and_without_external_tree(
    index: DraftIndex, setting: DraftSettings, rows: list[dc.Row], external: list[Paths],
    budget: int, branching: bool,
) -> None:  # fmt: skip
    proposer = dc.started(index, setting, *rows, branching=branching)
    assert proposer.max_depth == setting.num_speculative_tokens
    limits = [
        (limits_beside if paths else dc.limits_of)(setting, limit, branching)
        for (*_, limit), paths in zip(rows, external, strict=False)
    ]
    for _ in range(2):  # from what the first draft led to something may be learnt
        drafts = proposer.propose(
            dc.ids(range(len(rows))), dc.ids([limit for *_, limit in rows]),
            np.zeros(budget, np.float32), drafts_of(external[: len(rows)]),
        )  # fmt: skip
        assert_valid(drafts, limits, budget)
        assert all(drafts.depths <= setting.num_speculative_tokens)
        for row in range(len(rows)):
            proposer.observe(row, dc.ids([1, 2]))
        check_rows(proposer)


def limits_beside(setting: DraftSettings, limit: int, branching: bool = True) -> Limits:
    """The limits of a row with an external draft: the caller's alone."""
    most = limit if setting.num_speculative_tokens else 0
    return Limits(most, dc.TARGET, dc.SEP, (dc.EOS,), 0.0, branching)


def test_n_grams_and_external_tree_continue_after_tokens_of_each_other() -> None:
    nodes = answer_once(ngrams(), {(4,): 0.3, (7,): 0.6, (7, 4): 0.9, (4, 9): 0.9})
    # N-grams after an external token, and the external tree after an n-gram token.
    assert [nodes[p].source for p in ((7, 4), (7, 4, 5), (4, 9))] == ["neural", "corpus", "neural"]


def test_empty_external_tree_drafts_like_no_external_tree() -> None:
    one, other = ngrams(), ngrams()
    for proposer in (one, other):
        dc.begun(proposer, 0, [1, 2], [1])
        dc.begun(proposer, 1, [4], [])
    assert trees(one.propose(dc.ids([0, 1]), dc.ids([12, 12]))) == with_external(other, {}, {})


def test_external_tree_alone_is_drafted_unchanged() -> None:
    proposer = ngrams("trie")  # there is no prompt
    before = trust(proposer)
    nodes = answer_once(proposer, {(7,): 0.9, (7, 8): 0.9, (6,): 0.05}, 7)
    chances = {path: math.exp(node.logp) for path, node in nodes.items()}
    assert chances == pytest.approx({(7,): 0.9, (7, 8): 0.81, (6,): 0.05})
    assert (trust(proposer) == before).all()


def test_full_node_has_space_for_external_candidates() -> None:
    many = [[token, token] for token in range(2, 2 + 60)]
    index = dc.make_index(many, vocab_size=99)
    setting = DraftSettings(min_prob=0.0, num_speculative_tokens=40)
    proposer = dc.make_proposer(index, setting, vocab_size=99)
    for token in range(2, 62):  # places in the row's own text are candidates, too
        dc.begun(proposer, 0, [99 - token], [token])
        proposer.finish(0)
    dc.begun(proposer, 0, list(range(2, 62)), [])
    external = {(98,): 0.8, **{(70 + i,): 0.01 for i in range(8)}}
    (nodes,) = with_external(proposer, external, limit=40)
    assert nodes[(98,)].source == "neural"
    assert nodes[(98,)].logp == max(node.logp for node in nodes.values())


def test_external_tree_is_bounded_only_by_the_caller() -> None:
    proposer = ngrams(min_prob=0.9, num_speculative_tokens=2)
    for row in (0, 1):
        dc.begun(proposer, row, [], [])
    external = {(7,): 0.3, (8,): 0.2, (6,): 0.2, (7, 7): 0.4, (7, 7, 7): 0.4}
    beside, alone = with_external(proposer, external, {}, limit=5)
    assert (len(beside), max(map(len, beside))) == (5, 2)  # as deep as it may get
    assert len(alone) <= 2


@pytest.mark.parametrize("logp", [[-1, np.nan], [-np.inf, -1], [-1]])
def test_paths_without_probability_are_refused(logp: list[float]) -> None:
    proposer = ngrams()
    dc.begun(proposer, 0, [], [])
    external = drafts_of([{(1,): 0.5, (1, 2): 0.5}])
    external = dataclasses.replace(external, logp=np.array(logp, np.float32))
    with refused(DraftError, "log-probabilities"):
        proposer.propose(dc.ids([0]), dc.ids([12]), None, external)


@pytest.mark.parametrize("mixture", ["mixed", "tasc"])
def test_correct_external_tree_gains_trust(mixture: str) -> None:
    """The corpus has 1, prompts have nothing, and the external tree has 7 with probability 0.5."""
    chance = {}
    for emitted in (7, 1):
        proposer = ngrams(mixture)
        for _ in range(40):
            nodes = answer_once(proposer, {(7,): 0.5}, emitted)
            chance[emitted] = math.exp(nodes[(7,)].logp)
    assert chance[7] > chance[1] + 0.1


@pytest.mark.parametrize("emitted", [1, 4, 7, 9])
def test_trust_follows_the_gradient_of_the_likelihood(emitted: int) -> None:
    """The emitted token was named by both sides, by one of them, or by neither."""
    external, own = {(1,): 0.2, (7,): 0.7}, {1: 0.5, 4: 0.5}
    before = np.zeros((CELLS, len(TRUST)), np.float32)
    before[0], before[cell(own, 0)] = (0.6, 0.4, -0.5, 0.3, 0.2), (0.1, 0.2, 0.3, -0.4, 0.5)
    proposer = trusting("tasc", before)
    answer_once(proposer, external, emitted)
    moved = trust(proposer)

    def likelihood(numbers: np.ndarray) -> float:
        chances, none = both(own, children_of(external, ()), numbers.tolist())
        return math.log(chances.get(emitted, none))

    at, step = (before[0] + before[cell(own, 0)]).astype(float), 1e-5
    by = np.array([likelihood(at + step * k) - likelihood(at) for k in np.eye(len(at))]) / step
    for each in (0, cell(own, 0)):
        wanted = before[each] + RATE * by / np.sqrt(1 + by * by)
        assert moved[each].tolist() == pytest.approx(wanted.tolist(), rel=1e-3, abs=1e-5)


@pytest.mark.parametrize(
    ("number", "bound"),
    [(0, -MAX_EXPONENT), (1, MAX_EXPONENT), (2, MAX_ADDED), (3, -MAX_ADDED), (4, -MAX_ADDED)],
)
def test_trust_is_bounded(number: int, bound: float) -> None:
    """The corpus has 1 or 4; only the external tree names the token that comes."""
    nearly = np.zeros((CELLS, len(TRUST)), np.float32)
    nearly[0, number] = bound * (1 - 1e-6)
    if number == 0:  # together they are just heard
        nearly[cell({1: 0.5, 4: 0.5}, 0), 0] = MAX_EXPONENT
    proposer = trusting("tasc", nearly)
    answer_once(proposer, {(7,): 0.6}, 7)
    assert trust(proposer)[0, number] == bound
    check_rows(proposer)
    with pytest.raises(AssertionError):
        check_rows(trusting("tasc", 1.001 * trust(proposer)))


def test_trust_is_learnt_separately_by_depth_and_confidence() -> None:
    proposer, external = ngrams("tasc"), {(1,): 0.5, (1, 2): 0.3}
    answer_once(proposer, external, 9)  # SEP is followed by 1 or 4
    first = moved_cells(trust(proposer), initial_trust())
    before = trust(proposer)
    answer_once(proposer, external, 1, 9)  # 1 by 2, surely
    assert first == {0, cell({1: 0.5, 4: 0.5}, 0)}
    assert moved_cells(trust(proposer), before) == first | {cell({2: 1.0}, 1)}


def moved_cells(trust: np.ndarray, before: np.ndarray) -> set[int]:
    return set(np.flatnonzero((trust != before).any(1)).tolist())


@pytest.mark.parametrize(("emitted", "moves"), [(1, False), (7, True)])
def test_trust_exponent_of_zero_can_only_rise(emitted: int, moves: bool) -> None:
    """The external tree names only 7."""
    before = np.zeros((CELLS, len(TRUST)), np.float32)
    own = cell({1: 0.5, 4: 0.5}, 0)
    before[0, :2], before[own, 1] = (0.5, -0.2), 0.1
    proposer = trusting("tasc", before)
    answer_once(proposer, {(7,): 0.9}, emitted)
    moved = trust(proposer) - before
    assert (moved[0, 1] > 0) == (moved[own, 1] > 0) == moves
    assert moves or not moved[:, 1].any()
    assert moved[0, 0] != 0.0  # the others' is learnt


def test_candidates_with_probability_zero_count_as_drafted_by_n_grams() -> None:
    nodes = np.zeros(1, NODE)
    node = nodes[0]
    node["width"] = node["full_width"] = 3
    node["candidates"][:3], node["chance"][:3] = (1, 2, 3), (0.8, 0.0, 0.0)
    node["external"], external = 0, ExternalTree.of(drafts_of([{(7,): 0.5, (2,): 0.25}]))
    mix(initial_trust(), node, external)
    negligible = 1e-9  # less than what counts
    wanted, none = both({1: 0.8, 2: negligible, 3: negligible}, {7: 0.5, 2: 0.25}, TRUST)
    found = dict(zip(node["candidates"][:4].tolist(), node["mixed"][:4].tolist(), strict=True))
    assert found == pytest.approx(wanted, rel=1e-4)
    assert node["none"] == pytest.approx(none, rel=1e-4)


def test_trust_is_unchanged_at_learning_rate_zero_and_by_a_new_index() -> None:
    for rate in ({"learning_rate": 0.0}, {}):
        proposer = ngrams(**rate)
        answer_once(proposer, {(7,): 0.5}, 7)
        before = trust(proposer)
        assert (before == initial_trust()).all() == bool(rate)
        proposer.set_index(dc.make_index([[3, 2, 1]] * 4))
        assert (trust(proposer) == before).all()
