"""The Serve deployment that answers for one task: an engine, its step loop, its metrics.

`TaskReplica.answer` is the path of a request. A request is refused if the queue is full. Otherwise,
`Admission` fills in the task's values and compiles the guide, and the step loop makes the answer.
"""

import asyncio
import heapq
import itertools
import logging
import math
import random
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

import ray
from prometheus_client import CollectorRegistry
from ray import serve

from tasc_engine import StepRecord
from tasc_engine.errors import GuideError
from tasc_engine.guided import Guidance, LabelSet
from tasc_protocol import FieldError, GuideSpec, Output, Request
from tasc_runtime.engine.builder import EngineBuilder
from tasc_runtime.engine.reader import require_total
from tasc_runtime.engine.step_loop import EngineLoop, Item
from tasc_runtime.errors import EngineBroken
from tasc_runtime.models import model_name
from tasc_runtime.protocol import AnswerTexts, Refusal, ReplicaState, TaskStatus
from tasc_serve.metrics.discovery import MetricsPort, node_address
from tasc_serve.metrics.replica_metrics import ReplicaMetrics
from tasc_serve.monitor.collector import Collector
from tasc_serve.monitor.shadow import ShadowCheck, without_checks
from tasc_serve.replica.server import CallServer
from tasc_serve.replica.start_notes import publish_note
from tasc_serve.replica.watchers import TaskWatcher
from tasc_serve.routing.autoscaling import OUTSTANDING
from tasc_serve.settings import LimitSettings, ServedTask, ServeSettings
from tasc_serve.wire import AttachRequest, Endpoint
from tasc_store import CollectedRows, TaskStore, connect

log = logging.getLogger(__name__)

_LEAST_STALL_S = 60.0  # a long step must not cause a replacement
_LONG_TEXT = 16_384  # characters; encoding it takes some milliseconds
_SMALL_LABELS = 65_536  # bytes
_COMPILERS = 2  # so that one slow guide does not delay all others
_KEPT = 64  # number of endings that the rate covers
_LONGEST_S = 60  # older OpenAI clients ignore a longer Retry-After
_LATEST_S = 5  # longer waits are spread over the last 5 s of the 60
_UNKNOWN_S = 1.0  # assumed time of an answer before any has ended
_SLACK = 4  # at the first retries, a quarter of the queue should be empty


class TaskReplica:
    """One task's engine in one process.

    Args:
        settings: The service's settings.
        redis_url: URL of the store.
        task: Name of one of the settings' tasks.
        digest: The `engine_digest` of the record to serve; unset: the newest record is served.

    Attributes:
        builder: The builder of the task's engine.
        registry: The registry of the replica's metrics.
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
        engine = settings.engine_of(task)
        self._capacity = engine.rows + limits.max_queued_requests
        self._outstanding = 0
        self._numbers = itertools.count()
        self._drain = DrainRate(engine.rows)
        self._timeout_s = limits.request_timeout_s
        self._stall_limit_s = max(limits.request_timeout_s, _LEAST_STALL_S)
        self.builder = EngineBuilder.of_task(
            client,
            task.name,
            engine,
            draft=task.draft,
            gpus=task.num_gpus,
            max_waiting=limits.max_queued_requests,
            cache_dir=settings.cache_dir,
            on_step=self._observe_step,
            say=partial(publish_note, client, task.name),
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
        self._collector = Collector(
            CollectedRows(client, task.name),
            task.collect,
            self._metrics,
            takes_conversations=self.builder.has_chat_template,
        )
        self._set_index()
        self._counted: object = None
        self._loop = EngineLoop(
            self.builder.engine,
            on_delta=self._metrics.observe_inter_token,
            hand_over=self._on_event_loop,
        )
        shadow = ShadowCheck(
            self.builder.engine,
            self._loop.submit_idle,
            task.shadow,
            self.builder.record.dtype,
            self._metrics,
        )
        self._observers = (shadow.finished, self._collector.finished)
        host = settings.metrics.host or node_address()
        self._port = MetricsPort(client, registry, host=host, ttl_s=settings.metrics.ttl_s)
        self._watcher = TaskWatcher(
            self.builder,
            self._loop,
            TaskStore(client),
            settings.poll_interval_s,
            self._set_index,
            self._count_labels,
        )

    async def answer(self, asked: Request, send: Callable[[Output | Refusal], None]) -> None:
        """Streams outputs, or sends one complete output. The last item may be a refusal.

        Cancelling the asyncio task that runs this method frees the row.

        Raises:
            EngineBroken: The engine has ended.
        """
        builder, outstanding = self.builder, self._outstanding
        if outstanding >= self._capacity:
            message = f"this replica already has {outstanding} requests, its maximum; try again"
            wait_s = self._drain.retry_after_s(asked.id, outstanding - builder.engine.config.rows)
            send(Refusal("full", message, None, wait_s))
            return
        # The version is fixed here, as a newer one may arrive while a guide is compiled.
        now = builder.record_version
        version = now if asked.record_version is None else asked.record_version
        if version not in builder.records:
            message = (
                f"version {version} of the task's record is not served by this replica, which "
                f"serves version {now}; send a new request"
            )
            send(Refusal("changed", message))
            return
        self._here = asyncio.get_running_loop()
        self._drain.began(asked.id)
        self._outstanding += 1
        taken = False
        try:
            # Not the call's id: a client's retry may arrive while the first attempt runs.
            id = f"{asked.id}-{next(self._numbers)}"
            admitted = await self._admission.request(asked, id, version)
            if isinstance(admitted, Refusal):
                send(admitted)
                return
            taken = True
            if asked.is_acknowledged:
                send(Output(asked.id, record_version=version))
            await self._relay(asked, *admitted, send)
        finally:
            self._outstanding -= 1
            if taken:
                self._drain.ended()
            if not self._outstanding:
                self._drain.idle()

    async def _relay(
        self,
        asked: Request,
        request: Request,
        guide: Guidance | None,
        send: Callable[[Output | Refusal], None],
    ) -> None:
        """Passes a request to the engine, and sends its outputs until the answer has ended."""
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        texts, over = AnswerTexts(self.builder.tokenizer, asked, request), False

        def on_item(item: Item) -> None:
            nonlocal over
            if ended.done():  # the call was cancelled; the engine may not know yet
                return
            result = item.result if isinstance(item, Output) else None
            over = not isinstance(item, Output) or result is not None
            try:
                if isinstance(item, Exception):
                    raise EngineBroken(f"the engine ended with {item!r}") from item
                if result:
                    self._metrics.observe_result(
                        result, bool(request.guide and request.guide.is_tasks)
                    )
                if result and result.error:
                    item = _failure(result.error, asked, guide)
                elif isinstance(item, Output):
                    artifact = self.builder.artifact  # only a replica knows the index
                    item = texts.output(item, artifact.version if artifact else None)
                send(item)
                if isinstance(item, Output) and item.result:
                    for observe in self._observers:
                        observe(asked, request, item.result)
                if over:
                    ended.set_result(None)
            except Exception as error:
                ended.set_exception(error)

        self._loop.submit(request, on_item, guide)
        # The gateway gives up at the same time; this limit is for a dead gateway.
        timeout_s = self._timeout_s if asked.timeout_s is None else asked.timeout_s
        try:
            async with asyncio.timeout(timeout_s) as limit:
                await ended
        except TimeoutError:
            if not limit.expired():  # raised by `send`
                raise
            if not over:
                send(Refusal("late", f"no answer within {timeout_s:g} s"))
        finally:
            if not over:
                self._loop.cancel(request.id)

    async def attach(self, request: AttachRequest) -> AsyncGenerator[Endpoint, None]:
        """Yields an endpoint for one connection of a gateway; ends when the connection ends."""
        if self._server is None:
            name = serve.get_replica_context().replica_id.unique_id
            node = ray.get_runtime_context().get_node_id()
            self._server = CallServer(self, name, node_address(), node, self._connection)
        if request.replica_id == self._server.name:  # the router may pick any replica
            async for endpoint in self._server.attach(request.node):
                yield endpoint

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Returns the load for autoscaling; Serve does not count calls that bypass its handles."""
        return {OUTSTANDING: self._outstanding}

    def state(self) -> ReplicaState:
        """Returns the replica's state and load.

        Raises:
            EngineBroken: The replica's engine has ended.
        """
        if not self._loop.alive:
            raise EngineBroken(f"the engine loop ended: {self._loop.failure!r}")
        return ReplicaState(self._status(), self._outstanding, self._loop.stalled_s)

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
        """Ends the replica's threads and connections, even if construction failed."""
        if self._server:
            self._server.close()
        for part in ("_watcher", "_loop", "_admission", "_collector", "_port"):
            if hasattr(self, part):
                getattr(self, part).close()
        if hasattr(self, "_client"):
            self._client.close()

    def __del__(self) -> None:
        self.close()

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

    def _count_labels(self) -> None:
        """Publishes how often the corpus has each label, if anything that it depends on changed."""
        builder, artifact, proposer = self.builder, self.builder.artifact, self._metrics.proposer
        record, index = builder.record, builder.proposer.index
        counted = artifact and artifact.version, record.choices, record.label_end, proposer
        if counted == self._counted:
            return
        # The rows of an index that was cut to a size are no sample of the corpus.
        of_corpus = artifact.corpus_rows if artifact else None
        whole = of_corpus and index.inputs and index.inputs.rows >= of_corpus
        rows = dict.fromkeys(record.choices, 0)
        if record.choices and whole:
            try:
                labels = builder.engine.guides.labels(
                    GuideSpec("labels", record.choices, end=record.label_end)
                )
                counts = index.rows_by_label(labels.trie, labels.label)
                rows = dict(zip(labels.texts, counts.tolist(), strict=True))
            except GuideError as error:
                log.warning("the labels of task %s are not watched: %s", record.name, error)
        self._metrics.set_labels(rows)
        self._counted = counted

    def _observe_step(self, record: StepRecord) -> None:
        # The builder gets this method before `_metrics` exists, which needs the builder's proposer.
        if users := without_checks(record):
            self._metrics.observe_step(users)

    def _load(self) -> tuple[int, int, float]:
        engine = self.builder.engine
        # Read during a step: the loop may not know yet that the engine has finished a request.
        running = max(engine.running - self._loop.idle_running, 0)
        return running, engine.waiting, engine.kv_usage


def _failure(error: str, asked: Request, guide: Guidance | None) -> Refusal:
    """Makes the refusal of a failed answer; a guide that stops midway is the client's error."""
    if asked.guide and guide and not isinstance(guide, LabelSet) and guide.error:
        message = f"{asked.guide.name} cannot be followed: {error}"
        return Refusal("invalid", message, asked.guide.field)
    return Refusal("failed", error)


class Admission:
    """Fills in the requests of one replica and compiles their guides, on one event loop.

    New guides are compiled on separate threads, so that answers are still sent. Requests with a
    known guide or without a guide do not wait.
    """

    def __init__(self, builder: EngineBuilder, limits: LimitSettings) -> None:
        self._builder, self._limits = builder, limits
        self._threads = ThreadPoolExecutor(_COMPILERS, "guides")
        # If the task's own guide was evicted from the cache, it does not wait for other guides.
        self._own = ThreadPoolExecutor(1, "own-guide")
        # One thread is enough, since prompts are rendered one by one.
        self._renders = ThreadPoolExecutor(1, "prompts")
        self._compiling: dict[GuideSpec, asyncio.Future[None]] = {}
        self._rules = asyncio.Lock()

    async def request(
        self, asked: Request, id: str, version: int
    ) -> tuple[Request, Guidance | None] | Refusal:
        """Returns the request for the engine and its compiled guide, or a refusal.

        Only unexpected errors are raised.

        Args:
            id: Id of the request in the engine.
            version: Version of the task's record that answers.
        """
        reader, engine, prompt = self._builder.reader, self._builder.engine, asked.prompt
        read = partial(reader.read, asked, id, version)
        # A chat template is rendered by another process.
        slow = asked.templated and self._builder.has_chat_template
        slow = slow or (not isinstance(prompt, tuple) and len(str(prompt)) > _LONG_TEXT)
        try:
            if asked.scoring is not None and version in self._builder.records:
                labels = reader.labels(asked, version)
                if refusal := await self._compiled(labels):
                    return refusal
            if slow:
                request = await asyncio.get_running_loop().run_in_executor(self._renders, read)
            else:
                request = read()
            if asked.n * asked.prompts > 1:
                require_total(request, self._limits.max_total_tokens)
            if request.guide and (refusal := await self._compiled(request.guide)):
                return refusal
            guide = reader.guide(request.guide)
        except FieldError as error:
            return Refusal("invalid", str(error), error.field)
        except ValueError as error:
            return Refusal("invalid", f"{asked.prompt_field}: {error}", asked.prompt_field)
        if not (request.is_plain or engine.rules_compiled):
            async with self._rules:  # one thread at a time, as further threads would only wait
                if not engine.rules_compiled:
                    await asyncio.to_thread(engine.compile_rules)
        return request, guide

    async def _compiled(self, guide: GuideSpec) -> Refusal | None:
        """Waits until a guide is compiled, or returns a refusal.

        A guide is compiled once for all requests that wait for it.

        Raises:
            FieldError: The guide cannot be followed.
        """
        guides, limit_s = self._builder.engine.guides, self._limits.guide_timeout_s
        if guides.known(guide):
            return None
        if (compiling := self._compiling.get(guide)) is None:
            large = sum(not _is_small(other) for other in self._compiling)
            full = large >= self._limits.max_compiling_guides
            if full and not (guide.is_tasks or _is_small(guide)):
                message = f"{large} other guides are being compiled; try again later"
                return Refusal("full", f"{guide.name}: {message}", guide.field)

            def ended(compiled: asyncio.Future[None]) -> None:
                del self._compiling[guide]
                if not compiled.cancelled():
                    compiled.exception()  # retrieve the error, in case no request waits for it

            threads = self._own if guide.is_tasks else self._threads
            compiling = asyncio.get_running_loop().run_in_executor(threads, guides.prepare, guide)
            self._compiling[guide] = compiling
            compiling.add_done_callback(ended)
        try:
            async with asyncio.timeout(limit_s):
                await asyncio.shield(compiling)
        except TimeoutError:  # compiling continues, for a retry
            message = f"{guide.name}: the guide was not ready within {limit_s:g} s; try again later"
            return Refusal("full", message, guide.field)
        except GuideError as error:
            if not guides.known(guide):  # else `request` raises the cached failure
                raise FieldError(guide.field, f"{guide.name}: {error}") from error
        return None

    def close(self) -> None:
        for threads in (self._threads, self._own, self._renders):
            threads.shutdown(wait=False, cancel_futures=True)


def _is_small(guide: GuideSpec) -> bool:
    """Whether a guide is a set of labels that compiles in milliseconds."""
    return guide.kind == "labels" and guide.size_bytes <= _SMALL_LABELS


class DrainRate:
    """The rate at which places become free, and the retry times of refused calls.

    Args:
        rows: Number of calls that are answered at the same time.
    """

    def __init__(self, rows: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._rows, self._clock = rows, clock
        self._marks: deque[float] = deque(maxlen=_KEPT + 1)  # times of the start and the endings
        self._known = rows / _UNKNOWN_S
        self._expected: dict[str, float] = {}  # retry times of refused calls
        self._times: list[tuple[float, str]] = []  # heap of (time, call); entries may be stale

    def began(self, call_id: str) -> None:
        """Notes an accepted call, whose retry is no longer expected."""
        self._expected.pop(call_id, None)
        if not self._marks:
            self._marks.append(self._clock())

    def ended(self) -> None:
        """Notes that a place has become free."""
        self._marks.append(self._clock())

    def idle(self) -> None:
        """Notes that all calls have ended, as idle time must not affect the rate."""
        if len(self._marks) > self._rows:  # with fewer endings, some rows were free
            self._known = self.per_second()
        self._marks.clear()

    def per_second(self) -> float:
        """Places that become free per second; before the first ending, the last known rate.

        The rate falls while no call ends.
        """
        spent = self._clock() - self._marks[0] if self._marks else 0.0
        if len(self._marks) < 2:
            return min(self._known, self._rows / spent if spent > 0 else math.inf)
        return (len(self._marks) - 1) / spent if spent > 0 else math.inf

    def retry_after_s(self, call_id: str, waiting: int) -> float:
        """Seconds until a call that is refused now should retry, at most 60.

        Each call gets its own time, after the calls refused before it, at the rate at which places
        become free. A call that retries too early keeps its time. If the time would exceed 60 s,
        the result is a random time in the last 5 s of the 60, since an earlier retry would fail
        and waste one of the client's retries.

        Args:
            waiting: Number of calls in the queue.
        """
        now = self._clock()
        while self._times and self._times[0][0] <= now:
            at, expected = heapq.heappop(self._times)
            if self._expected.get(expected) == at:
                del self._expected[expected]
        if call_id in self._expected:
            return self._expected[call_id] - now
        wait_s = (1 + waiting / _SLACK + len(self._expected)) / self.per_second()
        if wait_s > _LONGEST_S:
            return random.uniform(_LONGEST_S - _LATEST_S, _LONGEST_S)  # noqa: S311 (no secret)
        self._expected[call_id] = now + wait_s
        heapq.heappush(self._times, (now + wait_s, call_id))
        return wait_s
