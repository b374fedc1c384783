"""Two real replicas of a tiny model, a real gateway and clients, all in this process.

There is no Ray: the line to the replicas loses a call now and then, as if one had died.
"""

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from itertools import count
from pathlib import Path

import httpx
import redis
from prometheus_client import CollectorRegistry

import tiny
from support import completed, index_of, record_of, streamed
from tasc_draft import write_index
from tasc_engine.drafting.neural.card import DrafterCard
from tasc_engine.drafting.neural.files import save_drafter
from tasc_jobs.worker.batch_worker import BatchWorker
from tasc_jobs.worker.one_batch import WorkerSettings
from tasc_protocol import Output, Request
from tasc_runtime.protocol import Pulse, Refusal, TaskStatus
from tasc_serve.access.access_control import AccessControl
from tasc_serve.http.api import create_api
from tasc_serve.http.ray_proxy import ARRIVAL
from tasc_serve.metrics.batch_metrics import BatchMetrics
from tasc_serve.metrics.discovery import MetricsPort
from tasc_serve.metrics.gateway_metrics import GatewayMetrics
from tasc_serve.replica.replica import TaskReplica
from tasc_serve.routing.failover import Failover, RetryBudget
from tasc_serve.routing.fleet import Fleet, ReplicaLost
from tasc_serve.settings import ServeSettings
from tasc_store import ArtifactStore, NeuralDrafting, TaskStore
from tasc_store.batches.batch_store import BatchStore, NewBatch
from tasc_store.batches.files import FileLimits, FileStore
from tasc_store.batches.leases import waiting_batches
from tasc_text import TaskTokenizer

TASK = "tiny"
AT_ONCE = 24  # more than the replicas have places for: 503; more than the task takes: 429
LOST_EVERY = 40


def settings(folder: Path) -> ServeSettings:
    task = {
        "name": TASK,
        "max_requests_per_s": 16,
        "shadow": {"sample_rate": 1.0},
        "collect": {"sample_rate": 1.0, "flush_interval_s": 0.1},
    }
    return ServeSettings.model_validate(
        {
            "tasks": [task],
            "engine": {"rows": 2, "max_model_len": 128, "device": "cpu", "cost_aware": False},
            "limits": {"max_queued_requests": 2},
            "metrics": {"host": "127.0.0.1"},
            "poll_interval_s": 0.1,
            "cache_dir": folder,
        }
    )


def register(client: redis.Redis, folder: Path) -> None:
    """Registers the task, a drafter that is a copy of its model, and an index of its answers."""
    tiny.make_tokenizer(folder)
    model = tiny.make_model(folder, seed=3)
    tokenizer = TaskTokenizer.from_folder(folder)
    drafter = folder / "drafter"
    save_drafter(drafter, model, DrafterCard("independent", tokenizer.fingerprint))
    neural = NeuralDrafting(str(drafter), depth=2, width=2, nodes=4, sure=1.0)
    differs = {"dtype": "float64", "max_tokens": 16, "neural": neural}
    record = record_of(folder, TASK, "{input} =>", **differs)
    TaskStore(client).put(record)
    asked = [tokenizer.encode_prompt(f"{value} =>") for value in tiny.SENTENCES]
    index = index_of(tokenizer, [tiny.plain(model, prompt, 16) for prompt in asked])
    write_index(index, folder / "index")
    store = ArtifactStore(client, TASK, tokenizer.fingerprint)
    store.announce(store.publish(folder / "index", corpus_rows=0, forecast=2.0).version)


def end_a_batch(
    client: redis.Redis, url: str, task: str, folder: Path, registry: CollectorRegistry
) -> None:
    """Makes a worker with metrics in the registry end a batch of an invalid file."""
    files = str(folder / "files")
    upload = FileStore(client, files).begin()
    upload.write(b"no JSON\n")
    file = upload.keep(FileLimits(10, 10**6), "in.jsonl", "batch", 3600)
    new = NewBatch(file.id, "/v1/completions", "24h", 3600, task, 3600, 3600)
    BatchStore(client).create(new, 10)
    worker = BatchWorker(
        client, WorkerSettings(url, folder, files), [task], metrics=BatchMetrics(registry)
    )
    worker.run_waiting()


class Line:
    """The connection to replicas in this process; it fails regularly, as if one had died."""

    def __init__(self, replicas: dict[str, TaskReplica]) -> None:
        self.replicas = replicas
        self._calls = count(1)

    async def complete(self, replica: str, call: Request) -> Output | Refusal:
        return await completed(self._of(replica), call)

    def stream(self, replica: str, call: Request) -> AsyncGenerator[Output | Refusal, None]:
        return streamed(self._of(replica), call)

    async def pulse(self, name: str) -> Pulse:
        return self.replicas[name].pulse()

    def _of(self, replica: str) -> TaskReplica:
        if next(self._calls) % LOST_EVERY == 0:
            raise ReplicaLost(replica, "died")
        return self.replicas[replica]


class Backend:
    """The backend of the gateway's application; its replicas are watched while ``fleet`` is."""

    tasks = (TASK,)
    store_fault = None

    def __init__(self, line: Line, own: ServeSettings, metrics: GatewayMetrics) -> None:
        seen = partial(metrics.set_replicas, TASK)
        self.fleet = Fleet(TASK, line.replicas.keys, line.pulse, 5, seen)
        budget = RetryBudget(1, 100)
        self._calls = Failover(TASK, self.fleet, line, own.failover, budget, metrics)

    def router(self, task: str) -> Failover:
        return self._calls

    async def settled(self) -> None:
        await self.fleet.settled()

    def status(self, task: str) -> TaskStatus | None:
        return self.fleet.status

    async def metrics(self) -> Sequence[str]:
        return ()

    def metrics_targets(self) -> Sequence[str]:
        return ()


class ServedLoad:
    """Serves and sends requests until ``close``."""

    def __init__(self, client: redis.Redis, redis_url: str, folder: Path) -> None:
        register(client, folder)
        own = settings(folder / "cache")
        self._replicas = {n: TaskReplica(own, redis_url, own.tasks[0]) for n in ("a", "b")}
        self._registry = CollectorRegistry()
        end_a_batch(client, redis_url, TASK, folder / "batches", self._registry)
        metrics = GatewayMetrics(self._registry, [TASK])
        metrics.set_batches(waiting_batches(client))
        self._port = MetricsPort(client, self._registry, host="127.0.0.1", ttl_s=15)
        backend = Backend(Line(self._replicas), own, metrics)
        self._fleet = backend.fleet
        access = AccessControl.of(own, client, metrics)
        self._api = create_api(backend, own.limits, metrics, access=access)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join()
        self._port.close()
        for replica in self._replicas.values():
            replica.__del__()

    async def _serve(self) -> None:
        watching = asyncio.create_task(self._fleet.watch())
        transport = httpx.ASGITransport(app=self._api)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            while not self._closing.is_set():
                await asyncio.gather(*(self._ask(client, i) for i in range(AT_ONCE)))
        watching.cancel()

    async def _ask(self, client: httpx.AsyncClient, i: int) -> None:
        value = tiny.SENTENCES[i % len(tiny.SENTENCES)]
        system = {"role": "system", "content": "counted, since the template has no place for it"}
        body = {"model": TASK, "messages": [system, {"role": "user", "content": value}]}
        arrived = {ARRIVAL: str(time.time_ns() // 1000)}  # in HAProxy's format
        await client.post(
            "/v1/chat/completions", json=body | {"stream": i % 2 == 0}, headers=arrived
        )
