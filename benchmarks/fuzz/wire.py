"""One exchange on its own socket: bytes are sent in steps, and answers read up to a deadline."""

import asyncio
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3}) ")
# The message of the gateway for an unexpected error, which may come in the middle of a stream.
_INTERNAL = re.compile(rb"internal error; it is in")
_KEPT = 1 << 20
_CLOSE_S = 1.0


@dataclass(frozen=True)
class Attack:
    """An attack on the service.

    Attributes:
        kind: Its name in the tables.
        steps: Bytes to send, and seconds to wait between them.
        answered: The request is HTTP, so that the service must answer it.
        half_close: The sending side is closed after the last step.
        leave_s: Seconds to wait for an answer before the connection is closed; None: to the end.
        leave_bytes: The connection is closed after so many bytes of an answer.
    """

    kind: str
    steps: Sequence[bytes | float]
    answered: bool = False
    half_close: bool = False
    leave_s: float | None = None
    leave_bytes: int | None = None


@dataclass
class Outcome:
    """The outcome of an attack.

    Attributes:
        statuses: The statuses of all answers on the connection.
        refused: The connection was not accepted.
        cut: The service closed the connection while bytes were being sent.
    """

    statuses: list[int] = field(default_factory=list)
    hung: bool = False
    refused: bool = False
    cut: bool = False
    internal: bool = False
    seconds: float = 0.0
    head: bytes = b""


async def play(host: str, port: int, attack: Attack, deadline_s: float) -> Outcome:
    """Attack, and wait until the service closes the connection or the deadline is over."""
    outcome, began = Outcome(), asyncio.get_running_loop().time()
    try:
        async with asyncio.timeout(deadline_s):
            reader, writer = await asyncio.open_connection(host, port)
    except (OSError, TimeoutError):
        outcome.refused = True
        return outcome
    received = bytearray()
    reading = asyncio.create_task(_read(reader, received, attack.leave_bytes))
    try:
        async with asyncio.timeout(deadline_s):
            outcome.cut = not await _send(writer, attack)
            if attack.leave_s is None:
                await reading
            else:
                await asyncio.wait([reading], timeout=attack.leave_s)
    except TimeoutError:
        outcome.hung = True
    finally:
        await _end(reading, writer)
    outcome.seconds = asyncio.get_running_loop().time() - began
    outcome.statuses = [int(code) for code in _STATUS.findall(received)]
    outcome.internal = _INTERNAL.search(received) is not None
    outcome.head = bytes(received[:300])
    return outcome


async def _send(writer: asyncio.StreamWriter, attack: Attack) -> bool:
    """Send the steps; whether the service took all of them."""
    try:
        for step in attack.steps:
            if isinstance(step, bytes):
                writer.write(step)
                await writer.drain()
            else:
                await asyncio.sleep(step)
        if attack.half_close:
            writer.write_eof()
    except OSError:
        return False
    return True


async def _read(reader: asyncio.StreamReader, into: bytearray, most: int | None) -> None:
    with suppress(OSError):
        total = 0
        while block := await reader.read(65_536):
            total += len(block)
            into += block[: max(_KEPT - len(into), 0)]
            if most is not None and total >= most:
                return


async def _end(reading: asyncio.Task[None], writer: asyncio.StreamWriter) -> None:
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    writer.transport.abort()
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(_CLOSE_S):
            await writer.wait_closed()
