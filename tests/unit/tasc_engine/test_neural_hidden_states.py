"""Tests that a proposer gets the target's hidden states of each token, as in a plain pass."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from neural_drafters import drafter_of, exact, model_of, proposer_of
from support import failing_where, load_target, make_engine, replace, requests_of
from tasc_draft import SOURCES
from tasc_engine import (
    Engine,
    EngineConfig,
    EngineTotals,
    GuideSpec,
    Request,
    StepRecord,
    Target,
    UnsupportedModel,
)
from tasc_engine.drafting import hidden_state_buffer as module
from tasc_engine.drafting.hidden_state_buffer import RowHiddenStates
from tasc_engine.drafting.neural.proposer import NeuralProposer
from tasc_engine.drafting.neural.tree import NeuralSettings
from tasc_engine.drafting.neural.vocabulary import FullVocabulary
from tasc_engine.errors import OutOfMemory
from tasc_engine.model.hidden_states import HiddenStateRequest
from tasc_engine.model.linears import Linear
from tasc_engine.step import verify as verifier
from tiny import make_folder

ROWS, CAPACITY, TOP = 2, 96, 3
TREE = NeuralSettings(depth=3, width=3, nodes=9)
LONG = tuple(range(40, 70))
PROMPTS = ((5, 9, 30, 41, 7), (8,), LONG, (*LONG[:25], 3, 1), (3, 1, 4, 1, 5, 9, 2), LONG[:18])
BOTH = HiddenStateRequest(hidden=True, top=TOP)


@dataclass
class RecordedRow:
    text: list[int]
    states: list[RowHiddenStates] = field(default_factory=list)


class Recording:
    """A proposer that drafts and records all its inputs."""

    def __init__(self, inner: NeuralProposer, wants: HiddenStateRequest) -> None:
        self.hidden_state_request, self.max_depth = wants, inner.max_depth
        self._inner = inner
        self.propose = inner.propose
        self.rows: dict[int, RecordedRow] = {}
        self.ended: list[RecordedRow] = []

    def start(self, row: int, prompt: Any, labels: Any = None) -> None:
        self.rows[row] = RecordedRow(prompt.tolist())
        self._inner.start(row, prompt)

    def observe(self, row: int, tokens: Any, hidden: Any = None) -> None:
        self.rows[row].text += tokens.tolist()
        if hidden is not None:
            self.rows[row].states.append(hidden)
        self._inner.observe(row, tokens, hidden)

    def finish(self, row: int) -> None:
        self.ended.append(self.rows.pop(row))
        self._inner.finish(row)


@dataclass
class Bench:
    engine: Engine
    target: Target
    recorder: Recording
    totals: EngineTotals
    model: Any
    failures: int = 0

    def answer(self, requests: Iterable[Request]) -> dict[str, tuple[int, ...]]:
        found = {r.id: r.tokens for r in self.engine.generate(requests)}
        self.engine.check_integrity()
        return found

    def check(self, row: RecordedRow, begin: int | None = 0) -> int:
        """Compares the states of a row with a plain forward pass; returns the number of tokens."""
        first = at = row.states[0].begin
        assert begin is None or at == begin
        for states in row.states:
            assert states.begin == at
            at += self.compare(row.text, states)
        assert at == len(row.text) - 1, "all but the newest token has been in the target"
        return at - first

    @torch.inference_mode()
    def compare(self, text: list[int], states: RowHiddenStates) -> int:
        """Compares states with those of a plain forward pass; returns the number of tokens."""
        assert states.hidden is not None
        assert states.top is not None
        own = slice(states.begin, states.begin + len(states.hidden))
        expected = self.model.model(torch.tensor([text])).last_hidden_state[0, own]
        torch.testing.assert_close(states.hidden, expected, rtol=0, atol=1e-9)
        assert torch.equal(states.top, self.model.lm_head(expected).topk(TOP).indices)
        return len(expected)


Maker = Callable[..., Bench]
CONFIG = EngineConfig(rows=ROWS, max_model_len=CAPACITY, prefill_chunk=7, prefix_cache_bytes=0)


@pytest.fixture
def bench(folder: Path) -> Maker:
    def make(wants: HiddenStateRequest = BOTH, cache: int = 0) -> Bench:
        config = replace(CONFIG, prefix_cache_bytes=cache)
        target = load_target(folder, config)
        recorder, totals = Recording(noisy(folder), wants), EngineTotals(len(SOURCES), TREE.depth)

        def on_step(record: StepRecord) -> None:
            totals.add(record)
            made.failures += record.draft_failures

        engine = make_engine(folder, config, target=target, proposer=recorder, on_step=on_step)
        made = Bench(engine, target, recorder, totals, exact(model_of(folder)))
        return made

    return make


def noisy(folder: Path) -> NeuralProposer:
    drafter, head = drafter_of("noisy", folder, ROWS, CAPACITY)
    vocabulary = FullVocabulary(Linear(head))
    return proposer_of(drafter, vocabulary, TREE, rows=ROWS, capacity=CAPACITY, eos_ids=(0,))


def requests(**differs: Any) -> list[Request]:
    return requests_of(PROMPTS, 20, **differs)


def test_hidden_states_equal_a_plain_forward(bench: Maker) -> None:
    """Covers prompts in chunks, accepted paths through trees, and rows that were filled again."""
    found = bench()
    found.answer(requests())
    accepted = int(found.totals.accepted.sum())
    assert 20 < accepted < found.totals.drafted.sum() - 20
    assert len(found.recorder.ended) == len(PROMPTS)
    recorder = sum(found.check(row) for row in found.recorder.ended)
    assert recorder == sum(len(row.text) - 1 for row in found.recorder.ended) > 150
    sizes = {len(states.hidden) for row in found.recorder.ended for states in row.states[1:]}
    assert sizes >= {1, 2, 3}
    found.recorder.ended.clear()
    found.answer(replace(r, draft=i % 2 == 0) for i, r in enumerate(requests()))
    assert len(found.recorder.ended) == len(PROMPTS[::2]), "rows without drafts are not observed"
    assert sum(found.check(row) for row in found.recorder.ended) > 75


def test_copied_prefix_has_no_hidden_states(bench: Maker) -> None:
    found = bench(cache=1 << 20)
    repeated = [replace(r, id=f"{r.id}-{k}") for k in range(2) for r in requests()]
    found.answer(repeated)
    begins = [row.states[0].begin for row in found.recorder.ended]
    assert sum(begins) == found.totals.shared_tokens > 40
    assert 0 in begins
    for row in found.recorder.ended:
        found.check(row, begin=None)


def test_forced_tokens_get_hidden_states_after_their_forward(bench: Maker) -> None:
    found = bench()
    guide = GuideSpec("choice", ("alarm set for friday", "play the beatles", "weather"))
    found.answer(requests(guide=guide))
    assert found.totals.forced_tokens > 0
    for row in found.recorder.ended:
        *_, last = row.states
        assert last.hidden is not None
        # Forced tokens that end an answer are in no forward pass.
        row.text = row.text[: last.begin + len(last.hidden) + 1]
        found.check(row)


@pytest.mark.parametrize("cache", [0, 1 << 20])
def test_cancelled_row_leaves_no_hidden_states(bench: Maker, cache: int) -> None:
    """This also holds for a row that starts after a prefix copied from another row's prompt."""
    found = bench(cache=cache)
    found.answer(requests())
    stranger = Request("stranger", tuple(range(200, 230)), 20)
    for steps in (1, 1, 3, 5, 8):  # in its prompt, at its end, in its answer
        found.engine.submit(stranger)
        found.engine.submit(replace(stranger, id="other"))
        for _ in range(steps):
            found.engine.step()
        assert found.engine.cancel("stranger")
        assert found.engine.cancel("other")
        found.recorder.ended.clear()
        found.answer(requests()[2:])
        begins = [row.states[0].begin for row in found.recorder.ended]
        assert (sum(begins) > 20) == bool(cache)
        assert sum(found.check(row, begin=None) for row in found.recorder.ended) > 60


@pytest.mark.parametrize(
    ("wants", "first", "steps"), [(BOTH, 0, 4), (HiddenStateRequest(top=TOP), 2, 1)]
)
def test_new_proposer_gets_hidden_states_from_its_start(bench, folder, wants, first, steps) -> None:
    """The proposer is replaced during an answer, or during a prompt without requested states."""
    found, later = bench(wants), Recording(noisy(folder), BOTH)
    for request in requests()[first : first + 2]:
        found.engine.submit(request)
    for _ in range(steps):
        found.engine.step()
    assert found.engine.running == 2
    held = (
        [7, 7]
        if steps == 1
        else [len(recorder.text) - 1 for recorder in found.recorder.rows.values()]
    )
    found.engine.draft_by(later)
    while found.engine.running:
        found.engine.step()
    assert sorted(row.states[0].begin for row in later.ended) == sorted(held)
    for row in later.ended:
        found.check(row, begin=None)
    found.engine.draft_by(noisy(folder))
    assert found.target.hidden_states.hidden is None, "no proposer requests them any more"


def test_resumed_answer_has_all_hidden_states(bench: Maker) -> None:
    found = bench()
    answers = found.answer(requests())
    begun = [
        replace(r, committed_ids=answers[r.id][:9]) for r in requests() if len(answers[r.id]) > 9
    ]
    found.recorder.ended.clear()
    assert found.answer(begun) == {r.id: answers[r.id] for r in begun}
    assert len(begun) == len(found.recorder.ended) > 3
    assert sum(found.check(row) for row in found.recorder.ended) > 100


@pytest.mark.parametrize(
    "wants", [HiddenStateRequest(), HiddenStateRequest(hidden=True), HiddenStateRequest(top=TOP)]
)
def test_only_requested_hidden_states_are_passed(bench: Maker, wants: HiddenStateRequest) -> None:
    found, plain = bench(wants), bench()
    assert found.answer(requests()) == plain.answer(requests())
    states = [states for row in found.recorder.ended for states in row.states]
    assert bool(states) == bool(wants)
    assert all((s.hidden is not None) == wants.hidden for s in states)
    assert all((s.top is not None) == bool(wants.top) for s in states)
    tops = [
        torch.cat([s.top for s in row.states]).shape for row in found.recorder.ended if wants.top
    ]
    assert tops == [(len(row.text) - 1, TOP) for row in found.recorder.ended if wants.top]


def test_repeated_step_passes_hidden_states_once(bench: Maker, monkeypatch) -> None:
    """The step is repeated without drafts, or without a request whose logprobs exceed memory."""
    found, full = bench(), OutOfMemory("no memory")
    calls = failing_where(monkeypatch, verifier, "token_logprobs", full, lambda n, *_: n in (2, 5))
    answers = {r.id: r for r in found.engine.generate(requests(logprobs=0))}
    assert len(calls) > 5
    assert sum(r.finish_reason == "error" for r in answers.values()) == 2
    texts = {(*PROMPTS[int(r.id)], *r.tokens) for r in answers.values() if not r.error}
    compared = [row for row in found.recorder.ended if tuple(row.text) in texts]
    assert len(compared) == len(PROMPTS) - 2
    for row in compared:
        found.check(row)


def test_dropped_drafts_have_no_hidden_states(bench: Maker, monkeypatch) -> None:
    found, full = bench(), OutOfMemory("no memory")
    honest = found.target.start_tokens
    raised = failing_where(
        *(monkeypatch, found.target, "start_tokens", full),
        lambda n, batch: len(batch.drafts.tokens) and sum(raised) < 5 and len(honest(batch)()),
    )  # its hidden states are there
    found.answer(requests())
    assert sum(raised) == 5
    assert sum(found.check(row) for row in found.recorder.ended) > 150


@pytest.mark.parametrize("name", ["_kept", "_joined"])
def test_failing_hidden_state_buffer_loses_only_drafts(
    bench: Maker, monkeypatch, name: str
) -> None:
    """The buffer takes memory on the target's device, which may be full."""
    found, expected = bench(), bench().answer(requests())
    full = RuntimeError("out of memory")
    raised = failing_where(monkeypatch, module, name, full, lambda n, *_: n % 7 == 3)
    assert found.answer(requests()) == expected
    assert found.failures == sum(raised) > 0
    kept = [(row.text, states) for row in found.recorder.ended for states in row.states]
    assert sum(found.compare(*each) for each in kept) > 50


def test_model_without_lean_decoder_refuses_hidden_states(tmp_path: Path, folder: Path) -> None:
    make_folder(tmp_path, "gpt_neox")
    with pytest.raises(UnsupportedModel):
        make_engine(tmp_path, CONFIG, proposer=Recording(noisy(folder), BOTH))
    quiet = Recording(noisy(folder), HiddenStateRequest())
    (result,) = make_engine(tmp_path, CONFIG, proposer=quiet).generate(requests()[:1])
    assert result.tokens
    assert not quiet.ended[0].states
