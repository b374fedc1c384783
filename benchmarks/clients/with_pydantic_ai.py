"""Cases of `pydantic-ai`. Its default output mode sends tools, so the mode is named."""

import asyncio
from typing import Any, Literal

from cases import ANSWER, API, INPUT, KEY, MODEL, case, run
from pydantic import BaseModel
from pydantic_ai import Agent, ModelHTTPError, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

provider = OpenAIProvider(base_url=API, api_key=KEY)
model, responses = (
    kind(MODEL, provider=provider) for kind in (OpenAIChatModel, OpenAIResponsesModel)
)
agent = Agent(model, instructions="Be concise, reply with one sentence.")


class Light(BaseModel):
    room: Literal["kitchen", "bedroom"]


LIGHT, nobody = NativeOutput(Light), OpenAIChatModel("none", provider=provider)


def output(own: Any = model, message_history: Any = None, **fields: Any) -> Any:
    return Agent(own, **fields).run_sync(INPUT, message_history=message_history).output


async def at_once() -> list[str]:
    return [each.output for each in await asyncio.gather(agent.run(INPUT), agent.run(INPUT))]


async def streamed(own: Any) -> str:
    async with Agent(own, instructions="Be brief.").run_stream(INPUT) as found:
        return [text async for text in found.stream_text(debounce_by=None)][-1]


case("run_sync", lambda: agent.run_sync(INPUT).output)
case("usage", lambda: agent.run_sync(INPUT).usage.output_tokens > 0, True)
case("run", lambda: asyncio.run(at_once()), [ANSWER] * 2)
case("run_stream", lambda: asyncio.run(streamed(model)))
case("message history", lambda: output(message_history=agent.run_sync("hi").new_messages()))
case("system prompt", lambda: output(system_prompt="Be brief.", model_settings={"seed": 1}))
case("native output", lambda: output(output_type=LIGHT), Light)
case("responses", lambda: output(responses, instructions="Be brief."))
case("responses streamed", lambda: asyncio.run(streamed(responses)))
case("responses with native output", lambda: output(responses, output_type=LIGHT), Light)
case("its default, tools, is refused", lambda: output(output_type=Light), ModelHTTPError, "tool")
case("unknown model", lambda: output(nobody), ModelHTTPError, "404")

run()
