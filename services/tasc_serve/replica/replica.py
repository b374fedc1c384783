"""The Serve deployment that answers for one task: an engine, its step loop, its metrics."""

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from functools import partial

import ray
from prometheus_client import CollectorRegistry
from ray import serve

from tasc_engine import StepRecord
from tasc_engine.guided import Guide
from tasc_protocol import Output, Request
from tasc_runtime.engine.builder import EngineBuilder
from tasc_runtime.errors import EngineBroken
from tasc_runtime.models import model_name
from tasc_runtime.protocol import AnswerTexts, Pulse, Refusal, TaskStatus
from tasc_serve.metrics.discovery import MetricsPort, node_address
from tasc_serve.metrics.replica_metrics import ReplicaMetrics
from tasc_serve.monitor.collector import Collector
from tasc_serve.monitor.shadow import ShadowCheck
from tasc_serve.replica.admission import Admission, DrainRate
from tasc_serve.replica.server import CallServer
from tasc_serve.replica.start_notes import tell
from tasc_serve.replica.step_loop import EngineLoop
from tasc_serve.replica.watchers import TaskWatcher
from tasc_serve.routing.autoscaling import OUTSTANDING
from tasc_serve.settings import ServedTask, ServeSettings
from tasc_serve.wire import AttachRequest, Endpoint
from tasc_store import CollectedRows, TaskStore, connect

_LEAST_STALL_S = 60.0  # long steps must not get a replica replaced


class TaskReplica:
    """One task's engine in one process.

    Args:
        settings: The service's settings.
        redis_url: URL of the store.
        task: Name of one of the settings' tasks.
        digest: The `engine_digest` of the record that it serves; unset: that of the newest one.

    Attributes:
        builder: The builder of the task's engine.
        registry: The replica's metrics.
    """

    def __init__(
        self, settings: ServeSettings, redis_url: str, task: ServedTask, digest: str | None = None
    ) -> None:
        self._client = client = connect(redis_url)
        self.registry = registry = CollectorRegistry()
        self._server: CallServer | None = None
        self._here: asyncio.AbstractEventLoop | None = None
        self._connection = settings.connection
        limits = settings.limits
        self._capacity = settings.engine.rows + limits.max_queued_requests
        self._outstanding = 0
        self._numbers = itertools.count()
        self._drain = DrainRate(settings.engine.rows)
        self._timeout_s = limits.request_timeout_s
        self._stall_limit_s = max(limits.request_timeout_s, _LEAST_STALL_S)
        self.builder = EngineBuilder.of_task(
            client,
            task.name,
            settings.engine,
            draft=task.draft,
            gpus=task.num_gpus,
            max_waiting=limits.max_queued_requests,
            cache_dir=settings.cache_dir,
            on_step=self._observe_step,
            say=partial(tell, client, task.name),
            digest=digest,
        )
        self.builder.reader.compile_own_guide()
        self._admission = Admission(self.builder, limits)
        own = {"task": task.name, "model_name": model_name(self.builder.record)}
        self._metrics = ReplicaMetrics(
            registry,
            **own,
            proposer=self.builder.drafts_by,
            record_version=lambda: self.builder.record_version,
            load=self._load,
        )
        if self.builder.drafter:
            from tasc_runtime.engine.drafters import NeuralMetrics

            self.builder.drafter.publish(NeuralMetrics(registry, own))
        self._shadow = ShadowCheck(
            self.builder.engine,
            task.shadow,
            self.builder.record.dtype,
            self._metrics,
            self._metrics.observe_step,
        )
        self._collector = Collector(
            CollectedRows(client, task.name),
            task.collect,
            self._metrics,
            takes_conversations=self.builder.has_chat_template,
        )
        self._observers = (self._shadow.finished, self._collector.finished)
        self._set_index()
        host = settings.metrics.host or node_address()
        self._port = MetricsPort(client, registry, host=host, ttl_s=settings.metrics.ttl_s)
        self._loop = EngineLoop(
            self.builder.engine,
            on_delta=self._metrics.observe_inter_token,
            shadow=self._shadow,
            hand_over=self._on_event_loop,
        )
        self._watcher = TaskWatcher(
            self.builder, self._loop, TaskStore(client), settings.poll_interval_s, self._set_index
        )

    async def answer(self, asked: Request, send: Callable[[Output | Refusal], None]) -> None:
        """Sends outputs of an answer, or one with all of it; the last item may be a refusal.

        Cancelling the task frees the row.

        Raises:
            EngineBroken: The engine has ended.
        """
        if refusal := self._refused(asked):
            send(refusal)
            return
        self._here = asyncio.get_running_loop()
        self._drain.began(asked.id)
        self._outstanding += 1
        taken = False
        try:
            # Not the call's id, as a client's retry and its first attempt may be here together.
            admitted = await self._admission.request(asked, f"{asked.id}-{next(self._numbers)}")
            if isinstance(admitted, Refusal):
                send(admitted)
                return
            taken = True
            request, guide = admitted
            if asked.is_acknowledged:
                send(Output(asked.id, record_version=request.record_version))
            await self._relay(asked, request, guide, send)
        finally:
            self._outstanding -= 1
            if taken:
                self._drain.ended()
            if not self._outstanding:
                self._drain.idle()

    async def attach(self, request: AttachRequest) -> AsyncGenerator[Endpoint, None]:
        """Yields the endpoint for a gateway; ends with its connection."""
        if self._server is None:
            name = serve.get_replica_context().replica_id.unique_id
            node = ray.get_runtime_context().get_node_id()
            self._server = CallServer(self, name, node_address(), node, self._connection)
        if request.replica_id == self._server.name:  # Serve's router may fall back to any
            async for endpoint in self._server.attach(request.node):
                yield endpoint

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """The load by which Serve scales, as calls do not use its handles."""
        return {OUTSTANDING: self._outstanding}

    def pulse(self) -> Pulse:
        """Returns the replica's state and load.

        Raises:
            EngineBroken: Its engine has ended.
        """
        if not self._loop.alive:
            raise EngineBroken(f"the engine loop ended: {self._loop.failure!r}")
        return Pulse(self._status(), self._outstanding, self._loop.stalled_s)

    def _refused(self, asked: Request) -> Refusal | None:
        """Returns a refusal if a request cannot be accepted now."""
        outstanding, version = self._outstanding, self.builder.record_version
        if outstanding >= self._capacity:
            message = f"{outstanding} requests are in this replica already"
            waiting = outstanding - self.builder.engine.config.rows
            return Refusal("full", message, None, self._drain.retry_after_s(asked.id, waiting))
        if not (asked.record_version is None or asked.record_version in self.builder.records):
            message = f"the answer was begun by version {asked.record_version}, this is {version}"
            return Refusal("changed", message)
        return None

    def _status(self) -> TaskStatus:
        builder, artifact = self.builder, self.builder.artifact
        config = builder.engine.config
        return TaskStatus(
            task=builder.record.name,
            record_version=builder.record_version,
            model=builder.record.model,
            adapter=builder.record.adapter,
            fingerprint=builder.tokenizer.fingerprint,
            max_model_len=builder.engine.longest,
            rows=config.rows,
            index_version=artifact.version if artifact else None,
            index_rows=artifact.corpus_rows if artifact else 0,
            index_bytes=builder.index_bytes,
            adapters=builder.record.adapter_names,
            older_record_versions=builder.records.older,
            chat=builder.has_chat_template,
        )

    def check_health(self) -> None:
        """Raises if the engine is broken or hangs, so that Serve replaces this replica."""
        if not self._loop.alive:
            raise EngineBroken(f"the engine loop ended: {self._loop.failure!r}")
        if self._loop.stalled_s > self._stall_limit_s:
            raise EngineBroken(f"no step has ended for {self._loop.stalled_s:.0f} s")

    def close(self) -> None:
        """Ends its threads and connections, even if construction failed."""
        if self._server:
            self._server.close()
        for part in ("_watcher", "_loop", "_admission", "_collector", "_port"):
            if hasattr(self, part):
                getattr(self, part).close()
        if hasattr(self, "_client"):
            self._client.close()

    def __del__(self) -> None:
        self.close()

    async def _relay(
        self,
        asked: Request,
        request: Request,
        guide: Guide | None,
        send: Callable[[Output | Refusal], None],
    ) -> None:
        """Has the engine answer a request, and sends what arrives until it has ended."""
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        texts, over = AnswerTexts(self.builder.tokenizer, asked, request), False

        def converted(made: Output) -> Output | Refusal:
            if made.result:
                self._metrics.observe_result(made.result)
                if made.result.error:
                    return _failure(made.result.error, asked, guide)
            artifact = self.builder.artifact  # only a replica knows the index
            output = texts.output(made, artifact.version if artifact else None)
            if output.result:
                for observe in self._observers:
                    observe(asked, request, output.result)
            return output

        def on_item(item: Output | Refusal | Exception) -> None:
            nonlocal over
            if ended.done():  # it was cancelled, and the engine may not know yet
                return
            over = not isinstance(item, Output) or item.result is not None
            try:
                if isinstance(item, Exception):
                    raise EngineBroken(f"the engine ended on {item!r}") from item
                send(item if isinstance(item, Refusal) else converted(item))
            except Exception as error:
                ended.set_exception(error)
            else:
                if over:
                    ended.set_result(None)

        self._loop.submit(request, on_item, guide)
        # The gateway gives up at the same time; this limit is for a dead gateway.
        timeout_s = self._timeout_s if asked.timeout_s is None else asked.timeout_s
        try:
            async with asyncio.timeout(timeout_s) as limit:
                await ended
        except TimeoutError:
            if not limit.expired():  # sending raised it
                raise
            if not over:
                send(Refusal("late", f"no answer within {timeout_s:g} s"))
        finally:
            if not over:
                self._loop.cancel(request.id)

    def _on_event_loop(self, run: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the event loop is closing
            if self._here:
                self._here.call_soon_threadsafe(run)

    def _set_index(self) -> None:
        """Publishes a change of the index or the proposer."""
        proposer = self.builder.drafts_by
        if proposer != self._metrics.proposer:
            self._metrics.set_proposer(proposer)
        self._metrics.set_index(self.builder.artifact, self.builder.index_bytes)

    def _observe_step(self, record: StepRecord) -> None:
        # Metrics are labelled with the builder's proposer, so they are created later.
        self._shadow.hold(record)

    def _load(self) -> tuple[int, int, float]:
        engine = self.builder.engine
        # Read during a step, so the check may not know yet that the engine has ended one.
        running = max(engine.running - self._shadow.running, 0)
        return running, engine.waiting, engine.kv_usage


def _failure(error: str, asked: Request, guide: Guide | None) -> Refusal:
    """Makes the refusal of a failed answer; a guide that stops midway is the client's error."""
    if asked.guide and guide and guide.error:
        message = f"{asked.guide.name} cannot be followed: {error}"
        return Refusal("invalid", message, asked.guide.field)
    return Refusal("failed", error)
