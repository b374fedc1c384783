"""What holds of every draft of the mixture, whatever its sources say and its weights are."""

import dataclasses
import math
from itertools import chain, combinations
from random import Random

import numpy as np
from draft_cases import (
    VOCAB,
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
    tagged_rows,
)
from draft_checks import SLACK, assert_same_up_to_ties, assert_valid, tree
from draft_examples import examples
from hypothesis import given
from hypothesis import strategies as st

from tasc_draft import NGRAM_SOURCES, DraftIndex, Drafts, DraftSettings, NgramProposer
from tasc_draft.index.weights import Weights
from tasc_draft.mixture.memory import HOPE

Row = tuple[list[int], list[int], int]  # prompt, answer so far, limit

few = examples(50, 150)
some_outputs = outputs | st.just([[1, 2, 3, 4]] * 3)
indexes = st.builds(
    lambda outputs, with_prompts: make_index(outputs, outputs[::-1] if with_prompts else None),
    some_outputs,
    st.booleans(),
) | st.integers(1, 2).map(full_index)
rows = st.lists(st.tuples(prompts, answers, st.integers(-1, 12)), min_size=1, max_size=3)


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
    nodes = proposer._memory.nodes[: drafts.offsets[-1] + sum(limit > 0 for *_, limit in rows)]
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
        assert min(drafts.logp) >= max(left_out) + math.log(HOPE) - SLACK


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
