"""Cases of `litellm`: the functions of its SDK, a router, and its errors."""

import asyncio
from typing import Any, Literal

import litellm
from cases import ANSWER, API, INPUT, KEY, MESSAGES, MODEL, PROMPT, TOOL, USER, case, run
from pydantic import BaseModel

WHERE: Any = {"model": f"openai/{MODEL}", "api_base": API, "api_key": KEY}
ASKS: Any = {**WHERE, "messages": MESSAGES}
sdk: Any = litellm


class Light(BaseModel):
    room: Literal["kitchen", "bedroom"]


def text(call: Any = sdk.completion, **fields: Any) -> Any:
    return call(**{**ASKS, **fields}).choices[0].message.content


async def at_once() -> list[str]:
    whole = await sdk.acompletion(**ASKS)
    stream = await sdk.acompletion(stream=True, **ASKS)
    parts = [part.choices[0].delta.content or "" async for part in stream]
    return [whole.choices[0].message.content, "".join(parts)]


def streamed() -> str:
    parts = sdk.completion(stream=True, **ASKS)
    return "".join(part.choices[0].delta.content or "" for part in parts)


def batched() -> list[Any]:
    answers = sdk.batch_completion(messages=[[USER], MESSAGES], **WHERE)
    return [each.choices[0].message.content for each in answers]


def routed() -> Any:
    models = [{"model_name": "intents", "litellm_params": WHERE}]
    return text(sdk.Router(model_list=models, num_retries=2).completion, model="intents")


case("completion", text)
case("streaming", streamed)
case("async completion", lambda: asyncio.run(at_once()), [ANSWER] * 2)
case("as hosted_vllm", lambda: text(model=f"hosted_vllm/{MODEL}"))
case("text completion", lambda: sdk.text_completion(prompt=PROMPT, **WHERE).choices[0].text)
case("responses", lambda: sdk.responses(input=INPUT, **WHERE).output[-1].content[0].text)
case("structured output", lambda: Light.model_validate_json(text(response_format=Light)), Light)
case("json mode", lambda: text(response_format={"type": "json_object"}, max_tokens=99)[0], "{")
case("batch completion", batched, [ANSWER] * 2)
case("router with retries", routed)
case("logprobs", lambda: sdk.completion(logprobs=True, **ASKS).choices[0].logprobs.content, True)
case("usual fields", lambda: text(seed=1, temperature=0, user="u", max_tokens=64))
case("unknown model", lambda: text(model="openai/none"), litellm.NotFoundError)
case("tools are refused by name", lambda: text(tools=[TOOL]), litellm.BadRequestError, "tools")
case("timeout", lambda: text(timeout=0.0001, max_retries=0), litellm.Timeout)

run()
