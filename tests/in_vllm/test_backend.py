"""`LLM` with ``backend="vllm"`` against our engine and against vLLM alone, on the demo's model."""

import gzip
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from support import eventually
from tasc_draft import DraftSettings
from tasc_protocol import GuideSpec, Request
from tasc_serve import LLM

DEMO = Path(__file__).parents[2] / "pipelines" / "tasc_jobs" / "demo"
MODEL, ADAPTERS = DEMO / "tasc-demo-7m", DEMO / "adapters"
SIZES = {"rows": 4, "max_model_len": 256, "max_tokens": 32}
VLLM = {"backend": "vllm", "vllm": {"enforce_eager": True}}
DRAFT = DraftSettings(min_prob=0.05, recent_tokens=0)

# vLLM itself, without anything of ours but the token ids.
ALONE = """
import json, sys
from vllm import LLM, SamplingParams
model, prompts = sys.argv[1], json.loads(sys.argv[2])
llm = LLM(model, dtype="float32", max_model_len=256, max_num_seqs=4, enforce_eager=True)
params = SamplingParams(temperature=0.0, max_tokens=32)
found = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
print("answers", json.dumps([list(one.outputs[0].token_ids) for one in found]))
"""


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    with gzip.open(DEMO / "data" / "massive_en.train.jsonl.gz", "rt", encoding="utf-8") as lines:
        return [json.loads(line) for _, line in zip(range(240), lines, strict=False)]


@pytest.fixture(scope="module")
def inputs(rows: list[dict[str, Any]]) -> list[str]:
    return [row["input"] for row in rows[200:]]


@pytest.fixture(scope="module")
def ours() -> LLM:
    return LLM(MODEL, cost_aware=False, **SIZES)


@pytest.fixture(scope="module")
def llm(rows: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> LLM:
    cache = tmp_path_factory.mktemp("cache")
    return LLM(MODEL, corpus=rows[:200], draft=DRAFT, cache_dir=cache, **SIZES, **VLLM)


def test_greedy_answers_are_those_of_vllm_alone(llm: LLM, inputs: list[str]) -> None:
    answers = llm.generate(inputs)
    assert 0 < sum(a.accepted for a in answers) < sum(a.drafted for a in answers)
    prompts = [llm.tokenizer.encode_prompt(text) for text in inputs]
    done = subprocess.run(
        [sys.executable, "-c", ALONE, MODEL, json.dumps(prompts)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("answers "))
    assert [list(answer.tokens) for answer in answers] == json.loads(line.partition(" ")[2])


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"draft": False},
        {"stop": ["e"]},
        {"stop": ["ent"], "include_stop_str_in_output": True},
        {"ignore_eos": True},
        {"min_tokens": 20},
        {"stop_token_ids": [199]},
        {"repetition_penalty": 1.3},
        {"frequency_penalty": 0.7, "presence_penalty": 0.3},
        {"guided_choice": ["play music", "set an alarm", "tell the news"]},
        {"guided_regex": "[a-c]{3,5}"},
        {"guided_json": {"type": "object", "properties": {"a": {"type": "integer"}}}},
        {"guided_grammar": 'start: "yes" | "no" WORD\nWORD: /[a-z]+/'},
    ],
    ids=str,
)
def test_answers_follow_the_same_rules_as_with_our_engine(
    ours: LLM, llm: LLM, inputs: list[str], more: dict[str, Any]
) -> None:
    expected, found = ours.generate(inputs[:12], **more), llm.generate(inputs[:12], **more)
    for name in ("text", "tokens", "finish_reason", "prompt_tokens"):
        assert [getattr(a, name) for a in found] == [getattr(a, name) for a in expected]
    assert more.get("draft", True) or not sum(a.drafted for a in found)


def test_logprobs_are_those_of_our_engine(ours: LLM, llm: LLM, inputs: list[str]) -> None:
    answered = (each.generate(inputs[:4], logprobs=3) for each in (ours, llm))
    for mine, theirs in zip(*answered, strict=True):
        assert [one.utf8 for one in theirs.logprobs] == [one.utf8 for one in mine.logprobs]
        for a, b in zip(mine.logprobs, theirs.logprobs, strict=True):
            assert b.logprob == pytest.approx(a.logprob, abs=1e-3)
            assert [id_ for id_, _ in b.top] == [id_ for id_, _ in a.top]
    prompt = tuple(ours.tokenizer.encode_prompt(inputs[0]))
    echoed = Request("e", prompt, 4, echo=True, logprobs=2)
    (mine,), (theirs,) = (list(each.engine.generate([echoed])) for each in (ours, llm))
    assert len(theirs.logprobs) == len(prompt) - 1 + len(theirs.tokens)
    for a, b in zip(mine.logprobs, theirs.logprobs, strict=True):
        assert (b.token, b.logprob) == (a.token, pytest.approx(a.logprob, abs=1e-3))


def result_of(llm: LLM, request: Request) -> Any:
    (found,) = llm.engine.generate([request])
    return found


def test_broken_off_answers_are_completed(llm: LLM, inputs: list[str]) -> None:
    """A guide and counted penalties make vLLM repeat the tokens that were already sent."""
    prompt = tuple(llm.tokenizer.encode_prompt(inputs[0]))
    for more in (
        {},
        {"parameters": {"frequency_penalty": 0.5}},
        {"guide": GuideSpec("regex", text="[a-z ]{10,30}")},
        {"guide": GuideSpec("choice", ("play music", "set an alarm"))},
        {"min_tokens": 12},
    ):
        request = Request("a", prompt, 24, **more)
        whole = result_of(llm, request)
        begun = structs.replace(request, committed_ids=whole.tokens[: len(whole.tokens) // 2])
        rest = result_of(llm, begun)
        assert (rest.tokens, rest.text, rest.error) == (whole.tokens, whole.text, None), more


def test_guide_that_fails_ends_its_answer_with_an_error(llm: LLM, inputs: list[str]) -> None:
    prompt = tuple(llm.tokenizer.encode_prompt(inputs[0]))
    request = Request("a", prompt, 24, guide=GuideSpec("regex", text="[a-c ]{10,40}"))
    assert result_of(llm, request).error is None
    llm.engine.submit(request)
    outputs = [*llm.engine.step(), *llm.engine.step()]
    assert any(output.tokens for output in outputs)
    (held,) = llm.engine._llm.engine_core.engine_core.scheduler.requests.values()
    matcher = held.structured_output_request.grammar.ll_matcher
    assert not matcher.consume_token(llm.tokenizer.encode_prompt("z")[-1])
    while llm.engine.running or llm.engine.waiting:
        outputs += llm.engine.step()
    result = outputs[-1].result
    assert result
    assert result.finish_reason == "error"
    assert result.error


def test_sampled_answers_differ_and_stay_within_the_rule(llm: LLM, inputs: list[str]) -> None:
    several = llm.generate(inputs[0], n=4, temperature=1.0, seed=5)
    assert len({answer.text for answer in several}) > 1
    likeliest = llm.generate(inputs[0], n=4, temperature=1.0, top_k=1, seed=5)
    assert {answer.text for answer in likeliest} == {llm.generate(inputs[0])[0].text}


def test_greedy_answers_beside_sampled_ones_are_the_same(llm: LLM, inputs: list[str]) -> None:
    greedy = [
        Request(f"{n}", tuple(llm.tokenizer.encode_prompt(text)), 24)
        for n, text in enumerate(inputs)
    ]
    rule = {"temperature": 1.0, "top_k": 5}
    sampled = [structs.replace(one, id=f"s{one.id}", parameters=rule) for one in greedy]
    expected = {one.id: one.tokens for one in llm.engine.generate(greedy)}
    mixed = [one for pair in zip(greedy, sampled, strict=True) for one in pair]
    found = {one.id: one for one in llm.engine.generate(mixed)}
    assert {id_: found[id_].tokens for id_ in expected} == expected
    assert sum(sum(found[one.id].acceptance.accepted) for one in sampled) > 0


def test_stream_and_summary(llm: LLM, inputs: list[str]) -> None:
    assert "".join(llm.stream(inputs[0])) == llm.generate(inputs[0])[0].text
    found = llm.summary()
    assert found.accepted_by_source.keys() == {"vllm"}
    assert found.draft_seconds > 0 < found.verify_seconds
    assert found.tokens_per_step > 1


def steps(llm: LLM, texts: Sequence[str]) -> int:
    return sum(answer.steps for answer in llm.generate(texts))


def test_another_index_is_drafted_from_soon(
    llm: LLM, ours: LLM, inputs: list[str], tmp_path: Path
) -> None:
    answers = zip(inputs, ours.generate(inputs), strict=True)
    known = [(text, answer.text) for text, answer in answers if answer.text.strip()]
    index = LLM(MODEL, corpus=known, cache_dir=tmp_path, cost_aware=False, **SIZES).index
    before, old = steps(llm, inputs), llm.index
    llm.draft_from(index)
    eventually(lambda: steps(llm, inputs) < 0.7 * before, pause_s=0.1)
    llm.draft_from(old, DRAFT)
    eventually(lambda: steps(llm, inputs) > 0.9 * before, pause_s=0.1)


def test_adapters_are_chosen_by_request(inputs: list[str]) -> None:
    places = {place.name: place for place in sorted(ADAPTERS.iterdir()) if place.is_dir()}
    assert len(places) > 1
    mine = LLM(MODEL, adapters=places, cost_aware=False, **SIZES)
    theirs = LLM(MODEL, adapters=places, **SIZES, **VLLM)
    for name in places:
        expected, found = (each.generate(inputs[:8], adapter=name) for each in (mine, theirs))
        assert [answer.text for answer in found] == [answer.text for answer in expected]
    first = next(iter(places))
    alone = LLM(MODEL, adapter=places[first], **SIZES, **VLLM).generate(inputs[:8])
    expected = mine.generate(inputs[:8], adapter=first)
    assert [answer.text for answer in alone] == [answer.text for answer in expected]
