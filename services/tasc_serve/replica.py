"""The Serve deployment that answers for one task: an engine, its step loop, its metrics.

It takes calls and gives deltas; HTTP is the gateway's business.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from functools import partial

from prometheus_client import CollectorRegistry

from tasc_engine import Delta, Engine, GenerationRequest, GenerationResult, StepRecord
from tasc_serve.calls import Call, Refusal, TaskStatus
from tasc_serve.discovery import MetricsPort, node_address
from tasc_serve.errors import EngineBroken
from tasc_serve.loop import EngineLoop
from tasc_serve.metrics import ReplicaMetrics
from tasc_serve.models import model_name
from tasc_serve.settings import ServedTask, ServeSettings
from tasc_serve.start_notes import tell
from tasc_serve.watcher import IndexWatcher
from tasc_serve.worker import Worker
from tasc_store import Artifact, connect

_LEAST_STALL_S = 60.0  # a step may take long, a replica must not be replaced for that


class TaskReplica:
    """One task's engine in one process.

    Args:
        settings: The service's settings.
        redis_url: The store.
        task: Which of the settings' tasks.
    """

    def __init__(self, settings: ServeSettings, redis_url: str, task: ServedTask) -> None:
        client = connect(redis_url)
        registry = CollectorRegistry()
        limits = settings.limits
        self._places = settings.engine.rows + limits.max_queued
        self._outstanding = 0
        self._stall_limit_s = max(limits.request_timeout_s, _LEAST_STALL_S)
        self._worker = Worker(
            client,
            task.name,
            settings.engine,
            draft=task.draft,
            gpus=task.num_gpus,
            max_waiting=limits.max_queued,
            cache_dir=settings.cache_dir,
            on_step=self._observe_step,
            say=partial(tell, client, task.name),
        )
        self._metrics = ReplicaMetrics(
            registry,
            task=task.name,
            model_name=model_name(self._worker.record),
            proposer=self._worker.proposer.settings.mixture,
        )
        self._set_index(self._worker.artifact)
        host = settings.metrics.host or node_address()
        self._port = MetricsPort(client, registry, host=host, ttl_s=settings.metrics.ttl_s)
        self._loop = EngineLoop(
            self._worker.engine,
            on_delta=self._metrics.observe_inter_token,
            on_load=self._set_load,
        )
        self._watcher = IndexWatcher(
            self._worker, self._loop, settings.index_poll_s, self._set_index
        )

    async def complete(self, call: Call) -> GenerationResult | Refusal:
        """The whole answer of one call."""
        async with aclosing(self.stream(call)) as items:
            async for item in items:
                if isinstance(item, Refusal):
                    return item
                if item.result:
                    return item.result
        raise RuntimeError(f"call {call.id} ended without a result")

    async def stream(self, call: Call) -> AsyncGenerator[Delta | Refusal, None]:
        """An answer piece by piece; closing the iterator frees the row."""
        request = self._admit(call)
        if isinstance(request, Refusal):
            yield request
            return
        self._outstanding += 1
        try:
            # Closed before its place is given away: the engine hears of the end first.
            async with aclosing(self._deltas(request)) as deltas:
                async for delta in deltas:
                    yield delta
        finally:
            self._outstanding -= 1

    async def status(self) -> TaskStatus:
        worker, artifact = self._worker, self._worker.artifact
        config = worker.engine.config
        return TaskStatus(
            task=worker.record.name,
            record_version=worker.record_version,
            model=worker.record.model,
            adapter=worker.record.adapter,
            fingerprint=worker.tokenizer.fingerprint,
            max_model_len=worker.engine.longest,
            rows=config.rows,
            index_version=artifact.version if artifact else None,
            index_rows=artifact.corpus_rows if artifact else 0,
            index_bytes=worker.index_bytes,
        )

    def check_health(self) -> None:
        """Raise when the engine has broken or hangs, so that Serve replaces this replica."""
        if not self._loop.alive:
            raise EngineBroken(f"the engine loop ended: {self._loop.failure!r}")
        if self._loop.stalled_s > self._stall_limit_s:
            raise EngineBroken(f"no step has ended for {self._loop.stalled_s:.0f} s")

    def __del__(self) -> None:
        for part in ("_watcher", "_loop", "_port"):
            if hasattr(self, part):
                getattr(self, part).close()

    def _admit(self, call: Call) -> GenerationRequest | Refusal:
        if self._outstanding >= self._places:
            return Refusal("full", f"{self._outstanding} requests are in this replica already")
        try:
            request = self._worker.request(call)
            self._worker.engine.require_fit(request)
        except ValueError as error:
            return Refusal("invalid", str(error), call.prompt_field)
        return request

    async def _deltas(self, request: GenerationRequest) -> AsyncGenerator[Delta | Refusal, None]:
        here = asyncio.get_running_loop()
        # One item per step at most, and a row holds max_tokens steps: bounded by the request.
        arrived: asyncio.Queue[Delta | Exception] = asyncio.Queue()

        def sink(item: Delta | Exception) -> None:
            with suppress(RuntimeError):  # the event loop is closing
                here.call_soon_threadsafe(arrived.put_nowait, item)

        self._loop.submit(request, sink)
        ended = False
        try:
            while not ended:
                item = await arrived.get()
                if isinstance(item, Exception):
                    ended = True
                    raise EngineBroken(f"the engine ended on {item!r}") from item
                if item.result:
                    ended = True
                    self._metrics.observe_result(item.result)
                error = item.result.error if item.result else None
                yield Refusal("failed", error) if error else item
        finally:
            if not ended:
                self._loop.cancel(request.id)

    def _set_index(self, artifact: Artifact | None) -> None:
        version = artifact.version if artifact else None
        self._metrics.set_index(version, self._worker.index_bytes)

    def _observe_step(self, record: StepRecord) -> None:
        # Metrics are labelled by what the worker turns out to draft with, so they are made later.
        self._metrics.observe_step(record)

    def _set_load(self, engine: Engine) -> None:
        self._metrics.set_load(engine.running, engine.waiting, engine.kv_usage)
