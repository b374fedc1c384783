"""Drafts of the mixtures are valid trees, and the best by published rules in plain Python."""

import dataclasses
import math
from collections import Counter
from itertools import chain, combinations
from random import Random

import numpy as np
import pytest
from draft_cases import (
    EOS,
    SEP,
    VOCAB,
    answers,
    begun,
    full_index,
    ids,
    limits_of,
    make_index,
    make_proposer,
    min_prob,
    mixed,
    outputs,
    prompts,
    propose,
    tagged_rows,
)
from draft_checks import SLACK, Tree, assert_best, assert_same_up_to_ties, assert_valid, tree
from draft_examples import examples
from draft_reference import TascReference, TrieReference, followers
from hypothesis import given
from hypothesis import strategies as st

from tasc_draft import NGRAM_SOURCES, DraftIndex, Drafts, DraftSettings, NgramProposer
from tasc_draft.index.weights import Weights
from tasc_draft.mixture.evidence import PLACES
from tasc_draft.mixture.memory import OPTIMISTIC_CHILD_PROB

Row = tuple[list[int], list[int], int]  # prompt, answer so far, limit

tasc = st.builds(
    DraftSettings,
    mixture=st.just("tasc"),
    n_max=st.integers(2, 9),
    p_min=st.integers(1, 3),
    # Chances are float32: a path of many tiny shares would round to none.
    corpus_weight=st.sampled_from([0.0, 1.0, 0.75, 0.5]) | st.floats(0.1, 0.9),
    num_speculative_tokens=st.integers(0, 10),
    min_prob=min_prob,
)
trie = st.builds(
    DraftSettings,
    mixture=st.just("trie"),
    n_max=st.integers(2, 9),
    prefix=st.integers(1, 5),
    num_speculative_tokens=st.integers(0, 10),
    min_prob=min_prob,
)
rows = st.lists(st.tuples(prompts, answers, st.integers(-1, 12)), min_size=1, max_size=3)


def drafted(
    index: DraftIndex, setting: DraftSettings, rows: list[Row], branching: bool
) -> list[Tree]:
    """Each row's draft, all rows proposed in one call."""
    proposer = make_proposer(index, setting, branching=branching)
    for row, (prompt, answer, _) in enumerate(rows):
        begun(proposer, row, prompt, answer)
    drafts = proposer.propose(ids(range(len(rows))), ids([limit for _, _, limit in rows]))
    assert_valid(drafts, [limits_of(setting, limit, branching) for _, _, limit in rows])
    return [tree(drafts, place) for place in range(len(rows))]


def assert_all_best(
    reference: TascReference | TrieReference, trees: list[Tree], rows: list[Row], branching: bool
) -> None:
    for nodes, (prompt, answer, limit) in zip(trees, rows, strict=True):
        limits = limits_of(reference.settings, max(limit, 0), branching)
        assert_best(nodes, lambda path, p=prompt, a=answer: reference.chances(p, a, path), limits)


def tasc_reference(setting: DraftSettings, documents: list[list[int]]) -> TascReference:
    return TascReference(setting, followers(documents, SEP, EOS, setting.n_max - 1), SEP)


@examples(100, 300)
@given(outputs, rows, tasc, st.booleans())
def test_tasc_drafts_the_likeliest_paths(
    outputs: list[list[int]], rows: list[Row], setting: DraftSettings, branching: bool
) -> None:
    trees = drafted(make_index(outputs), setting, rows, branching)
    assert_all_best(tasc_reference(setting, outputs), trees, rows, branching)


@examples(100, 300)
@given(rows, trie, st.booleans())
def test_the_trie_drafts_the_most_frequent_paths(
    rows: list[Row], setting: DraftSettings, branching: bool
) -> None:
    trees = drafted(make_index([]), setting, rows, branching)
    assert_all_best(TrieReference(setting, SEP), trees, rows, branching)


@pytest.mark.parametrize("branching", [True, False])
def test_random_rows_reach_every_kind_of_draft(branching: bool) -> None:
    rng, seen = Random(5), Counter[str]()
    for mixture in ("tasc", "trie") * 150:
        setting = DraftSettings(
            mixture=mixture, corpus_weight=0.5, min_prob=rng.choice([0.02, 0.3]),
            num_speculative_tokens=4,
        )  # fmt: skip
        tokens = range(1, rng.choice([5, 12]))
        documents = [rng.choices(tokens, k=rng.randrange(9)) for _ in range(rng.randrange(30))]
        row = (rng.choices(tokens, k=20), rng.choices(tokens, k=rng.randrange(1, 6)), 4)
        trees = drafted(make_index(documents), setting, [row], branching)
        is_tasc = mixture == "tasc"
        reference = tasc_reference(setting, documents) if is_tasc else TrieReference(setting, SEP)
        assert_all_best(reference, trees, [row], branching)
        seen.update(f"{mixture} {node.source}" for node in trees[0].values())
        seen[f"{mixture} full" if len(trees[0]) == 4 else f"{mixture} cut"] += 1
        seen[f"{mixture} ends"] += any(path[-1] == EOS for path in trees[0])
        seen[f"{mixture} branches"] += len({path[:-1] for path in trees[0]}) < len(trees[0])
    kinds = ["tasc corpus", "tasc prompt", "trie prompt", "tasc ends"]
    kinds += ["tasc full", "tasc cut", "trie full", "trie cut"]
    kinds += ["tasc branches", "trie branches"] * branching
    assert min(seen[kind] for kind in kinds) > 10, seen


def test_answers_may_follow_an_output_for_longer_than_contexts_are_kept() -> None:
    rng = Random(6)
    for _ in range(100):
        documents = [rng.choices(range(1, 4), k=30) for _ in range(3)]
        setting = DraftSettings(mixture="tasc", n_max=rng.randrange(2, 10), min_prob=0.01)
        rows = [([], documents[0][: rng.randrange(10, 30)], 8) for _ in range(3)]
        trees = drafted(make_index(documents), setting, rows, branching=True)
        assert_all_best(tasc_reference(setting, documents), trees, rows, branching=True)


def chances(nodes: Tree) -> dict[tuple[int, ...], float]:
    return {path: round(math.exp(node.logp), 5) for path, node in nodes.items()}


def test_tasc_by_hand() -> None:
    """SEP 1 is certain; then the corpus says 2, 2, 3 and the prompt 4."""
    proposer = make_proposer(make_index([[1, 2], [1, 2], [1, 3]]), DraftSettings.published("tasc"))
    begun(proposer, 0, [5, 1, 4], [])
    assert chances(propose(proposer, 0)) == {(0,): 0.25}  # nothing occurs five times
    setting = DraftSettings(mixture="tasc", min_prob=0.0)
    proposer = make_proposer(make_index([[1, 2], [1, 2], [1, 3]]), setting)
    begun(proposer, 0, [5, 1, 4], [])
    expected = {(1,): 1, (1, 2): 0.5, (1, 2, 0): 0.5, (1, 3): 0.25, (1, 3, 0): 0.25, (1, 4): 0.25}
    assert chances(propose(proposer, 0)) == expected


def test_the_prompts_tokens_have_their_corpus_share_however_rare() -> None:
    """Ten tokens follow 1 in the corpus, eight enter by themselves; the prompt says the last."""
    setting = DraftSettings(mixture="tasc", min_prob=0.0, num_speculative_tokens=64)
    proposer = make_proposer(make_index([[1, 2 + n] for n in range(10)]), setting)
    begun(proposer, 0, [1, 11, 4], [1])
    nodes = chances(propose(proposer, 0))
    assert {path: nodes[path] for path in nodes if len(path) == 1} == {
        (11,): 0.75 / 10 + 0.25,
        **{(token,): 0.75 / 10 for token in range(2, 10)},
    }


@pytest.mark.parametrize("mixture", ["mixed", "tasc", "trie"])
def test_what_the_target_cannot_emit_is_not_drafted(mixture: str) -> None:
    setting = DraftSettings(mixture=mixture, min_prob=0.0, learning_rate=0.0)
    index = make_index([[1, 6], [1, 2]])
    for vocab_size, said in ((12, {6}), (6, set())):
        proposer = make_proposer(index, setting, vocab_size=vocab_size)
        begun(proposer, 0, [1, 6, 1, 2, 3], [1])
        drafted = {path[0] for path in propose(proposer, 0)}
        assert drafted & {2, 6} == {2} | said


def test_the_trie_by_hand() -> None:
    """1 2 is the longest end of the answer that the prompt has; paths end six tokens from there."""
    setting = DraftSettings(mixture="trie", min_prob=0.0, num_speculative_tokens=32)
    proposer = make_proposer(make_index([[1, 2, 5]]), setting)
    begun(proposer, 0, [1, 2, 3, 1, 2, 4, 2, 3, 5], [5, 1, 2])
    three, four = (3, 1, 2, 4), (4, 2, 3, 5)
    expected = {path[:n]: 0.5 for path in (three, four) for n in range(1, 5)}
    assert chances(propose(proposer, 0)) == expected


def test_a_subtree_of_the_trie_ends_where_the_prompt_ends() -> None:
    """2 3 was said at the prompt's end; what followed 3 behind another prefix is another path."""
    setting = DraftSettings(mixture="trie", min_prob=0.0)
    proposer = make_proposer(make_index([]), setting)
    begun(proposer, 0, [1, 3, 4, 2, 3], [1, 2])
    assert chances(propose(proposer, 0)) == {(3,): 1}


def test_only_the_latest_places_in_the_prompt_are_counted() -> None:
    setting = DraftSettings(
        mixture="tasc", n_max=2, corpus_weight=0.0, num_speculative_tokens=1, min_prob=0.0
    )
    proposer = make_proposer(make_index([]), setting, capacity=800)
    for row, newer in enumerate((PLACES - 1, PLACES)):
        begun(proposer, row, [1, 2] * 300 + [1, 3] * newer, [1])
    assert chances(propose(proposer, 0)) == {(3,): round(1 - 1 / PLACES, 5)}
    assert chances(propose(proposer, 1)) == {(3,): 1}


def test_a_path_too_unlikely_for_a_float_is_not_drafted() -> None:
    text = Random(1).choices(range(1, 12), k=300)
    setting = DraftSettings(mixture="tasc", n_max=2, num_speculative_tokens=256, min_prob=0.0)
    proposer = make_proposer(make_index([text]), setting, rows=1, branching=False)
    proposer.start(0, ids([]))
    nodes = propose(proposer, 0, 256)
    assert 40 < len(nodes) < 256
    assert all(np.isfinite(node.logp) for node in nodes.values())


few = examples(50, 150)
some_outputs = outputs | st.just([[1, 2, 3, 4]] * 3)
indexes = st.builds(
    lambda outputs, with_prompts: make_index(outputs, outputs[::-1] if with_prompts else None),
    some_outputs,
    st.booleans(),
) | st.integers(1, 2).map(full_index)


def started(
    index: DraftIndex, setting: DraftSettings, rows: list[Row], branching: bool = True
) -> NgramProposer:
    proposer = make_proposer(index, setting, branching=branching)
    for row, (prompt, answer, _) in enumerate(rows):
        begun(proposer, row, prompt, answer)
    return proposer


def propose_all(
    proposer: NgramProposer, rows: list[Row], least: np.ndarray | None = None
) -> Drafts:
    return proposer.propose(ids(range(len(rows))), ids([limit for _, _, limit in rows]), least)


def likeliest(drafts: Drafts) -> list[float]:
    return sorted(drafts.logp.tolist(), reverse=True)


@few
@given(indexes, mixed, rows, st.booleans(), st.integers(0, 30))
def test_a_draft_is_a_tree_or_a_chain_within_its_limits(
    index: DraftIndex, setting: DraftSettings, rows: list[Row], branching: bool, budget: int
) -> None:
    proposer = started(index, setting, rows, branching)
    drafts = propose_all(proposer, rows, np.zeros(budget, np.float32))
    assert_valid(drafts, [limits_of(setting, limit, branching) for _, _, limit in rows], budget)


@few
@given(indexes, mixed, rows)
def test_the_chances_of_a_node_sum_to_one(
    index: DraftIndex, setting: DraftSettings, rows: list[Row]
) -> None:
    proposer = started(index, setting, rows)
    drafts = propose_all(proposer, rows)
    nodes = proposer.memory.nodes[: drafts.offsets[-1] + sum(limit > 0 for *_, limit in rows)]
    for node in nodes:
        width = node["width"]
        if width:
            whole = np.abs(node["chance"][:width]).sum() + node["other_chance"]
            assert math.isclose(whole, 1, rel_tol=1e-5)
            assert len(set(node["candidates"][:width].tolist())) == width


@few
@given(indexes, mixed, rows, st.booleans())
def test_rows_drafted_together_are_drafted_as_alone(
    index: DraftIndex, setting: DraftSettings, rows: list[Row], branching: bool
) -> None:
    together = propose_all(started(index, setting, rows, branching), rows)
    for place, row in enumerate(rows):
        alone = propose_all(started(index, setting, [row], branching), [row])
        assert_same_up_to_ties(tree(together, place), tree(alone))


@few
@given(indexes, mixed, rows, st.integers(0, 12))
def test_a_shared_budget_goes_to_likely_paths_of_all_rows(
    index: DraftIndex, setting: DraftSettings, rows: list[Row], budget: int
) -> None:
    """No path that is left out is likelier than one drafted by more than what was hoped for."""
    proposer = started(index, setting, rows)
    unlimited = propose_all(proposer, rows)
    best, paths = likeliest(unlimited), [tree(unlimited, place) for place in range(len(rows))]
    drafts = propose_all(proposer, rows, np.zeros(budget, np.float32))
    chosen = [tree(drafts, place) for place in range(len(rows))]
    assert len(drafts.tokens) == min(budget, len(best))
    left_out = []
    for some, every in zip(chosen, paths, strict=True):
        assert some.items() <= every.items()
        left_out += [node.logp for path, node in every.items() if path not in some]
    if left_out and budget:
        assert min(drafts.logp) >= max(left_out) + math.log(OPTIMISTIC_CHILD_PROB) - SLACK


@few
@given(indexes, mixed, rows, st.floats(0, 1, width=32), st.integers(0, 12))
def test_a_token_that_is_not_worth_its_cost_is_not_drafted(
    index: DraftIndex, setting: DraftSettings, rows: list[Row], bar: float, budget: int
) -> None:
    proposer = started(index, setting, rows)
    every = [math.exp(logp) for logp in likeliest(propose_all(proposer, rows))]
    drafts = propose_all(proposer, rows, np.full(budget, bar, np.float32))
    near = any(math.isclose(chance, bar, rel_tol=SLACK) for chance in every)
    assert near or len(drafts.tokens) == min(budget, sum(chance >= bar for chance in every))


def test_the_properties_above_were_tried_on_drafts_worth_the_name() -> None:
    """Of full indexes: large trees, many sources, rows that compete for a budget."""
    setting = DraftSettings(min_prob=0.0, num_speculative_tokens=10, recent_tokens=48)
    seen, sizes, largest, branching = set(), set(), 0, 0
    for seed in range(20):
        prompts, outputs = tagged_rows(seed + 7, 3)
        rows = [(p, o[:1], 10) for p, o in zip(prompts, outputs, strict=True)]
        proposer = started(full_index(1), setting, rows)
        drafts = propose_all(proposer, rows, np.zeros(12, np.float32))
        sizes.add(tuple(np.diff(drafts.offsets).tolist()))
        trees = [tree(propose_all(proposer, rows), place) for place in range(3)]
        largest = max(largest, *(len(nodes) for nodes in trees))
        branching += any(len({path[:-1] for path in nodes}) < len(nodes) for nodes in trees)
        seen |= {node.source for nodes in trees for node in nodes.values()}
    assert largest == 10
    assert branching > 10
    assert len(sizes) > 10
    assert len(seen) >= 3, seen


def test_a_source_that_is_not_asked_is_never_named() -> None:
    prompts, outputs = tagged_rows(9, 3)
    # Weights at random, so that evidence may also speak against what it speaks of.
    values = np.random.default_rng(3).normal(0, 3, len(Weights.prior().values))
    index = dataclasses.replace(full_index(), weights=Weights(values.astype(np.float32)))
    named = set()
    for asked in chain.from_iterable(
        combinations(NGRAM_SOURCES, n) for n in range(len(NGRAM_SOURCES) + 1)
    ):
        setting = DraftSettings(min_prob=0.0, sources=asked, recent_tokens=48)
        proposer = make_proposer(index, setting)
        for prompt, output in zip(prompts, outputs, strict=True):
            begun(proposer, 0, prompt, output)
            proposer.finish(0)
        for row, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
            begun(proposer, row, [*output, *prompt], output[:1])
        drafts = proposer.propose(ids(range(3)), ids([10] * 3))
        here = {NGRAM_SOURCES[source] for source in drafts.source}
        assert here <= set(asked)
        named |= here
    assert named == set(NGRAM_SOURCES)


def test_a_proposer_of_no_speculative_tokens_never_drafts() -> None:
    setting = DraftSettings(num_speculative_tokens=0, min_prob=0.0)
    proposer = make_proposer(full_index(), setting, nodes=10)
    begun(proposer, 0, [2, 4], [8])
    assert proposer.max_depth == 0
    assert len(proposer.propose(ids([0]), ids([5])).tokens) == 0


def test_the_same_draft_is_made_again() -> None:
    """With drafts of other rows and budgets in between."""
    rng = Random(4)
    setting = DraftSettings(min_prob=0.0, learning_rate=0.1, recent_tokens=48)
    rows = [(rng.choices(range(VOCAB), k=9), rng.choices(range(1, 5), k=4), 8) for _ in range(3)]
    proposer = started(full_index(), setting, rows)
    first = tree(propose_all(proposer, rows), 1)
    proposer.propose(ids([2]), ids([3]))
    proposer.propose(ids([1, 0]), ids([1, 0]))
    assert tree(propose_all(proposer, rows), 1) == first
