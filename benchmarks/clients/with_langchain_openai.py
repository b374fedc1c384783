"""Cases of `langchain-openai`."""

import asyncio
from typing import Any, Literal

from cases import ANSWER, API, INPUT, KEY, MODEL, PROMPT, TOOL, case, run
from langchain_core.messages import HumanMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI, OpenAI
from openai import APITimeoutError, BadRequestError, NotFoundError
from pydantic import BaseModel

MESSAGES = [("system", "You are a helpful assistant."), ("human", INPUT)]


class Light(BaseModel):
    """A light to switch."""

    room: Literal["kitchen", "bedroom"]


def chat(**fields: Any) -> Any:
    return ChatOpenAI(**{"model": MODEL, "base_url": API, "api_key": KEY, **fields})


def said(own: Any = None, **fields: Any) -> Any:
    return (own or chat(**fields)).invoke(MESSAGES).text


llm = chat()
completions: Any = OpenAI(model=MODEL, base_url=API, api_key=KEY, temperature=0)  # type: ignore[arg-type]
prompt = ChatPromptTemplate.from_messages([("system", "Be brief."), ("user", "{input}")])
chain = prompt | llm | StrOutputParser()


def streamed(own: Any = llm) -> tuple[str, bool]:
    first, *others = own.stream(MESSAGES)
    whole = sum(others, first)
    return whole.text, whole.usage_metadata["output_tokens"] > 0


async def at_once() -> list[str]:
    parts = [chunk.content async for chunk in llm.astream(MESSAGES)]
    return [(await llm.ainvoke(MESSAGES)).content, "".join(parts)]


def structured(**fields: Any) -> Any:
    return llm.with_structured_output(Light, **fields).invoke(MESSAGES)


case("invoke", said)
case("stream", lambda: streamed(chat(stream_usage=True)), (ANSWER, True))
case("async", lambda: asyncio.run(at_once()), [ANSWER] * 2)
case("batch", lambda: [each.content for each in llm.batch([MESSAGES] * 3)], [ANSWER] * 3)
case("chain", lambda: chain.invoke({"input": INPUT}))
case("structured output", structured, Light)
case("structured output with raw answer", lambda: structured(include_raw=True)["parsed"], Light)
case("logprobs", lambda: llm.bind(logprobs=True).invoke("a").response_metadata["logprobs"], dict)
case("usual parameters", lambda: said(temperature=0, seed=1, stop=["}"]), ANSWER[:-1])
case("n", lambda: len(chat(n=2, temperature=1).generate([[HumanMessage(INPUT)]]).generations[0]), 2)
case("completions", lambda: completions.batch([PROMPT] * 2), [ANSWER] * 2)
case("completions streamed", lambda: "".join(completions.stream(PROMPT)))
case("responses", lambda: said(use_responses_api=True))
case("responses streamed", lambda: streamed(chat(use_responses_api=True))[0])
case("tools are refused by name", lambda: said(llm.bind_tools([TOOL])), BadRequestError, "tools")
case("unknown model", lambda: said(model="none"), NotFoundError)
case("timeout", lambda: said(timeout=0.0001, max_retries=0), APITimeoutError)

run()
