"""The ``n`` answers to one request: made together, cancelled together."""

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from tasc_runtime.protocol import Answer, Backend, Call, Piece, Refusal
from tasc_serve.http_errors import of_refusal

Numbered = tuple[int, Piece | Refusal]


def calls_of(call: Call) -> list[Call]:
    """One call for each choice, alike but for their ids and random numbers."""
    if call.n == 1:
        return [call]
    return [
        dataclasses.replace(
            call, id=f"{call.id}-c{i}", options=dataclasses.replace(call.options, choice=i)
        )
        for i in range(call.n)
    ]


async def complete(backend: Backend, task: str, call: Call) -> list[Answer]:
    """The answers in the order of their choices.

    Raises:
        ApiError: One of them was refused or failed; the others have been given up.
    """
    tasks = [asyncio.create_task(_one(backend, task, c)) for c in calls_of(call)]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        await _end(tasks)


def stream(backend: Backend, task: str, call: Call) -> AsyncGenerator[Numbered, None]:
    """The pieces of all choices as they come, each with its choice's number.

    Closing it gives up what has not ended; so does an exception of one choice.
    """
    streams = [backend.stream(task, c) for c in calls_of(call)]
    return _alone(streams[0]) if len(streams) == 1 else _merged(streams)


async def _one(backend: Backend, task: str, call: Call) -> Answer:
    answer = await backend.complete(task, call)
    if isinstance(answer, Refusal):
        raise of_refusal(answer)
    return answer


async def _alone(pieces: AsyncGenerator[Piece | Refusal, None]) -> AsyncGenerator[Numbered, None]:
    async with aclosing(pieces):
        async for piece in pieces:
            yield 0, piece


async def _merged(
    streams: Sequence[AsyncGenerator[Piece | Refusal, None]],
) -> AsyncGenerator[Numbered, None]:
    # One place: a client that reads slowly holds all of them back, as it would a single one.
    arrived: asyncio.Queue[Numbered | Exception | None] = asyncio.Queue(1)
    pumps = [asyncio.create_task(_pump(i, s, arrived)) for i, s in enumerate(streams)]
    try:
        running = len(pumps)
        while running:
            item = await arrived.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        await _end(pumps)


async def _pump(
    index: int,
    pieces: AsyncGenerator[Piece | Refusal, None],
    arrived: asyncio.Queue[Numbered | Exception | None],
) -> None:
    try:
        async with aclosing(pieces):
            async for piece in pieces:
                await arrived.put((index, piece))
        await arrived.put(None)
    except Exception as error:
        await arrived.put(error)


async def _end(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancel what runs, and wait until its rows have been given back."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
