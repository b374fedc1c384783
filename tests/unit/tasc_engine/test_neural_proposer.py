"""Tests that a neural proposer meets its contract and limits, and is disabled if it fails."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from neural_rows import (
    CAPACITY,
    PROMPTS,
    ROWS,
    TREE,
    assert_same,
    begun,
    every,
    hidden_states,
    ids,
    make,
    propose,
    tree,
)
from tree_layouts import forest

from neural_drafters import INDEXED, POLICIES, drafter_of, eagle_parts, exact, model_of, proposer_of
from support import refused
from tasc_draft import SOURCES, Drafts
from tasc_engine import UnsupportedModel
from tasc_engine.drafting.hidden_state_buffer import RowHiddenStates
from tasc_engine.drafting.neural.hybrid import HybridProposer
from tasc_engine.drafting.neural.recent import RecentVocabulary
from tasc_engine.drafting.neural.tree import NeuralSettings
from tasc_engine.drafting.safe_proposer import FAILURES, STEPS, DraftLimit, SafeProposer
from tasc_engine.model.hidden_states import HiddenStateRequest
from tasc_engine.model.operations import TensorOperations
from tiny import make_folder


@torch.inference_mode()
@pytest.mark.parametrize("architecture", ["qwen2", "llama", "qwen3"])
def test_draft_probabilities_equal_the_probabilities_of_the_drafter(
    architecture: str, tmp_path, seed
) -> None:
    """Earlier starts, tokens, drafts and ends of rows do not matter, in any order."""
    folder, draw = make_folder(tmp_path, architecture), random.Random(seed)
    model, proposer = exact(model_of(folder)), make(folder, chunk=7)
    texts: dict[int, list[int]] = {}
    for _ in range(12):
        for row in draw.sample(range(3), 2):
            if len(texts.get(row, ())) > 40 or (row in texts and draw.random() < 0.2):
                proposer.finish(row)
                del texts[row]
            if row not in texts:
                texts[row] = draw.choices(range(1, 300), k=draw.randint(1, 30))
                proposer.start(row, ids(texts[row]))
            tokens = draw.choices(range(1, 300), k=draw.randint(1, 4))
            proposer.observe(row, ids(tokens))
            texts[row] += tokens
        rows = draw.sample(sorted(texts), draw.randint(1, len(texts)))
        drafts = propose(proposer, rows)
        assert (drafts.source == SOURCES.index("neural")).all()
        for place, row in enumerate(rows):
            text, drafted = texts[row], tree(drafts, place)
            assert len(drafted) == 12
            for path, logp in drafted.items():
                lines = model(torch.tensor([[*text, *path]])).logits[0, len(text) - 1 :]
                expected = lines.log_softmax(-1)[range(len(path)), list(path)].sum()
                assert logp == pytest.approx(float(expected), abs=1e-4)
                assert 0 not in path[:-1], "no token follows an end"


@torch.inference_mode()
@pytest.mark.parametrize("begin", [0, 14])
def test_eagle_draft_probabilities_equal_the_probabilities_of_the_head(
    folder: Path, begin: int
) -> None:
    """The head reads the target's states, and its own states below the first level.

    With ``begin``, the first tokens were copied from another row and have no states.
    """
    ends, (small, joint) = model_of(folder), eagle_parts(folder)
    exact(small)
    proposer = make(folder, "eagle", settings=NeuralSettings(depth=4, width=2, nodes=20))
    text = [*PROMPTS[2], 3, 4, 5]
    seen = hidden_states(proposer, begin, len(text) - begin - 1)
    assert seen.hidden is not None
    proposer.start(0, ids(PROMPTS[2]))
    proposer.observe(0, ids([3, 4]), RowHiddenStates(begin, seen.hidden[:-1], None))
    propose(proposer, [0])
    proposer.observe(
        0, ids([5]), RowHiddenStates(begin + len(seen.hidden) - 1, seen.hidden[-1:], None)
    )
    drafted = tree(propose(proposer, [0], budget=20))
    assert {len(path) for path in drafted} == {1, 2, 3, 4}

    def inputs(tokens: Sequence[int], hidden: torch.Tensor) -> torch.Tensor:
        embedded = ends.model.embed_tokens(torch.tensor(tokens))
        return torch.cat((embedded, hidden), -1) @ joint.T

    for path, logp in drafted.items():
        read, expected = inputs(text[begin + 1 :], seen.hidden), 0.0
        for token in path:
            places = torch.arange(begin, begin + len(read))[None]
            state = small.model(inputs_embeds=read[None], position_ids=places).last_hidden_state
            expected += float(ends.lm_head(state[0, -1]).log_softmax(-1)[token])
            read = torch.cat((read, inputs([token], state[0, -1:])))
        assert logp == pytest.approx(expected, abs=1e-4)


@every
@pytest.mark.parametrize("policy", [*POLICIES, INDEXED])
def test_proposing_twice_gives_the_same_drafts(folder: Path, kind: str, policy: str) -> None:
    proposer = make(folder, kind, policy)
    begun(proposer, 0, PROMPTS[0], [3, 4])
    begun(proposer, 2, PROMPTS[2], [6])
    first = propose(proposer, [0, 2])
    again = propose(proposer, [2, 0])
    assert min(np.diff(first.offsets)) > 0
    assert_same(tree(first, 0), tree(again, 1))
    assert_same(tree(first, 1), tree(again, 0))


@every
@pytest.mark.parametrize("policy", ["full", "recent", "recent over ranked"])
def test_drafts_of_one_row_do_not_depend_on_other_rows(
    folder: Path, kind: str, policy: str
) -> None:
    together = make(folder, kind, policy)
    for row, prompt in enumerate(PROMPTS):
        begun(together, row, prompt, [3, 4, 5][: row + 1])
    drafts = propose(together, [2, 0, 1])
    for place, row in enumerate((2, 0, 1)):
        alone = make(folder, kind, policy)
        begun(alone, 0, PROMPTS[row], [3, 4, 5][: row + 1])
        assert_same(tree(drafts, place), tree(propose(alone, [0])))


@every
def test_prompt_in_chunks_drafts_like_a_whole_prompt(
    folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces, whole = make(folder, kind, chunk=7), make(folder, kind)
    sizes: dict[Any, list[list[int]]] = {pieces: [], whole: []}
    for each in sizes:
        honest = each.backbone.trunk

        def trunk(*args: Any, of: Any = each, honest: Any = honest) -> Any:
            sizes[of].append(args[-1].tolist())
            return honest(*args)

        monkeypatch.setattr(each.backbone, "trunk", trunk)
        for row, prompt in enumerate(([8, 2], list(range(20, 54)), PROMPTS[2])):
            begun(each, row, prompt, [3])
    drafted = [propose(each, [2, 0, 1]) for each in (pieces, whole)]
    late = int(kind == "eagle")
    assert sizes[whole] == [[21 - late, 3 - late, 35 - late]]
    assert sizes[pieces][:-1] == [[7, 7], [7, 7], [7], [7]]
    assert sizes[pieces][-1] == [7 - late, 3 - late, 7 - late]
    for row in range(3):
        assert_same(tree(drafted[0], row), tree(drafted[1], row))
    for each in sizes:
        each.observe(1, ids(range(8)), hidden_states(each, 34, 8))
    after = [propose(each, [1]) for each in (pieces, whole)]
    assert (sizes[pieces][-2:], sizes[whole][-1]) == ([[7], [1]], [8])
    assert_same(tree(after[0]), tree(after[1]))


@every
@pytest.mark.parametrize("policy", ["full", "recent"])
def test_finished_row_restarts_without_history(folder: Path, kind: str, policy: str) -> None:
    proposer, fresh = make(folder, kind, policy), make(folder, kind, policy)
    begun(proposer, 1, PROMPTS[2], [3, 4, 5])
    propose(proposer, [1])
    proposer.finish(1)
    for each in (proposer, fresh):
        begun(each, 1, PROMPTS[0], [9, 8])
    assert_same(tree(propose(proposer, [1])), tree(propose(fresh, [1])))


def test_eagle_waits_for_hidden_states(folder: Path) -> None:
    proposer = make(folder, "eagle")
    proposer.start(0, ids(PROMPTS[0]))
    assert len(propose(proposer, [0]).tokens) == 0  # of the prompt nothing is known yet
    proposer.observe(0, ids([3, 4]), hidden_states(proposer, 0, 5))
    assert len(propose(proposer, [0]).tokens) == 0  # token 4 has no hidden states of token 3
    proposer.observe(0, ids([6]), hidden_states(proposer, 5, 2))
    assert len(propose(proposer, [0]).tokens) == 12


@every
def test_rows_stay_within_their_budgets(folder: Path, kind: str) -> None:
    """The most likely nodes of a tree are drafted, even if other rows may have more nodes."""
    proposer = make(folder, kind)
    for row, prompt in enumerate(PROMPTS):
        begun(proposer, row, prompt, [3])
    whole = [tree(propose(proposer, [row])) for row in range(ROWS)]
    for budget in ([0, 0, 0], [1, 0, 12], [0, 5, 2], [3, 63, 0]):
        drafts = proposer.propose(ids([0, 1, 2]), ids(budget))
        assert np.diff(drafts.offsets).tolist() == [min(b, TREE.nodes) for b in budget]
        for row in range(ROWS):
            assert_same(tree(drafts, row), dict([*whole[row].items()][: budget[row]]))


def test_tokens_below_their_minimum_probability_are_not_drafted(folder: Path) -> None:
    proposer = make(folder)
    begun(proposer, 0, PROMPTS[0], [3])
    begun(proposer, 1, PROMPTS[1], [3])
    likely = propose(proposer, [0, 1])
    min_probs = np.full(24, 0.2, np.float32)
    drafts = proposer.propose(ids([0, 1]), ids([12, 12]), min_probs)
    assert 0 < len(drafts.tokens) == (np.exp(likely.logp) >= 0.2).sum() < len(likely.tokens)
    fewer = proposer.propose(ids([0, 1]), ids([12, 12]), min_probs[:1])
    assert fewer.logp.tolist() == [likely.logp.max()]


@every
def test_row_cannot_be_filled_beyond_its_capacity(folder: Path, kind: str) -> None:
    proposer = make(folder, kind)
    begun(proposer, 1, PROMPTS[1], [3])
    neighbour = tree(propose(proposer, [1]))
    begun(proposer, 0, PROMPTS[2], [7] * (CAPACITY - 20))
    full = tree(propose(proposer, [0]))
    with refused(ValueError, "row 0", "64"):
        proposer.observe(0, ids([1]))
    together = propose(proposer, [0, 1])
    assert_same(tree(together, 0), full)
    assert_same(tree(together, 1), neighbour)


def test_nearly_full_row_reads_only_valid_positions(folder: Path, monkeypatch) -> None:
    """Its tree is grown to the same depth as the tree of a row with room."""
    monkeypatch.setattr("tasc_engine.model.decoder._compiles", lambda model: False)
    proposer = make(folder)
    decoder = proposer.backbone.decoder
    cos_sin = torch.as_tensor(decoder.operations.cos_sin).view(CAPACITY, 2, decoder.head_dim)
    decoder.operations = TensorOperations(
        cos_sin, decoder.heads, decoder.kv_heads, torch.nn.functional.silu
    )  # of which an index minds its bounds
    begun(proposer, 0, PROMPTS[2], [7] * (CAPACITY - 22))
    begun(proposer, 1, PROMPTS[1], [3])
    drafts = proposer.propose(ids([0, 1]), ids([1, 12]))
    alone = proposer.propose(ids([0]), ids([1]))
    assert_same(tree(drafts), tree(alone))
    assert np.diff(drafts.offsets).tolist() == [1, 12]


def test_rows_that_do_not_fit_are_refused_and_stay_free(folder: Path) -> None:
    proposer = make(folder)
    size = proposer.vocab_size
    for alien in (-1, size):
        with refused(ValueError, str(alien), str(size)):
            proposer.start(0, ids([1, alien]))
    with refused(ValueError, "65", "64"):
        proposer.start(0, ids([1] * 65))
    assert len(propose(proposer, [0]).tokens) == 0
    proposer.start(0, ids([1] * 5))
    with refused(ValueError, "row 0"):
        proposer.start(0, ids([1]))
    with refused(ValueError, "-5"):
        proposer.observe(0, ids([1, -5]))
    proposer.finish(0)
    proposer.start(0, ids([1]))


@every
def test_unused_rows_are_not_drafted(folder: Path, kind: str) -> None:
    drafted: list[list[int]] = []
    proposer = make(folder, kind, on_drafted=lambda rows: drafted.append(rows.tolist()))
    begun(proposer, 0, PROMPTS[0], [3])
    drafted.clear()
    for unused in (1, 3, -1):
        drafts = propose(proposer, [unused, 0, unused])
        assert np.diff(drafts.offsets).tolist() == [0, 12, 0]
    assert drafted == [[0]] * 3
    begun(proposer, 1, [], [])
    assert np.diff(propose(proposer, [1, 0]).offsets).tolist() == [0, 12]
    proposer.finish(0)
    assert len(propose(proposer, [0, 1]).tokens) == 0


def test_drafter_with_sliding_window_is_refused(tmp_path: Path) -> None:
    with refused(UnsupportedModel, "window"):
        make(make_folder(tmp_path, "mistral"))


def test_vocabulary_smaller_than_the_tree_is_supported(folder: Path) -> None:
    drafter, head = drafter_of("same", folder, ROWS, CAPACITY)
    few = RecentVocabulary(head, ROWS, window=2, extension=False)
    proposer = proposer_of(drafter, few, TREE, rows=ROWS, capacity=CAPACITY, eos_ids=(0,))
    for row, prompt in enumerate(([5, 9], [7, 7])):  # the target's states are not passed
        proposer.start(row, ids(prompt))
        proposer.observe(row, ids([3]))
    assert {token for path in tree(propose(proposer, [0])) for token in path} == {5, 9}
    drafts = propose(proposer, [1, 0])
    assert [*tree(drafts)] == [(7,) * n for n in (1, 2, 3, 4)]
    assert {token for path in tree(drafts, 1) for token in path} == {5, 9}


@pytest.mark.parametrize(("depth", "width"), [(4, 21), (16, 4), (1, 32), (3, 8), (6, 10)])
def test_largest_trees_are_drafted(folder: Path, depth: int, width: int) -> None:
    proposer = make(folder, settings=NeuralSettings(depth, width, 63))
    begun(proposer, 0, PROMPTS[0], [3])
    assert len(propose(proposer, [0], 63).tokens) == min(63, width if depth == 1 else 63)


TOLD, BUDGET = np.array([0, 3], np.int32), np.array([2, 2], np.int32)
PROMPT = np.array([1, 2], np.int32)


class Neural:
    """Drafts a chain of two for each row in ``seconds``, or raises an error."""

    max_depth = 2
    hidden_state_request = HiddenStateRequest(hidden=True)

    def __init__(self) -> None:
        self.now = 0.0
        self.seconds = 0.1
        self.raising: set[str] = set()
        self.drafts = forest([[-1, 0], [-1, 0]])
        self.calls: list[tuple[Any, ...]] = []
        self.off: list[str] = []
        self.limit = DraftLimit(0.5, self.off.append)

    def clock(self) -> float:
        return self.now

    def _called(self, name: str, *args: Any) -> None:
        self.calls.append((name, *args))
        if name in self.raising:
            raise RuntimeError("no memory")

    def start(self, row: int, prompt: Any, labels: Any = None) -> None:
        self._called("start", row)

    def observe(self, row: int, tokens: Any, hidden: Any = None) -> None:
        self._called("observe", row, hidden)

    def finish(self, row: int) -> None:
        self._called("finish", row)

    def propose(self, rows: Any, budget: Any, min_probs: Any = None) -> Drafts:
        self.now += self.seconds
        self._called("propose", budget.tolist())
        return self.drafts


class Ngrams(Neural):
    """Accepts an external draft, and always drafts the same."""

    vocab_size = 10

    def propose(
        self, rows: Any, budget: Any, min_probs: Any = None, external: Any = None
    ) -> Drafts:
        return super().propose(rows, budget, min_probs)


class Guarded:
    def __init__(self) -> None:
        self.neural = Neural()
        self.off, self.requests = self.neural.off, list[HiddenStateRequest]()
        self.proposer = SafeProposer(self.neural, 10, self.requests.append, self.neural.clock)

    def propose(self) -> int:
        """Returns the number of draft tokens."""
        return len(self.proposer.propose(TOLD, BUDGET).tokens)


@pytest.fixture
def guarded() -> Guarded:
    return Guarded()


def test_guard_passes_calls_to_a_working_drafter_unchanged(guarded: Guarded) -> None:
    assert guarded.proposer.max_depth == 2
    assert guarded.requests == [HiddenStateRequest(hidden=True)]
    guarded.proposer.start(3, PROMPT)
    guarded.proposer.observe(3, PROMPT)
    assert guarded.propose() == 4
    guarded.proposer.finish(3)
    assert guarded.neural.calls == [
        ("start", 3), ("observe", 3, None), ("propose", [2, 2]), ("finish", 3),
    ]  # fmt: skip


def test_consecutive_failures_switch_the_drafter_off(guarded: Guarded, caplog) -> None:
    for failures in (FAILURES - 1, FAILURES - 1, FAILURES):
        assert guarded.propose() == 4
        guarded.neural.raising = {"propose"}
        assert [guarded.propose() for _ in range(failures)] == [0] * failures
        guarded.neural.raising = set()
    assert guarded.off == ["failed"]
    assert guarded.requests[-1] == HiddenStateRequest()
    calls = len(guarded.neural.calls)
    guarded.proposer.start(0, PROMPT)
    guarded.proposer.observe(0, PROMPT)
    guarded.proposer.finish(0)
    assert guarded.propose() == 0
    assert len(guarded.neural.calls) == calls
    (expected,) = (r.getMessage() for r in caplog.records if "--unset drafter" in r.getMessage())
    assert "RuntimeError('no memory')" in expected


def test_failed_row_is_not_drafted_until_restarted(guarded) -> None:
    guarded.neural.raising = {"observe"}
    guarded.proposer.start(3, PROMPT)
    for _ in range(2 * FAILURES):
        guarded.proposer.observe(3, PROMPT)
    guarded.neural.drafts = forest([[-1, 0], []])
    assert (guarded.propose(), guarded.neural.calls[-1]) == (2, ("propose", [2, 0]))
    guarded.proposer.finish(3)
    guarded.proposer.start(3, PROMPT)
    guarded.propose()
    assert (guarded.neural.calls[-1], guarded.off) == (("propose", [2, 2]), [])


def test_failing_starts_switch_the_drafter_off(guarded: Guarded) -> None:
    guarded.neural.raising = {"start"}
    for row in range(FAILURES):
        guarded.proposer.start(row, PROMPT)
    assert guarded.off == ["failed"]


@pytest.mark.parametrize("replaced", [False, True])
def test_row_in_use_is_finished_before_its_restart(guarded: Guarded, replaced: bool) -> None:
    """A hybrid with another index has the same drafter, and starts its rows again."""
    guarded.proposer.start(3, PROMPT)
    if replaced:
        guarded.proposer.use(guarded.neural)
    guarded.proposer.start(3, PROMPT)
    assert guarded.neural.calls == [("start", 3), ("finish", 3), ("start", 3)]


def test_slow_median_switches_the_drafter_off(guarded, caplog) -> None:
    guarded.neural.seconds = 60.0  # the first steps compile
    for step in range(3 * STEPS):
        assert guarded.propose() == 4
        guarded.neural.seconds = 9.0 if step % 3 == 0 else 0.5
    assert guarded.off == []
    guarded.neural.seconds = 0.6
    drafted = [guarded.propose() for _ in range(STEPS)]
    assert guarded.off == ["slow"]
    assert drafted[-1] == 0
    assert "took 0.55 s, the limit is 0.5 s" in caplog.text


@pytest.mark.parametrize("call", ["start", "observe", "propose"])
def test_failing_drafter_does_not_reduce_n_gram_drafts(call: str) -> None:
    ngram, guarded = Ngrams(), Guarded()
    ngram.drafts = replace(ngram.drafts, logp=np.log(np.full(4, 0.5, np.float32)))
    guarded.proposer.use(HybridProposer(ngram, guarded.neural))
    guarded.neural.raising = {call}
    for row in TOLD.tolist() * FAILURES:
        guarded.proposer.start(row, PROMPT)
        guarded.proposer.observe(row, PROMPT)
        assert guarded.propose() == 4
    assert guarded.off == ["failed"]
    assert guarded.proposer.new_failures() == FAILURES
    assert guarded.requests[-1] == HiddenStateRequest()
