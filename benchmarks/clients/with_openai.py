"""Cases of the `openai` package for Python."""

import asyncio
import json
from typing import Any, Literal

import openai
from cases import ANSWER, API, INPUT, KEY, MESSAGES, MODEL, PROMPT, TOOL, USER, case, run
from openai import AsyncOpenAI, BadRequestError, OpenAI
from pydantic import BaseModel

client: Any = OpenAI(base_url=API, api_key=KEY)
hasty = client.with_options(timeout=0.0001, max_retries=1)
chat, responses = client.chat.completions, client.responses
THREE: Any = {"n": 3, "seed": 7, "temperature": 1.5}
CHANGES_NOTHING: Any = {
    "store": True, "metadata": {"run": "1"}, "service_tier": "auto", "user": "u",
    "safety_identifier": "s", "prompt_cache_key": "k", "reasoning_effort": "low",
    "verbosity": "low",
}  # fmt: skip


class Light(BaseModel, extra="forbid"):
    room: Literal["kitchen", "bedroom"]
    on: bool


SCHEMA = {"name": "light", "schema": Light.model_json_schema(), "strict": True}
FORMAT = {"type": "json_schema", "json_schema": SCHEMA}
ANY = {"type": "json_object"}


def ask(own: Any = client, **fields: Any) -> Any:
    return own.chat.completions.create(**{"model": MODEL, "messages": [USER], **fields})


def text(**fields: Any) -> Any:
    return ask(**fields).choices[0].message.content


def complete(**fields: Any) -> Any:
    fields = {"prompt": PROMPT, "max_tokens": 64, **fields}
    return client.completions.create(model=MODEL, **fields).choices


def respond(own: Any = client, **fields: Any) -> Any:
    return own.responses.create(**{"model": MODEL, "input": INPUT, **fields})


def parsed() -> Any:
    answer = chat.parse(model=MODEL, messages=MESSAGES, response_format=Light)
    return answer.choices[0].message.parsed


def streamed() -> tuple[str, str, bool]:
    *chunks, last = ask(stream=True, stream_options={"include_usage": True})
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    return said, chunks[-1].choices[0].finish_reason, last.usage.completion_tokens > 0


def events() -> str:
    with chat.stream(model=MODEL, messages=[USER]) as stream:
        assert "content.delta" in {event.type for event in stream}
        return str(stream.get_final_completion().choices[0].message.content)


async def at_once() -> list[str]:
    async with AsyncOpenAI(base_url=API, api_key=KEY) as own:
        stream = await ask(own, stream=True)
        said = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        answers = await asyncio.gather(*(ask(own) for _ in range(3)))
        whole = (await respond(own)).output_text
        return [said, whole, *(answer.choices[0].message.content for answer in answers)]


def json_mode() -> bool:
    choice = ask(response_format=ANY, max_tokens=128).choices[0]
    return choice.finish_reason == "length" or isinstance(json.loads(choice.message.content), dict)


def logprobs() -> bool:
    places = ask(logprobs=True, top_logprobs=3, max_tokens=5).choices[0].logprobs.content
    assert ANSWER.startswith("".join(place.token for place in places))
    return all(place.logprob <= 0 and len(place.top_logprobs) == 3 for place in places)


def echoed_logprobs() -> str:
    (found,) = complete(echo=True, logprobs=1, max_tokens=0)
    first, *others = found.logprobs.token_logprobs
    assert first is None
    assert all(other <= 0 for other in others)
    return "".join(found.logprobs.tokens)


def raw_response() -> str:
    raw = chat.with_raw_response.create(model=MODEL, messages=[USER])
    assert raw.headers["x-request-id"] == raw.parse()._request_id
    return str(raw.parse().choices[0].message.content)


def response_events() -> str:
    kinds, said = [], ""
    for event in respond(stream=True):
        kinds.append(event.type)
        said += event.delta if event.type == "response.output_text.delta" else ""
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed"), kinds
    with responses.stream(model=MODEL, input=INPUT) as stream:
        assert stream.until_done().get_final_response().output_text == said
    return said


def parsed_response() -> Any:
    return responses.parse(model=MODEL, input=INPUT, text_format=Light).output_parsed


def batch() -> str:
    body = {"model": MODEL, "messages": [USER]}
    line = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": body}
    file = client.files.create(file=("b.jsonl", json.dumps(line).encode()), purpose="batch")
    made = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    assert made.id in [each.id for each in client.batches.list()]
    client.batches.cancel(made.id)
    return str(made.status)


PIRATE = {"role": "developer", "content": "Talk like a pirate."}
EARLIER, VLLM = {"previous_response_id": "resp_1"}, {"structured_outputs": {"choice": ["sunny"]}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
IMAGES = [{"role": "user", "content": [IMAGE]}]
TURNS = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
PARTS = {"role": "user", "content": [{"type": "text", "text": INPUT}]}
INPUTS = [PIRATE, {"role": "user", "content": [{"type": "input_text", "text": INPUT}]}]
case("chat with a developer message", lambda: text(messages=[PIRATE, USER]))
case("system message", lambda: text(messages=MESSAGES))
case("earlier turns and text parts", lambda: text(messages=[*TURNS, PARTS]))
case("usage", lambda: ask().usage.completion_tokens > 0, True)
case("streaming with usage", streamed, (ANSWER, "stop", True))
case("streaming events", events)
case("async client", lambda: asyncio.run(at_once()), [ANSWER] * 5)
case("structured output", parsed, Light)
case("json schema", lambda: Light.model_validate_json(text(response_format=FORMAT)), Light)
case("json mode", json_mode, True)
case("structured outputs of vLLM", lambda: text(extra_body=VLLM), "sunny")
case("logprobs", logprobs, True)
case("length", lambda: ask(max_completion_tokens=1).choices[0].finish_reason, "length")
case("stop list", lambda: text(stop=[",", "\n"]), "intent: alarm_set")
case("n", lambda: [choice.index for choice in ask(**THREE).choices], [0, 1, 2])
case("seed", lambda: ask(**THREE).choices == ask(**THREE).choices, True)
case("penalties", lambda: text(logit_bias={"5": -9}, presence_penalty=1, top_p=0.9), True)
case("fields that change nothing", lambda: text(**CHANGES_NOTHING))
case("completions", lambda: complete()[0].text)
case("list of prompts", lambda: [c.text for c in complete(prompt=[PROMPT] * 2, n=2)], [ANSWER] * 4)
case("echo", lambda: complete(echo=True)[0].text, PROMPT + ANSWER)
case("echo with logprobs", echoed_logprobs, PROMPT)
case("list of models", lambda: MODEL in [model.id for model in client.models.list()], True)
case("one model", lambda: client.models.retrieve(MODEL).id, MODEL)
case("raw response and request id", raw_response)
case("unknown model", lambda: ask(model="none"), openai.NotFoundError, "none")
case("wrong value", lambda: ask(temperature=9), BadRequestError, "temperature")
case("misspelt field", lambda: ask(extra_body={"temprature": 0}), BadRequestError, "temperature")
case("tools are refused by name", lambda: ask(tools=[TOOL]), BadRequestError, "tools")
case("images are refused by name", lambda: text(messages=IMAGES), BadRequestError, "messages")
case("retries", lambda: ask(client.with_options(max_retries=5)).choices[0].message.content)
case("timeout", lambda: ask(hasty), openai.APITimeoutError)
case("responses", lambda: respond(instructions="Talk like a pirate.").output_text)
case("responses of messages", lambda: respond(input=INPUTS).output_text)
case("responses streamed", response_events)
case("responses with a schema", parsed_response, Light)
case("responses in json mode", lambda: respond(text={"format": ANY}).output_text[0], "{")
case("earlier response", lambda: respond(**EARLIER), BadRequestError, "previous_response_id")
case("files and batches", batch, "validating")  # no worker runs here

run()
