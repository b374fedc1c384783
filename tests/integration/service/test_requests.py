"""Everything a request can ask for, by the official client, over the running service."""

import json
import re
from collections import defaultdict

import pytest
import torch
from openai import BadRequestError
from serving import ALPHA, BETA

import tiny

pytestmark = [pytest.mark.ray, pytest.mark.redis]

TEXT = tiny.SENTENCES[0]
SAMPLED = {"temperature": 1.0, "seed": 7}
SCHEMA = {
    "type": "object",
    "properties": {"intent": {"enum": ["alarm", "music"]}, "sure": {"type": "boolean"}},
    "required": ["intent", "sure"],
    "additionalProperties": False,
}
RESPONSE_FORMAT = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA}}
CHOICES = ["wake up", "wake me", "play music", "nine"]
# Name: fields of the client, fields that it passes through.
ASKS = {
    "sampled": (SAMPLED, {}),
    "a few likely ones": ({**SAMPLED, "top_p": 0.8}, {"top_k": 20, "min_p": 0.02}),
    "penalised": ({"presence_penalty": 1.5, "frequency_penalty": 0.5}, {"repetition_penalty": 1.2}),
    "penalised and sampled": ({**SAMPLED, "presence_penalty": 2}, {"repetition_penalty": 1.5}),
    "biased": ({**SAMPLED, "logit_bias": {"5": 20, "9": -50}}, {}),
    "stopped": ({**SAMPLED, "stop": ["a", "e"]}, {}),
    "one of a few": ({}, {"guided_choice": CHOICES}),
    "one of a few, sampled": (SAMPLED, {"guided_choice": CHOICES}),
    "by a pattern": (SAMPLED, {"guided_regex": "[a-f]{3,9}(, [0-9]{2}){0,2}"}),
    "by a schema": (SAMPLED, {"guided_json": SCHEMA}),
    "by a grammar": (SAMPLED, {"guided_grammar": 'start: ("ab" | "ba") start | "c"'}),
    "beyond the end": ({}, {"ignore_eos": True}),
}
every_ask = pytest.mark.parametrize("name", ASKS)


@pytest.fixture(scope="module")
def client(service):
    with service.client() as client:
        yield client


def complete(client, *, task=ALPHA, chat=False, extra=None, **fields):
    """A whole answer, or with ``stream`` the chunks of one."""
    body = {"model": task, "max_tokens": 60, "extra_body": extra or {}, **fields}
    if chat:
        messages = [{"role": "user", "content": TEXT}]
        return client.chat.completions.create(messages=messages, **body)
    return client.completions.create(prompt=TEXT, **body)


def said(answered):
    """Text and end of each choice, in order."""
    return [
        (c.text if hasattr(c, "text") else c.message.content, c.finish_reason)
        for c in answered.choices
    ]


def streamed(chunks):
    """The same of a stream."""
    texts, reasons = defaultdict(str), {}
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.text if hasattr(choice, "text") else choice.delta.content
            if choice.finish_reason:
                assert choice.index not in reasons
                reasons[choice.index] = choice.finish_reason
    return [(texts[i], reasons[i]) for i in sorted(texts)]


def utf8(name):
    """The bytes of a token as completions name it."""
    parts = name.removeprefix("bytes:")
    return bytes.fromhex(parts.replace("\\x", "")) if parts != name else name.encode()


def ids_told(service, answered):
    """The ids of alpha's answer, by the bytes of its tokens."""
    tokenizer = service.tasks[ALPHA].tokenizer
    ids = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    return [ids[utf8(name)] for name in answered.choices[0].logprobs.tokens]


@every_ask
@pytest.mark.parametrize("chat", [False, True])
def test_the_answer_is_the_same_again_without_drafts_and_streamed(client, name, chat):
    fields, extra = ASKS[name]
    for task in (ALPHA, BETA):
        asked = {"task": task, "chat": chat, **fields}
        want = said(complete(client, extra=extra, **asked))
        assert said(complete(client, extra=extra, **asked)) == want
        assert said(complete(client, extra={**extra, "draft": False}, **asked)) == want
        assert streamed(complete(client, extra=extra, stream=True, **asked)) == want


def test_another_seed_is_another_answer_and_without_one_they_differ(client):
    def answers(seeds):
        fields = [{} if seed is None else {"seed": seed} for seed in seeds]
        return {said(complete(client, temperature=1.0, **f))[0][0] for f in fields}

    assert len(answers([-1, 0, 1, 2**63 - 1])) > 1
    assert len(answers([None] * 4)) > 1


def test_several_answers_differ_are_the_same_streamed_and_equal_at_temperature_0(client):
    asked = {"n": 3, "temperature": 1.0, "seed": 3}
    whole = complete(client, **asked)
    assert len({text for text, _ in said(whole)}) == 3
    assert whole.usage.prompt_tokens == complete(client).usage.prompt_tokens
    assert whole.model_extra["metrics"] is None
    assert [c.index for c in whole.choices] == [0, 1, 2]
    for more in ({}, {"draft": False}):
        assert streamed(complete(client, stream=True, extra=more, **asked)) == said(whole)
    assert said(complete(client, temperature=1.0, seed=3)) == said(whole)[:1]
    assert len(set(said(complete(client, n=3)))) == 1


def test_guides_hold(client):
    def text(**extra):
        ((found, reason),) = said(complete(client, extra=extra, **SAMPLED))
        assert reason == "stop"
        return found

    assert text(guided_choice=CHOICES) in CHOICES
    assert re.fullmatch("[0-9]{3,5}", text(guided_regex="[0-9]{3,5}"))
    assert re.fullmatch("((ab|ba)*c)", text(guided_grammar='start: ("ab" | "ba") start | "c"'))
    for fields in ({"extra_body": {"guided_json": SCHEMA}}, {"response_format": RESPONSE_FORMAT}):
        messages = [{"role": "user", "content": TEXT}]
        answered = client.chat.completions.create(
            model=ALPHA, messages=messages, max_tokens=200, **SAMPLED, **fields
        )
        found = json.loads(answered.choices[0].message.content)
        assert list(found) == ["intent", "sure"]
        assert found["intent"] in ("alarm", "music")
        assert isinstance(found["sure"], bool)


def test_biased_tokens_are_forced_and_forbidden(service, client):
    tokenizer = service.tasks[ALPHA].tokenizer
    first, *_ = ids_told(service, complete(client, logprobs=0))
    other = (first + 1) % 100 + 50
    forced = complete(client, max_tokens=3, logit_bias={str(other): 100, str(first): -100})
    assert said(forced) == [(tokenizer.decode([other] * 3), "length")]
    forbidden = complete(client, max_tokens=1, logit_bias={str(first): -100})
    assert said(forbidden)[0][0] != tokenizer.decode([first])


@pytest.mark.parametrize("fields", [{}, SAMPLED, {"presence_penalty": 1.0}], ids=str)
@pytest.mark.parametrize("draft", [True, False])
def test_logprobs_are_the_models_own_one_for_each_token(service, client, fields, draft):
    task = service.tasks[ALPHA]
    answered = complete(client, logprobs=3, extra={"draft": draft}, **fields)
    (choice,) = answered.choices
    told = choice.logprobs
    spoken = [utf8(name) for name in told.tokens]
    assert b"".join(spoken).decode(errors="replace") == choice.text
    ended = answered.usage.completion_tokens - len(spoken)
    assert ended == (choice.finish_reason == "stop"), "the end of sequence is not told"
    ids = ids_told(service, answered)
    prompt = task.prompt(TEXT, chat=False)
    with torch.inference_mode():
        logits = task.model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 :]
    own = logits[: len(ids)].log_softmax(-1)
    found = torch.tensor(told.token_logprobs, dtype=own.dtype)
    chosen = own[torch.arange(len(ids)), torch.tensor(ids)]
    torch.testing.assert_close(found, chosen, atol=1e-5, rtol=1e-5)
    for top, likeliest in zip(told.top_logprobs, own.topk(3).values, strict=True):
        values = sorted(top.values(), reverse=True)[:3]
        assert values == pytest.approx(likeliest.tolist(), abs=1e-5)
    assert told.text_offset == sorted(told.text_offset)
    for name, offset in zip(told.tokens, told.text_offset, strict=True):
        assert name.startswith("bytes:") or choice.text[offset:].startswith(name)


def test_streamed_logprobs_are_those_of_the_whole(client):
    asked = {"chat": True, "logprobs": True, "top_logprobs": 2, "stop": ["zz", "e"], **SAMPLED}
    whole = complete(client, **asked).choices[0].logprobs.content
    rows = [
        row
        for chunk in complete(client, stream=True, **asked)
        for choice in chunk.choices
        for row in (choice.logprobs.content if choice.logprobs else [])
    ]
    assert len(rows) > 0
    assert [r.token for r in rows] == [r.token for r in whole]
    assert [r.logprob for r in rows] == pytest.approx([r.logprob for r in whole], abs=1e-6)
    assert all(len(r.top_logprobs) == 2 for r in rows)


def test_metrics_say_how_it_went(service, client):
    answered = complete(client, extra={"metrics": "detailed"})
    told = answered.model_extra["metrics"]
    drafts = told["speculative_decoding"]
    assert told["draft_index_version"] == service.status(ALPHA)["index_version"]
    assert told["generation_time_ms"] >= 0
    assert told["time_to_first_token_ms"] > 0
    assert drafts["num_spec_steps"] == len(drafts["per_step_drafted"]) > 0
    assert drafts["num_accepted_draft_tokens"] < answered.usage.completion_tokens
    plain = complete(client, extra={"draft": False}).model_extra["metrics"]
    assert plain["speculative_decoding"]["num_draft_tokens"] == 0
    assert "metrics" not in complete(client, extra={"metrics": "none"}).model_extra
    *_, last = complete(client, stream=True, stream_options={"include_usage": True})
    assert last.model_extra["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"logit_bias": {"999999": 1}}, "logit_bias"),
        ({"guided_regex": "(("}, "guided_regex"),
        ({"guided_json": {"type": "no such type"}}, "guided_json"),
        ({"guided_grammar": "this is no grammar"}, "guided_grammar"),
        ({"guided_choice": ["ok", ""]}, "guided_choice"),
        ({"guided_choice": ["wake me up at nine am on friday"], "max_tokens": 2}, "max_tokens"),
        ({"max_tokens": 510}, "prompt"),
        ({"adapter": "gone"}, "adapter"),
    ],
    ids=str,
)
def test_what_only_a_replica_can_tell_is_refused_by_name(client, fields, field):
    with pytest.raises(BadRequestError) as refused:
        complete(client, extra=fields)
    assert refused.value.param == field
    assert len(refused.value.message) > 20
