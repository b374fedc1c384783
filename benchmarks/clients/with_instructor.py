"""Cases of `instructor`. Its default mode sends tools, so the mode is named.

Models forbid extra keys: the demo model was not taught JSON and would add such keys without end.
"""

import asyncio
from typing import Any, Literal

import instructor
import openai
from cases import API, KEY, MESSAGES, MODEL, USER, case, run
from instructor import Mode
from pydantic import BaseModel

WHERE: Any = {"base_url": API, "api_key": KEY}


class Room(BaseModel, extra="forbid"):
    name: Literal["kitchen", "bedroom"]


class Anything(BaseModel):
    """JSON mode asks for an object, and the demo model does not read which."""

    name: str | None = None


class Light(BaseModel, extra="forbid"):
    on: bool
    room: Room


def create(mode: Mode, asynchronous: bool = False, **fields: Any) -> Any:
    client: Any = instructor.from_provider(
        f"openai/{MODEL}", mode=mode, async_client=asynchronous, **WHERE
    )
    return client.create(**{"response_model": Room, "messages": [USER], **fields})


def patched() -> Any:
    client: Any = instructor.from_openai(openai.OpenAI(**WHERE), mode=Mode.JSON_SCHEMA)
    make = client.chat.completions.create_with_completion
    room, answer = make(model=MODEL, response_model=Room, messages=[USER])
    assert answer.usage.total_tokens > 0
    return room


def last_part() -> Any:
    partial = instructor.Partial[Light]
    *_, last = create(Mode.JSON_SCHEMA, response_model=partial, stream=True)
    return last.room.name


case("json mode", lambda: create(Mode.JSON, response_model=Anything), Anything)
case("json schema mode", lambda: create(Mode.JSON_SCHEMA), Room)
case("nested objects", lambda: create(Mode.JSON_SCHEMA, response_model=Light), Light)
case("system message", lambda: create(Mode.JSON_SCHEMA, messages=MESSAGES), Room)
case("from_openai", patched, Room)
case("partial objects streamed", last_part, str)
case("async client", lambda: asyncio.run(create(Mode.JSON_SCHEMA, asynchronous=True)), Room)
case("its default, tools, is refused by name", lambda: create(Mode.TOOLS), Exception, "tool")

run()
