"""Cases of `dspy`."""

import asyncio
from typing import Any, Literal

import dspy
from cases import ANSWER, API, INPUT, KEY, MESSAGES, MODEL, PROMPT, case, run

NAME = f"completion-openai/{MODEL}"


def model(name: str = f"openai/{MODEL}", **fields: Any) -> Any:
    return dspy.LM(name, api_base=API, api_key=KEY, cache=False, num_retries=0, **fields)


class Switch(dspy.Signature):
    """Which light is meant."""

    request: str = dspy.InputField()
    room: Literal["kitchen", "bedroom"] = dspy.OutputField()


lm = model()
dspy.configure(lm=lm, adapter=dspy.JSONAdapter())
# dspy sends a schema by itself only to models that it knows; the demo model does not read prompts.
SCHEMA = {
    "type": "object",
    "properties": {"room": {"enum": ["kitchen", "bedroom"]}},
    "required": ["room"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "switch", "schema": SCHEMA}}
ROOMS: Any = dspy.Predict(Switch, response_format=FORMAT)


def response() -> Any:
    (found,) = model(model_type="responses")(INPUT)
    return found["text"] if isinstance(found, dict) else found


case("lm with a prompt", lambda: lm(INPUT, temperature=0), [ANSWER])
case("lm with messages", lambda: lm(messages=MESSAGES), [ANSWER])
case("several answers", lambda: len(lm(INPUT, n=2, temperature=1.0)), 2)
case("text model", lambda: model(f"text-{NAME}", model_type="text")(PROMPT), list)
case("responses model", response)
case("predict", lambda: ROOMS(request=INPUT).room, str)
case("predict async", lambda: asyncio.run(ROOMS.acall(request=INPUT)).room, str)
case("unknown model", lambda: model("openai/none")(INPUT), Exception, "none")

run()
