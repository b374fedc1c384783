"""Requests and cancels all answers to one HTTP request together: ``n`` for each prompt."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from msgspec.structs import replace

from tasc_protocol import Output, Prompt, Request, Whole
from tasc_runtime.protocol import Refusal, Router
from tasc_serve.http_errors import of_refusal

Numbered = tuple[int, Output | Refusal]


def spread(request: Request, prompts: Sequence[Prompt]) -> tuple[Request, ...]:
    """Returns a request for each prompt and choice; they differ in prompt, id and random numbers.

    Args:
        request: The request for the first prompt.

    Returns:
        The request for choice j of prompt k, at index ``k * n + j``.
    """
    n = request.n
    if n == len(prompts) == 1:
        return (request,)
    return tuple(
        replace(
            request,
            id=f"{request.id}-c{k * n + j}",
            prompt=prompt,
            prompts=len(prompts),
            prompt_index=k,
            choice_index=j,
        )
        for k, prompt in enumerate(prompts)
        for j in range(n)
    )


def pinned(requests: Sequence[Request], record_version: int | None) -> tuple[Request, ...]:
    """Returns the requests, pinned to one version of the task's record."""
    return tuple(replace(request, record_version=record_version) for request in requests)


async def complete(router: Router, requests: Sequence[Request]) -> list[Whole]:
    """Returns the answers in the order of their requests.

    Raises:
        ApiError: A request was refused or failed; the others were cancelled.
    """
    if len(requests) == 1:
        return [_whole(await router.complete(requests[0]))]

    async def one(request: Request) -> Whole:
        return _whole(await router.complete(request))

    tasks = [asyncio.create_task(one(request)) for request in requests]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        await _end(tasks)


def stream(router: Router, requests: Sequence[Request]) -> AsyncGenerator[Numbered, None]:
    """Yields the outputs of all answers as they arrive, each with the index of its request.

    Nothing is yielded until every request has an output or any request is refused. Closing the
    generator cancels unfinished requests, and so does an exception in any request.
    """
    streams = [router.stream(request) for request in requests]
    return _alone(streams[0]) if len(streams) == 1 else _merged(streams)


def _whole(answer: Output | Refusal) -> Whole:
    if isinstance(answer, Refusal):
        raise of_refusal(answer)
    assert answer.result is not None
    return answer.result, answer.token_texts


async def _alone(
    outputs: AsyncGenerator[Output | Refusal, None],
) -> AsyncGenerator[Numbered, None]:
    async with aclosing(outputs):
        async for output in outputs:
            yield 0, output


async def _merged(
    streams: Sequence[AsyncGenerator[Output | Refusal, None]],
) -> AsyncGenerator[Numbered, None]:
    arrived: asyncio.Queue[Numbered | Exception | None] = asyncio.Queue(1)
    pumps = [asyncio.create_task(_pump(i, s, arrived)) for i, s in enumerate(streams)]
    unanswered, held = set(range(len(pumps))), list[Numbered]()
    try:
        running = len(pumps)
        while running:
            item = await arrived.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
                continue
            unanswered.discard(item[0])
            if isinstance(item[1], Refusal):
                yield item
                continue
            held.append(item)
            if not unanswered:
                for one in held:
                    yield one
                held.clear()
    finally:
        await _end(pumps)


async def _pump(
    index: int,
    outputs: AsyncGenerator[Output | Refusal, None],
    arrived: asyncio.Queue[Numbered | Exception | None],
) -> None:
    try:
        async with aclosing(outputs):
            async for output in outputs:
                await arrived.put((index, output))
        await arrived.put(None)
    except Exception as error:
        await arrived.put(error)


async def _end(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancels tasks, and waits until they have ended and their rows are free."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
