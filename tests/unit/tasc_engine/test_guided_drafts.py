"""Tests drafts with guides: the verified tokens and the number of forward passes of answers."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from guide_walks import EOS, guide_of, ids, label_sets, next_tokens, tokens_of, trees
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tree_layouts import forest

from support import Known, failing, replace
from tasc_draft import SOURCES
from tasc_draft.drafts import FORCED
from tasc_draft.labels import LabelTrie
from tasc_engine import Engine, EngineTotals, GenerationResult, GuideSpec, Request
from tasc_engine.errors import OutOfMemory
from tasc_engine.guided import follow
from tasc_engine.model.target import Target
from tasc_engine.stats import StepRecord
from tasc_text import TaskTokenizer

PROMPT = (5, 9, 30, 41, 7)


def known(results: Sequence[GenerationResult]) -> Known:
    """Returns a proposer for the rows of requests with these results, in this order."""
    rest = iter(results)
    return Known(lambda prompt: next(rest).tokens)


def requests(texts: Sequence[str], n: int, **fields: Any) -> list[Request]:
    rng, guide = Random(3), GuideSpec("choice", tuple(texts))
    prompts = [tuple(rng.randrange(1, 60) for _ in range(rng.randrange(3, 9))) for _ in range(n)]
    asked = {"guide": guide, "max_tokens": 40, **fields}
    return [Request(str(i), prompt, **asked) for i, prompt in enumerate(prompts)]


Answered = tuple[list[GenerationResult], list[StepRecord]]


@pytest.fixture
def answered(make_engine) -> Callable[..., Answered]:
    """Answers of an engine, in the order of their requests, and the records of its steps."""

    def run(asked: Sequence[Request], draft: bool = True, **how: Any) -> Answered:
        records: list[StepRecord] = []
        engine: Engine = make_engine(on_step=records.append, drafts=16, **how)
        found = engine.generate([replace(request, draft=draft) for request in asked])
        results = sorted(found, key=lambda result: int(result.id))
        engine.check_integrity()
        return results, records

    return run


def branches(result: GenerationResult, texts: Sequence[str], tokenizer: TaskTokenizer) -> int:
    trie = LabelTrie.of([[*one, EOS] for one in tokenizer.encode_outputs(texts)])
    return int(np.count_nonzero(~trie.forced_in(ids(result.tokens))))


def totals_of(records: Sequence[StepRecord]) -> EngineTotals:
    totals = EngineTotals(len(SOURCES), 16)
    for record in records:
        totals.add(record)
    return totals


DECIDED = ("alarm set", "play music", "friday")  # the first token decides
DEEP = ("alarm set now", "alarm set later", "alarm off now", "alarm off later", "play", "play it")
SHARED = ("intent: alarm", "intent: play", "intent: friday")


@pytest.mark.parametrize("texts", [DECIDED, DEEP, SHARED])
def test_undrafted_labels_take_one_forward_pass_per_branch(answered, tokenizer, texts) -> None:
    results, records = answered(requests(texts, 6), draft=False)
    for result in results:
        assert result.text in texts
        assert result.acceptance.steps == max(branches(result, texts, tokenizer), 1)
    totals = totals_of(records)
    assert totals.emitted_tokens == sum(len(result.tokens) for result in results)
    assert totals.emitted_tokens == totals.row_steps + totals.forced_tokens


def test_labels_decided_by_the_first_token_are_not_drafted(answered) -> None:
    asked = requests(DECIDED, 8)
    plain, _ = answered(asked, draft=False)
    drafted, records = answered(asked, proposer=known(plain))
    assert [r.tokens for r in drafted] == [r.tokens for r in plain]
    assert all(result.acceptance.steps == 1 for result in drafted)
    assert sum(int(r.drafted.sum()) + r.carried_tokens for r in records) == 0


def test_correct_draft_completes_the_answer_in_the_prompt_forward(answered, tokenizer) -> None:
    asked = requests(DEEP, 8)
    plain, _ = answered(asked, draft=False)
    assert max(result.acceptance.steps for result in plain) > 1
    drafted, records = answered(asked, proposer=known(plain))
    totals = totals_of(records)
    assert [r.tokens for r in drafted] == [r.tokens for r in plain]
    assert all(result.acceptance.steps == 1 for result in drafted)
    # Each branch but the last is a draft token, which is accepted; forced tokens count as neither.
    expected = sum(branches(result, DEEP, tokenizer) - 1 for result in plain)
    assert (totals.drafted.sum(), totals.accepted.sum()) == (expected, expected)
    assert sum(sum(r.acceptance.accepted) for r in drafted) == expected
    assert sum(sum(r.acceptance.drafted) for r in drafted) == expected
    assert totals.emitted_tokens == sum(len(result.tokens) for result in drafted)
    assert sum(record.carried_kept for record in records) == sum(r.carried_tokens for r in records)


def test_tokens_that_all_labels_share_are_prefilled_with_the_prompt(answered, tokenizer) -> None:
    asked = requests(SHARED, 4)
    plain, records = answered(asked, draft=False)
    assert all(result.acceptance.steps == 1 for result in plain)
    assert sum(r.prompt_tokens + r.shared_tokens for r in records) == sum(
        len(request.prompt) for request in asked
    )
    (first,) = {result.tokens[0] for result in plain}
    resumed, _ = answered([replace(a, committed_ids=(first,)) for a in asked], draft=False)
    assert [r.tokens for r in resumed] == [r.tokens for r in plain]
    assert all(result.acceptance.steps == 1 for result in resumed)
    assert all(result.committed == 1 for result in resumed)


@pytest.mark.parametrize("stream", [True, False])
def test_request_that_fails_in_its_first_step_outputs_its_forced_tokens(
    make_engine, monkeypatch, stream: bool
) -> None:
    engine = make_engine()
    for name in ("start_tokens", "start_logits"):
        monkeypatch.setattr(Target, name, failing(OutOfMemory("it did not fit")))
    engine.submit(requests(SHARED, 1, stream=stream)[0])
    deltas = [delta for _ in range(2) for delta in engine.step()]
    (result,) = (delta.result for delta in deltas if delta.result)
    assert (result.finish_reason, result.error) == ("error", "it did not fit")
    assert result.text
    assert "".join(delta.text for delta in deltas) == result.text
    assert tuple(token for delta in deltas for token in delta.tokens) == result.tokens


def test_request_for_logprobs_takes_a_forward_pass_per_token(answered) -> None:
    asked = requests(DEEP, 4, logprobs=1)
    plain, records = answered(asked, draft=False)
    assert all(result.acceptance.steps == len(result.tokens) for result in plain)
    drafted, records = answered(asked, proposer=known(plain))
    for ours, expected in zip(drafted, plain, strict=True):
        values = [entry.logprob for entry in expected.logprobs]
        assert [entry.logprob for entry in ours.logprobs] == pytest.approx(values)
    assert totals_of(records).forced_tokens == 0
    assert totals_of(records).accepted.sum() > 0


def test_forced_tokens_of_a_schema_do_not_count_as_drafted(answered) -> None:
    schema = json.dumps(
        {"type": "object", "properties": {"name": {"enum": ["alarm_set", "play_music"]},
         "n": {"enum": [1, 2]}}, "required": ["name", "n"], "additionalProperties": False,
         "x-guidance": {"whitespace_flexible": False}}
    )  # fmt: skip
    guide = GuideSpec("json_schema", text=schema)
    asked = [replace(request, guide=guide, max_tokens=50) for request in requests(("a",), 4)]
    plain, _ = answered(asked, draft=False)
    assert all(json.loads(result.text) for result in plain)
    drafted, records = answered(asked, proposer=known(plain))
    totals, steps = totals_of(records), sum(r.acceptance.steps for r in plain)
    assert [r.tokens for r in drafted] == [r.tokens for r in plain]
    # Every forward that plain answers take is one token that no guide forces.
    assert steps == sum(len(r.tokens) for r in plain) - _forced(plain, totals, drafted)
    assert totals.row_steps + totals.accepted.sum() == steps
    assert totals.accepted.sum() > 0
    assert sum(record.carried_kept for record in records) > 0


def _forced(plain, totals: EngineTotals, drafted) -> int:
    assert totals.emitted_tokens == sum(len(r.tokens) for r in drafted)
    return totals.forced_tokens


@settings(deadline=None)
@given(trees, label_sets, st.integers(0, 2), st.booleans())
@example(((1, 1, 1), (-1, 0, -1)), [[1, 1], [1, 1, 1]], 0, True)  # the same token twice
def test_draft_keeps_tokens_that_can_save_a_forward_pass(tree, labels, emitted, forces) -> None:
    tokens, parents = tree
    guide = guide_of(labels)
    guide.advance(ids(labels[0][:emitted]))
    may = partial(next_tokens, labels)
    begun = tuple(labels[0][:emitted])
    paths: list[tuple[int, ...]] = []
    above: list[set[int]] = []  # each node and its ancestors
    for token, parent in zip(tokens, parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else begun), token))
        above.append({len(above), *(above[parent] if parent >= 0 else ())})
    allowed = [all(p[n] in may(p[:n]) for n in range(len(begun), len(p))) for p in paths]
    useful = [
        ok and (not forces or any(
            o and n in own and len(may(q)) > 1
            for o, q, own in zip(allowed, paths, above, strict=True)
        ))
        for n, ok in enumerate(allowed)
    ]  # fmt: skip
    found = follow([guide], forest([parents], [tokens]), [forces])
    kept = [p for p, ok in zip(paths, useful, strict=True) if ok]
    assert found.drafts.tokens.tolist() == [path[-1] for path in kept]
    is_forced = [source == FORCED for source in found.drafts.source]
    assert is_forced == [forces and len(may(p[:-1])) == 1 for p in kept]
    for place, path in enumerate([begun, *kept]):
        options = may(path)
        assert tokens_of(found.allowed.masks[found.allowed.mask_of[place]]) == options
        if found.allowed.only is not None:
            only = int(found.allowed.only[place])
            assert only == (min(options) if forces and len(options) == 1 else -1)


def test_draft_parts_are_left_out_if_their_cost_exceeds_their_gain() -> None:
    """A guide without labels, with three successive branches of falling probability."""
    labels = [[1, 2, 31], [1, 2, 32], [1, 31], [2]]
    guide = Mock(wraps=guide_of(labels), words=3, labels=None)
    drafts = replace(forest([(-1, 0)], [(1, 2)]), logp=np.log(np.float32([0.8, 0.2])))
    sizes = [len(follow([guide], drafts, [True], price).drafts.tokens) for price in (0.0, 0.3, 0.9)]
    assert sizes == [2, 1, 0]
