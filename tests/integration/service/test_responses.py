"""``/v1/responses`` by the official client: the answers are those of chats."""

import json

import pytest
from openai import BadRequestError
from serving import ALPHA, BETA

import tiny

pytestmark = [pytest.mark.ray, pytest.mark.redis]

SCHEMA = {
    "type": "object",
    "properties": {"intent": {"enum": ["alarm", "music"]}},
    "required": ["intent"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "name": "it", "schema": SCHEMA, "strict": True}
SAMPLED = {"temperature": 1.0, "extra_body": {"seed": 7}}


@pytest.fixture(scope="module")
def client(service):
    with service.client() as client:
        yield client


def chatted(client, task, text, **more):
    messages = [{"role": "user", "content": text}]
    (choice,) = client.chat.completions.create(model=task, messages=messages, **more).choices
    return choice.message.content, choice.finish_reason == "length"


@pytest.mark.parametrize("task", [ALPHA, BETA])
@pytest.mark.parametrize("rule", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_answers_whole_and_streamed_are_those_of_chats(client, task, rule):
    for text in tiny.SENTENCES[:4]:
        for most in (3, 40):
            expected = chatted(client, task, text, max_tokens=most, **rule)
            fields = {"model": task, "input": text, "max_output_tokens": most, **rule}
            found = client.responses.create(**fields)
            assert (found.output_text, found.status == "incomplete") == expected
            *events, end = client.responses.create(**fields, stream=True)
            said = "".join(e.delta for e in events if e.type == "response.output_text.delta")
            last = end.response
            assert said == last.output_text == expected[0]
            assert (last.usage, last.status) == (found.usage, found.status)


def test_a_schema_holds_and_tokens_are_told(client):
    found = client.responses.create(
        model=ALPHA, input=tiny.SENTENCES[0], text={"format": FORMAT}, top_logprobs=2,
        include=["message.output_text.logprobs"], max_output_tokens=60,
    )  # fmt: skip
    assert json.loads(found.output_text)["intent"] in ("alarm", "music")
    (part,) = found.output[0].content
    told = "".join(token.token for token in part.logprobs)
    assert told.strip() == found.output_text  # some tokenizers begin an answer with a blank


def test_a_conversation_that_is_sent_back_is_taken(client):
    first = client.responses.create(model=ALPHA, input=tiny.SENTENCES[0], max_output_tokens=9)
    turns = [{"role": "user", "content": tiny.SENTENCES[0]}, *first.output]
    asked = {"role": "user", "content": tiny.SENTENCES[1]}
    found = client.responses.create(
        model=ALPHA, input=[*turns, asked], max_output_tokens=9, instructions="be brief"
    )
    assert found.output_text == chatted(client, ALPHA, tiny.SENTENCES[1], max_tokens=9)[0]


def test_earlier_responses_are_refused_by_name(client):
    with pytest.raises(BadRequestError) as refused:
        client.responses.create(model=ALPHA, input="a", previous_response_id="resp_1")
    assert refused.value.param == "previous_response_id"
