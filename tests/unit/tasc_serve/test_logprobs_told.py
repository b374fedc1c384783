"""Log-probabilities in OpenAI's shapes, each token told once, whole or streamed."""

import json
import math

import fake_backend
import pytest
from fake_backend import COMPLETIONS, GOOD, FakeBackend, Service, answer
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tasc_runtime.protocol import Piece, TokenText
from tasc_serve.http.responses import chat_logprobs, completion_logprobs

COMPLETION = (COMPLETIONS, GOOD[COMPLETIONS] | {"logprobs": 2})
CHAT = (fake_backend.CHAT, GOOD[fake_backend.CHAT] | {"logprobs": True, "top_logprobs": 2})
TEXTS = ("naïve", "", "東京 🙂")
TOKENS = ["na", "ïve", "", "", "東京", " 🙂"]
OFFSETS = [0, 2, 5, 5, 5, 7]


def ask(asked, pieces, **more):
    path, body = asked
    response = Service(FakeBackend(*pieces)).ask("POST", path, json=body | more)
    assert response.status_code == 200, response.text
    if not more.get("stream"):
        return response.json()
    *lines, _, _ = response.text.split("\n\n")
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def test_a_completion_has_columns_of_its_tokens():
    parsed = Completion.model_validate(ask(COMPLETION, answer(*TEXTS, logprobs=2)))
    told = parsed.choices[0].logprobs
    assert (told.tokens, told.text_offset) == (TOKENS, OFFSETS)
    assert told.token_logprobs == [-0.25, -0.5] * 3
    assert told.top_logprobs[0] == {"a": -1.0, "b": -2.0, "na": -0.25}, "the chosen one is there"


def test_a_completion_asked_for_none_beside_the_chosen_has_no_others():
    told = ask((COMPLETION[0], COMPLETION[1] | {"logprobs": 0}), answer("yes", logprobs=0))
    assert told["choices"][0]["logprobs"]["top_logprobs"] is None
    assert told["choices"][0]["logprobs"]["tokens"] == ["y", "es"]


def test_a_chat_has_rows_of_its_tokens():
    content = ask(CHAT, answer(*TEXTS, logprobs=2))
    rows = ChatCompletion.model_validate(content).choices[0].logprobs.content
    assert [r.token for r in rows] == TOKENS
    assert bytes(b for r in rows for b in r.bytes).decode() == "".join(TEXTS)
    assert [r.logprob for r in rows] == [-0.25, -0.5] * 3
    assert [(t.token, t.logprob, t.bytes) for t in rows[0].top_logprobs] == [
        ("a", -1.0, [97]),
        ("b", -2.0, [98]),
    ]


@pytest.mark.parametrize("asked", [COMPLETION, CHAT], ids=["completion", "chat"])
def test_who_does_not_ask_is_told_none(asked):
    path, body = asked
    body = {k: v for k, v in body.items() if not k.endswith("logprobs")}
    assert ask((path, body), answer(*TEXTS))["choices"][0]["logprobs"] is None
    chunks = ask((path, body), answer(*TEXTS), stream=True)
    assert [c["choices"][0]["logprobs"] for c in chunks] == [None, None]


def test_streamed_tokens_are_told_once_each_also_where_text_is_held_back():
    first, held, last = answer(*TEXTS, logprobs=2)
    assert not held.text
    chunks = ask(COMPLETION, [first, held, last], stream=True)
    told = [c["choices"][0]["logprobs"] for c in chunks]
    assert [t["tokens"] for t in told] == [TOKENS[:2], TOKENS[2:]]
    assert [offset for t in told for offset in t["text_offset"]] == OFFSETS
    rows = [
        row
        for chunk in ask(CHAT, [first, held, last], stream=True)
        for row in ChatCompletionChunk.model_validate(chunk).choices[0].logprobs.content
    ]
    assert [r.token for r in rows] == TOKENS


@pytest.mark.parametrize("asked", [COMPLETION, CHAT], ids=["completion", "chat"])
def test_an_end_without_a_token_of_its_own_tells_none(asked):
    first, last = answer("yes", "", logprobs=1)
    chunks = ask(asked, [first, Piece("", (), last.result)], stream=True)
    assert chunks[-1]["choices"][0]["logprobs"] is None
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_an_answer_that_ends_at_once_has_empty_columns_and_rows():
    (only,) = answer("")
    told = ask(COMPLETION, [only])["choices"][0]["logprobs"]
    assert (told["tokens"], told["text_offset"]) == ([], [])
    assert ask(CHAT, [only])["choices"][0]["logprobs"] == {"content": []}


def test_parts_of_characters_are_told_apart_and_what_cannot_be_is_a_number():
    half = TokenText(b"\xf0\x9f", -math.inf, 0, ((b"\x99\x82", -1.0),))
    told = completion_logprobs([half])
    assert told["tokens"] == ["bytes:\\xf0\\x9f"]
    assert told["top_logprobs"] == [{"bytes:\\xf0\\x9f": -9999.0, "bytes:\\x99\\x82": -1.0}]
    (row,) = chat_logprobs([half])["content"]
    assert (row["bytes"], row["logprob"]) == ([0xF0, 0x9F], -9999.0)
    assert json.loads(json.dumps(told, allow_nan=False)) == told


def test_of_two_tokens_with_one_text_the_likelier_is_told():
    told = completion_logprobs([TokenText(b"a", -2.0, 0, ((b"a", -0.5), (b"a", -1.0)))])
    assert told["top_logprobs"] == [{"a": -0.5}]
    told = completion_logprobs([TokenText(b"a", -0.5, 0, ((b"b", -1.0), (b"a", -3.0)))])
    assert told["top_logprobs"] == [{"b": -1.0, "a": -0.5}]
