"""The answers to one request, ``n`` to each of its prompts, requested and cancelled together."""

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from tasc_protocol import Output, Whole
from tasc_runtime.protocol import Backend, Call, Prompt, Refusal
from tasc_serve.http_errors import of_refusal

Numbered = tuple[int, Output | Refusal]


@dataclass(frozen=True)
class CallGroup:
    """The calls of one request; each can be answered by itself.

    Attributes:
        id: Id of the response.
        calls: The call for choice j of prompt k is at index ``k * n + j``.
    """

    id: str
    calls: tuple[Call, ...]

    @classmethod
    def of(cls, call: Call, prompts: Sequence[Prompt]) -> "CallGroup":
        """Makes a call for each prompt and choice; they differ in prompt, id and random numbers.

        Args:
            call: The call for the first prompt.
        """
        if call.n == len(prompts) == 1:
            return cls(call.id, (call,))
        calls = [
            dataclasses.replace(
                call,
                id=f"{call.id}-c{k * call.n + j}",
                prompt=prompt,
                prompts=len(prompts),
                options=dataclasses.replace(call.options, prompt=k, choice=j),
            )
            for k, prompt in enumerate(prompts)
            for j in range(call.n)
        ]
        return cls(call.id, tuple(calls))

    @property
    def n(self) -> int:
        """Number of answers to each prompt."""
        return self.calls[0].n

    @property
    def timeout_s(self) -> float | None:
        return self.calls[0].timeout_s

    def pinned(self, record_version: int | None) -> "CallGroup":
        """Returns the same calls, to be answered by one version of the task's record."""
        pinned = (dataclasses.replace(c, record_version=record_version) for c in self.calls)
        return CallGroup(self.id, tuple(pinned))


async def complete(backend: Backend, task: str, group: CallGroup) -> list[Whole]:
    """Returns the answers in the order of their calls.

    Raises:
        ApiError: A call was refused or failed; the others were cancelled.
    """
    if len(group.calls) == 1:
        return [_whole(await backend.complete(task, group.calls[0]))]

    async def one(call: Call) -> Whole:
        return _whole(await backend.complete(task, call))

    tasks = [asyncio.create_task(one(call)) for call in group.calls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        await _end(tasks)


def stream(backend: Backend, task: str, group: CallGroup) -> AsyncGenerator[Numbered, None]:
    """Yields the outputs of all answers as they arrive, each with the index of its call.

    Nothing is yielded before each call has sent an output or one is refused. Closing the generator
    cancels unfinished calls; so does an exception of one call.
    """
    streams = [backend.stream(task, call) for call in group.calls]
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
    unheard, held = set(range(len(pumps))), list[Numbered]()
    try:
        running = len(pumps)
        while running:
            item = await arrived.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
                continue
            unheard.discard(item[0])
            if isinstance(item[1], Refusal):
                yield item
                continue
            held.append(item)
            if not unheard:
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
