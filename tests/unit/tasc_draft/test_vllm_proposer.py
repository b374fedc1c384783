"""Tests of the proposer for vLLM, without vLLM.

`vllm_calls.json.gz` holds calls that vLLM 0.32 made for the shipped model, written by
tests/in_vllm/record_calls.py: rows move, leave, come back after preemption, and are cancelled. The
tests in tests/in_vllm run vLLM itself.
"""

import dataclasses
import gc
import gzip
import json
import logging
import threading
import weakref
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from support import failing, refused
from tasc_draft import DraftError, DraftIndex, DraftSettings, Tokens, build_index, write_index
from tasc_draft.index.draft_index import INDEX_FILE
from tasc_draft.mixture.row_state import NONE
from tasc_draft.vllm import Pace, Paces, TascProposer, VllmDrafting, mend_sampling
from tasc_jobs.demo.tasks import MODEL, TASK, TEMPLATES, read_split
from tasc_text import TaskTokenizer

RECORDED = json.loads(gzip.decompress(Path(__file__).with_name("vllm_calls.json.gz").read_bytes()))
MOST, LENGTH, SLOTS = 8, 160, RECORDED["slots"]
TOKENIZER = TaskTokenizer.from_folder(MODEL)
EOS = TOKENIZER.eos_id


def built(rows: int) -> DraftIndex:
    data = read_split(TASK, "train")[:rows]
    prompts = [TOKENIZER.encode_prompt(TEMPLATES[TASK].format(input=d["input"])) for d in data]
    return build_index(
        Tokens.of(TOKENIZER.encode_outputs([d["output"] for d in data])),
        Tokens.of(prompts),
        fingerprint=TOKENIZER.fingerprint,
        vocab_size=TOKENIZER.vocab_size,
        eos_id=EOS,
        word_starts=TOKENIZER.word_starts,
        canonical=TOKENIZER.canonical,
    )


@pytest.fixture(scope="module")
def index() -> DraftIndex:
    return built(300)


@pytest.fixture
def folder(index: DraftIndex, tmp_path: Path) -> Path:
    write_index(index, tmp_path / INDEX_FILE)
    return tmp_path


def config(tasc: dict[str, Any], slots: int = SLOTS) -> SimpleNamespace:
    """The parts of vLLM's configuration that the proposer reads."""
    return SimpleNamespace(
        additional_config={"tasc": tasc},
        model_config=SimpleNamespace(
            get_vocab_size=lambda: TOKENIZER.vocab_size,
            max_model_len=LENGTH,
            tokenizer=str(MODEL),
            tokenizer_revision=None,
        ),
        speculative_config=SimpleNamespace(num_speculative_tokens=MOST),
        scheduler_config=SimpleNamespace(max_num_seqs=slots),
    )


@pytest.fixture
def make(folder: Path) -> Iterator[Any]:
    made = list[TascProposer]()

    def proposer(**tasc: Any) -> TascProposer:
        made.append(TascProposer(config({"index": str(folder), "poll_s": 0.01, **tasc})))
        return made[-1]

    yield proposer
    for each in made:
        each.close()


def called(proposer: TascProposer, call: dict[str, Any]) -> list[list[int]]:
    ids, ends = np.zeros((SLOTS, LENGTH), np.int32), np.zeros(SLOTS, np.int32)
    for i, tokens in enumerate(call["ids"]):
        ids[i, : len(tokens)], ends[i] = tokens, len(tokens)
    return proposer.propose(call["sampled"], ends, ids)


def until_end(tokens: list[int], begin: int) -> list[int]:
    """The tokens up to the first end-of-sequence after ``begin``."""
    return tokens[: tokens.index(EOS, begin) + 1] if EOS in tokens[begin:] else tokens


def followed(proposer: TascProposer, calls: list[dict[str, Any]]) -> dict[str, set[int]]:
    """Replays calls and checks each row's text; returns the rows that each request had."""
    rows_of = defaultdict[str, set[int]](set)
    for call in calls:
        chains = called(proposer, call)
        assert len(chains) == len(call["sampled"])
        taken = [row for row in proposer._row_of.tolist() if row != NONE]
        assert len(taken) == len(set(taken))
        for i, (request, tokens) in enumerate(zip(call["requests"], call["ids"], strict=True)):
            fresh, row = len(call["sampled"][i]), int(proposer._row_of[i])
            assert len(chains[i]) <= MOST
            assert all(0 <= token < TOKENIZER.vocab_size for token in chains[i])
            if not fresh:
                assert (row, chains[i]) == (NONE, [])
                continue
            text = until_end(tokens, len(tokens) - fresh)
            length, begin = int(proposer._rows[row]["length"]), int(proposer._rows[row]["begin"])
            assert proposer._texts[row, :length].tolist() == text
            rows_of[request].add(row)
            assert begin >= call["prompts"][i]
            if text[-1] == EOS:
                assert chains[i] == []
    assert proposer._faults == 0
    return rows_of


def test_recorded_calls_have_moved_cancelled_and_resumed_rows():
    """The cases that the tests below are about occur in the recording."""
    slots_of, gone, resumed, partial = defaultdict[str, set[int]](set), set(), set(), 0
    seen = set[str]()
    for call in RECORDED["calls"]:
        for slot, request in enumerate(call["requests"]):
            slots_of[request].add(slot)
            resumed |= {request} & gone
            partial += not call["sampled"][slot]
        gone |= seen - set(call["requests"])
        seen |= set(call["requests"])
    assert sum(len(slots) > 1 for slots in slots_of.values()) > 3
    assert len(resumed) >= 2
    assert partial > 0
    ends = {
        call["requests"][i]: ids[-1]
        for call in RECORDED["calls"]
        for i, ids in enumerate(call["ids"])
    }
    assert sum(end != EOS for end in ends.values()) >= 4


def test_rows_keep_their_texts_when_vllm_moves_and_resumes_them(make):
    proposer = make()
    rows_of = followed(proposer, RECORDED["calls"])
    assert len(rows_of) >= 40
    assert all(len(rows) == 1 for rows in rows_of.values())


def test_rows_whose_tokens_are_exchanged_are_found_in_their_new_slots(make):
    """Positive control: a row is found by its tokens, not by its slot."""
    proposer, calls = make(), RECORDED["calls"]
    pairs = pairwise(calls)
    call, then = next(
        (a, b) for a, b in pairs if a["requests"] == b["requests"] and all(a["sampled"])
    )
    n = len(then["requests"])
    assert n > 2
    called(proposer, call)
    before = proposer._row_of.copy()
    called(proposer, {key: values[::-1] for key, values in then.items()})
    assert proposer._row_of[:n].tolist() == before[:n][::-1].tolist()


def test_drafts_of_recorded_calls_are_often_right(make):
    """The recorded model continues as drafted, as far as the next call shows."""
    proposer, right, drafts = make(), 0, dict[str, list[int]]()
    for call in RECORDED["calls"]:
        for request, new in zip(call["requests"], call["sampled"], strict=True):
            draft = drafts.get(request, [])
            right += sum(a == b for a, b in zip(draft, new, strict=False))
        chains = called(proposer, call)
        drafts = dict(zip(call["requests"], chains, strict=True))
    assert right > 150


def test_skipped_steps_are_caught_up_by_tokens(make):
    """vLLM leaves out all rows of a step in which one row is near the longest length."""
    calls = [call for i, call in enumerate(RECORDED["calls"]) if i % 4 != 2]
    rows_of = followed(make(), calls)
    # A request that ignores ends is begun anew after a missed end, and two answers to one prompt
    # may exchange rows while they are equal.
    special = ("8-", "0_5-", "1_5-")
    others = [rows for request, rows in rows_of.items() if not request.startswith(special)]
    assert len(others) == len(rows_of) - 3
    assert all(len(rows) == 1 for rows in others)


def test_ended_answers_are_recent_up_to_their_end(make):
    proposer, answers = make(), dict[str, tuple[int, ...]]()
    for call in RECORDED["calls"]:
        called(proposer, call)
        for i, (request, ids) in enumerate(zip(call["requests"], call["ids"], strict=True)):
            text = until_end(ids, len(ids) - len(call["sampled"][i]))
            answers[request] = tuple(text[call["prompts"][i] :])
    # One request ignores ends; cancelled and cut answers have none.
    ended = {
        answer
        for answer in answers.values()
        if EOS in answer and answer.index(EOS) == len(answer) - 1
    }
    none = {"requests": [], "sampled": [], "ids": []}
    called(proposer, none)
    memory = proposer._proposer.memory
    recent = memory.recent.tokens[0, : memory.growth[0]["recent_end"]].tolist()
    parts, part = set[tuple[int, ...]](), list[int]()
    for token in recent:
        if token == -1:
            parts.add(tuple(part[1:]))
            part = []
        else:
            part.append(token)
    assert len(ended) > 20
    assert ended <= parts


def test_more_rows_than_the_limit_are_left_without_drafts(make):
    proposer = make(rows=1)
    most = 0
    for call in RECORDED["calls"]:
        chains = called(proposer, call)
        most = max(most, sum(map(bool, chains)))
        assert len(chains) == len(call["sampled"])
    assert 1 <= most <= 2  # one row, and one that may wait for its return
    assert proposer._faults == 0


def test_plain_slots_get_no_drafts_and_other_rows_keep_theirs(make):
    """The slots keep their rows, and their steps have no drafted tokens to learn from."""
    plain, usual = make(), make()
    for proposer in (plain, usual):
        proposer._paces = defaultdict(AlwaysDrafts)
    plain.plain_slots = frozenset({1})
    others = lost = 0
    for call in RECORDED["calls"]:
        found, expected = called(plain, call), called(usual, call)
        assert found[1:2] in ([], [[]])
        row = int(plain._row_of[1])
        assert row == NONE or plain._drafted[row] == 0
        lost += any(expected[1:2])
        others += any(found)
        assert plain._row_of.tolist() == usual._row_of.tolist()
    assert lost > 3
    assert others > 3
    assert plain._faults == 0


class AlwaysDrafts(Pace):
    """Drafts in all steps, whatever their times are."""

    def add(self, *args, **more) -> None:
        pass

    def drafts_next(self) -> bool:
        return True


def test_proposer_without_users_is_freed_and_its_thread_ends(folder):
    proposer = TascProposer(config({"index": str(folder), "poll_s": 0.01}))
    closed, freed = proposer._closed, weakref.ref(proposer)
    watchers = [t for t in threading.enumerate() if closed in getattr(t, "_args", ())]
    assert len(watchers) == 1
    del proposer
    watchers[0].join(timeout=60)
    assert not watchers[0].is_alive()
    gc.collect()
    assert freed() is None


def test_long_rows_get_no_drafts(make):
    proposer, drafted = make(row_tokens=30), 0
    for call in RECORDED["calls"]:
        chains = called(proposer, call)
        assert not any(
            len(ids) > 30 and chain for ids, chain in zip(call["ids"], chains, strict=True)
        )
        drafted += any(chains)
    assert drafted > 5
    assert proposer._faults == 0


@pytest.mark.parametrize("draft", [{}, {"neighbours": 8}])
def test_replaced_file_is_taken_over_between_steps(make, folder, index, draft):
    """New settings need a new proposer, which gets the texts of all rows."""
    proposer, calls = make(), RECORDED["calls"]
    followed(proposer, calls[:10])
    tuned = DraftSettings(neighbours=8) if draft else None
    other = dataclasses.replace(built(200), settings=tuned)
    write_index(other, folder / INDEX_FILE)
    while proposer._next is None:
        proposer._closed.wait(0.01)
    assert proposer.index.corpus.nbytes == index.corpus.nbytes
    followed(proposer, calls[10:11])
    assert proposer.index.corpus.nbytes == other.corpus.nbytes
    assert proposer._proposer.settings.neighbours == (8 if draft else 32)
    followed(proposer, calls[11:])


def test_damaged_new_file_leaves_the_index_in_use_and_is_logged_once(make, folder, index, caplog):
    proposer = make()
    (folder / "other").write_bytes(b"no index")
    with caplog.at_level(logging.WARNING):
        (folder / "other").replace(folder / INDEX_FILE)
        while not caplog.records:
            proposer._closed.wait(0.01)
        proposer._closed.wait(0.1)  # several looks
    assert [r for r in caplog.records if "not a draft index" in r.getMessage()] == caplog.records
    assert len(caplog.records) == 1
    followed(proposer, RECORDED["calls"])
    assert proposer.index.corpus.nbytes == index.corpus.nbytes


def test_file_that_is_overwritten_in_place_disturbs_no_draft(make, folder, index):
    """A mapped file would change under the compiled code, or end the process."""
    proposer = make(poll_s=3600.0)
    path = folder / INDEX_FILE
    path.write_bytes(bytes(path.stat().st_size // 2))
    followed(proposer, RECORDED["calls"])
    assert proposer.index.corpus.nbytes == index.corpus.nbytes


def test_batch_of_another_form_is_a_fault_that_changes_no_memory(make, caplog):
    proposer = make()
    ids, ends = np.zeros((SLOTS + 1, LENGTH), np.int32), np.ones(SLOTS + 1, np.int32)
    with caplog.at_level(logging.ERROR):
        assert proposer.propose([[1]] * (SLOTS + 1), ends, ids) == [[]] * (SLOTS + 1)
        assert proposer.propose([[1]], ends, ids.astype(np.int64)) == [[]]
    assert "differs from 0.32" in str(caplog.records[0].exc_info)


def test_fault_gives_empty_drafts_and_drafting_starts_anew(make, monkeypatch, caplog):
    proposer, calls = make(), RECORDED["calls"]
    called(proposer, calls[0])
    monkeypatch.setattr(proposer._proposer, "propose", failing(RuntimeError("broken")))
    with caplog.at_level(logging.ERROR):
        assert not any(called(proposer, calls[1]))
    assert len(caplog.records) == 1
    assert any(called(proposer, calls[2]))


def test_repeated_faults_turn_drafting_off(make, monkeypatch, caplog):
    proposer = make()
    monkeypatch.setattr(proposer, "_propose", failing(RuntimeError("broken")))
    with caplog.at_level(logging.ERROR):
        for call in RECORDED["calls"]:
            assert called(proposer, call) == [[] for _ in call["sampled"]]
    assert len(caplog.records) == 3
    assert "off until vLLM starts again" in caplog.records[-1].getMessage()


@pytest.mark.parametrize(
    ("tasc", "named"),
    [
        ({}, ["index", "redis_url"]),
        ({"index": "a", "task": "b"}, ["one index"]),
        ({"task": "b"}, ["redis_url"]),
        ({"index": "a", "idnex": 1}, ["idnex", "row_tokens"]),
        ({"index": "a", "rows": 0}, ["tasc.rows is 0"]),
        ({"index": "a", "rows": "8"}, ["tasc.rows is '8'"]),
        ({"index": "a", "poll_s": -1.0}, ["tasc.poll_s is -1.0"]),
        ({"index": "/no/such/folder"}, ["/no/such/folder", "tasc index export"]),
    ],
)
def test_invalid_settings_are_refused_at_the_start(tasc, named):
    with refused(DraftError, *named):
        TascProposer(config(tasc))


@pytest.mark.parametrize(
    ("draft", "named"), [({"min_porb": 1}, "min_porb"), ({"min_prob": 2}, "min_prob is 2")]
)
def test_invalid_draft_settings_are_refused_at_the_start(make, draft, named):
    with refused(DraftError, named):
        make(draft=draft)


def test_index_of_another_tokenizer_is_refused_at_the_start(make, folder):
    size = TOKENIZER.vocab_size
    write_index(DraftIndex.empty("another", size), folder / INDEX_FILE)
    with refused(DraftError, "another", TOKENIZER.fingerprint, str(MODEL)):
        make()


@pytest.mark.parametrize("given", [None, {}, {"other": 1}, {"tasc": None}])
def test_additional_config_without_an_index_is_refused(given):
    with refused(DraftError, "additional_config"):
        VllmDrafting.read(given)


def paced(
    fixed_s: float, token_s: float, right: float = 1.0, drafted_s: float = 0.0, steps: int = 400
) -> tuple[Pace, list[bool]]:
    """Steps of 8 rows with up to 64 draft tokens of probability 0.5.

    Returns the pace, and whether each step was drafted.

    Args:
        right: The accepted share of these tokens, relative to their probability.
        drafted_s: Costs of a step with any draft.
    """
    found, random, flags = Pace(), np.random.default_rng(0), list[bool]()
    for _ in range(steps):
        flags.append(found.drafts_next())
        drafted = int(random.integers(1, 65)) if flags[-1] else 0
        accepted = int(random.binomial(drafted, 0.5 * right))
        prompt = int(random.integers(0, 3)) * 40
        seconds = fixed_s + token_s * (8 + drafted) + drafted_s * (drafted > 0) + 1e-5 * prompt
        noisy = seconds * (1 + 0.02 * random.standard_normal())
        found.add(noisy, 8, prompt, 8 + accepted, drafted, 0.5 * drafted)
    return found, flags


def test_draft_tokens_must_be_likelier_where_they_cost_more():
    (free, _), (cheap, _) = paced(0.01, 0.0), paced(0.01, 1e-4)
    assert free.min_prob < 0.02
    # A step has 40 tokens on average, and emits 24.
    assert cheap.min_prob == pytest.approx(1e-4 * 24 / (0.01 + 40 * 1e-4), abs=0.04)


def test_draft_tokens_must_be_likelier_where_probabilities_are_too_high():
    (right, _), (wrong, _) = paced(0.01, 1e-4), paced(0.01, 1e-4, right=0.5)
    assert wrong.min_prob > 1.4 * right.min_prob


@pytest.mark.parametrize("case", [{"drafted_s": 0.1}, {"token_s": 0.01}, {"right": 0.01}])
def test_steps_are_plain_while_they_are_faster(case):
    """Drafts are tried again now and then, but rarely."""
    _, flags = paced(**{"fixed_s": 0.01, "token_s": 2e-4, **case}, steps=1500)
    assert 5 <= sum(flags[200:]) < 100


def test_steps_are_drafted_where_that_is_faster():
    pace, flags = paced(0.01, 1e-5, steps=2000)
    assert sum(flags[-300:]) >= 290
    # Drafts that become slightly slower are paused for short, however many were good before.
    while not pace._pause:
        drafted = pace.drafts_next()
        elapsed, emitted = (0.0303, 23) if drafted else (0.01, 8)
        pace.add(elapsed, 8, 0, emitted, 30 * drafted, 15.0 * drafted)
    assert pace._pause <= 40


def test_drafts_are_tried_again_after_rows_that_the_index_did_not_predict():
    """Tokens are drafted as the pace demands; at first hardly any is right, then all are."""
    pace, random = Pace(), np.random.default_rng(1)
    used = []
    for step in range(3000):
        probs = random.uniform(0.3, 1.0, 48) if pace.drafts_next() else np.zeros(0)
        probs = probs[probs >= pace.min_prob]
        right = 0.02 if step < 500 else 1.0
        accepted = int((random.random(len(probs)) < probs * right).sum())
        seconds = 0.01 + 3e-4 * (8 + len(probs))
        if step == 1200:
            seconds = 10.0  # the machine was stopped
        pace.add(seconds, 8, 0, 8 + accepted, len(probs), float(probs.sum()))
        used.append(len(probs))
    assert np.mean(used[300:500]) < 4
    assert np.mean(used[2500:]) > 10


def test_batch_of_another_size_begins_with_the_pace_of_the_nearest():
    paces = Paces()
    assert paces[4].min_prob == 0
    paces[4], _ = paced(0.01, 1e-4)
    paces[1], _ = paced(0.01, 0.0)
    assert paces[0].min_prob == 0
    assert paces[5].min_prob == paces[4].min_prob > paces[2].min_prob == paces[1].min_prob
    paused, flags = paced(0.01, 0.01)
    paces[9] = paused
    assert not flags[-1]
    assert paces[8].drafts_next()
    for _ in range(50):
        paces[5].add(0.02, 16, 0, 30, 40, 14.0)
    assert paces[5].min_prob != paces[4].min_prob


def test_nothing_is_concluded_before_steps_are_known():
    found = Pace()
    assert found.min_prob == 0
    for _ in range(30):
        found.add(0.01, 8, 0, 8, 0, 0.0)  # all steps are alike, so a token's cost is unknown
    assert found.min_prob == 0


def test_values_of_rows_are_written_for_their_draft_tokens_on_a_cpu() -> None:
    """vLLM 0.32 leaves them as they were in memory, and fails with ``top_k`` in an empty step."""

    def cut(logits: torch.Tensor, k: Any, p: Any) -> torch.Tensor:
        return logits - k.max()

    sampler = SimpleNamespace(
        expand_batch_to_tokens=lambda x, ends, n, old=0, new=0: x.new_full((n,), -7),
        apply_top_k_top_p=cut,
        rejection_sample=lambda drafts, *rest: drafts,
    )
    for _ in range(2):
        mend_sampling(sampler)
    mend_sampling(None)
    ends = torch.tensor([2, 2, 5], dtype=torch.int32)
    found = sampler.expand_batch_to_tokens(torch.tensor([0.5, 0.7, 0.0]), ends, 5, 0, 1)
    assert found.tolist() == [0.5, 0.5, 1.0, 1.0, 1.0]
    none, last = torch.zeros(0, dtype=torch.int32), torch.tensor([[4], [9]])
    step = [0, 0], 0, torch.zeros(2, dtype=torch.int32), None, None, last, None
    chosen = sampler.rejection_sample(none, *step)
    assert (chosen.tolist(), chosen.dtype) == ([[4], [9]], torch.int32)
    assert sampler.rejection_sample(ends, *step) is ends
    ks = sampler.expand_batch_to_tokens(torch.tensor([3, 1, 4], dtype=torch.int32), ends, 5)
    assert (ks.tolist(), ks.dtype) == ([3, 3, 4, 4, 4], torch.int32)
    assert sampler.apply_top_k_top_p(torch.ones(1, 2), torch.tensor([1]), None).tolist() == [[0, 0]]
    none = torch.ones(0, 2)
    assert sampler.apply_top_k_top_p(none, torch.ones(0), None) is none
