"""Scripted replicas in one process that answer, refuse, die or hang. No Ray, no models.

Their clock stands still while any task can run, and otherwise jumps to the next timer.
A slow machine makes no replica silent.
"""

import asyncio
import selectors
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from ray.exceptions import NodeDiedError

from tasc_engine import GenerationResult, Timings
from tasc_protocol import Output, Request
from tasc_runtime.protocol import Refusal, ReplicaState, TaskStatus
from tasc_serve.metrics.gateway_metrics import GatewayMetrics
from tasc_serve.routing.failover import Failover, RetryBudget
from tasc_serve.routing.fleet import Fleet, ReplicaLost
from tasc_serve.settings import FailoverSettings

TASK = "greet"
ROWS = 8
SILENCE_S = 0.4
WHOLE = tuple(range(100, 110))  # what every replica answers, one token a piece


def status(record_version: int = 1) -> TaskStatus:
    return TaskStatus(TASK, record_version, "model", None, "f" * 32, 512, ROWS, 3, 100, 4096)


def text_of(ids: tuple[int, ...]) -> str:
    return "".join(chr(ord("a") + token - WHOLE[0]) for token in ids)


@dataclass
class Scripted:
    """One replica.

    Attributes:
        dies_after: Number of pieces of a call after which the replica dies.
        hangs_after: Number of pieces of a call after which it sends nothing more.
        refuses: Its response to every call.
        answers_after_s: Seconds until the first token of a call that it has admitted.
        stopping: Serve no longer lists it; it finishes its calls.
    """

    dies_after: int | None = None
    hangs_after: int | None = None
    refuses: Refusal | None = None
    record_version: int = 1
    outstanding: int = 0
    answers_after_s: float = 0.0
    present: bool = True
    stopping: bool = False
    hung: bool = False
    calls: list[Request] = field(default_factory=list)
    open: int = 0
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    reason: str = ""


class Replicas:
    """A connection to scripted replicas, and their fleet."""

    def __init__(self, **replicas: Scripted) -> None:
        self.all = replicas
        self.fleet = Fleet(TASK, self.present, self.state, SILENCE_S, disconnect=self.let_go)

    def present(self) -> list[str]:
        return [name for name, one in self.all.items() if one.present and not one.stopping]

    def let_go(self, name: str, reason: str) -> None:
        self.all[name].reason = reason
        self.all[name].lost.set()

    async def state(self, name: str) -> ReplicaState:
        replica = self.all[name]
        if not replica.present:
            raise NodeDiedError(name)
        if replica.hung:
            await asyncio.Event().wait()
        return ReplicaState(status(replica.record_version), replica.outstanding, 0.0)

    async def complete(self, replica: str, call: Request) -> Output | Refusal:
        pieces = [item async for item in self.stream(replica, call)]
        if isinstance(pieces[-1], Refusal):
            return pieces[-1]
        assert pieces[-1].result
        return Output(call.id, result=pieces[-1].result)

    async def stream(self, name: str, call: Request) -> AsyncGenerator[Output | Refusal, None]:
        replica = self.all[name]
        replica.calls.append(call)
        replica.open += 1
        try:
            if replica.refuses:
                yield replica.refuses
                return
            if call.is_acknowledged:
                yield Output(call.id, record_version=replica.record_version)
            await asyncio.sleep(replica.answers_after_s)
            for sent, token in enumerate(WHOLE[len(call.committed_ids) :]):
                await self._mishap(replica, sent)
                yield self._output(replica, call, token)
        finally:
            replica.open -= 1

    async def _mishap(self, replica: Scripted, sent: int) -> None:
        await asyncio.sleep(0)
        if sent == replica.dies_after:
            replica.present = False
            raise NodeDiedError("in the middle")
        if sent == replica.hangs_after:
            replica.hung = True
            await replica.lost.wait()
            raise ReplicaLost("it hung", replica.reason)

    def _output(self, replica: Scripted, call: Request, token: int) -> Output:
        result = None
        if token == WHOLE[-1]:
            result = GenerationResult(
                call.id, WHOLE, text_of(WHOLE), "length", 3, Timings(0.0, 0.0, 0.0)
            )
        version = replica.record_version
        return Output(call.id, (token,), text_of((token,)), result, record_version=version)


class _Clock(selectors.DefaultSelector):
    """Waits only for timers, and skips the waiting time."""

    def __init__(self) -> None:
        super().__init__()
        # A call takes its start from the real clock, which is behind this one.
        self.now = time.monotonic() + 10

    def read(self) -> float:
        self.now += 1e-6
        return self.now

    def select(self, timeout: float | None = None) -> Any:
        found = super().select(0)
        self.now += 0.0 if found else timeout or 0.0
        return found


class Calls:
    """Failover over scripted replicas that are watched."""

    def __init__(self, replicas: Replicas, budget: float = 100, **settings: Any) -> None:
        self.replicas = replicas
        self.registry = CollectorRegistry()
        self.failover = Failover(
            TASK,
            replicas.fleet,
            replicas,
            FailoverSettings(**{"no_replica_timeout_s": 0.3, **settings}),
            RetryBudget(0, budget),
            GatewayMetrics(self.registry),
        )

    def run(self, asked: Callable[[Failover], Any]) -> Any:
        async def watched() -> Any:
            watching = asyncio.create_task(self.replicas.fleet.watch())
            try:
                async with asyncio.timeout(30):
                    return await asked(self.failover)
            finally:
                watching.cancel()

        clock = _Clock()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("time.monotonic", clock.read)
            with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(clock)) as runner:
                return runner.run(watched())

    def counted(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(name, {"task": TASK, **labels}) or 0.0
