"""A batch that a real worker ends without an engine, since its file is none: what that counts."""

from pathlib import Path

import redis
from prometheus_client import CollectorRegistry

from tasc_jobs.worker.batch_worker import BatchWorker
from tasc_jobs.worker.one_batch import WorkerSettings
from tasc_serve.metrics.batch_metrics import BatchMetrics
from tasc_store.batches.batch_store import BatchStore, NewBatch
from tasc_store.batches.files import FileLimits, FileStore

_ROOM = FileLimits(10, 10**6)


def end_a_batch(
    client: redis.Redis, url: str, task: str, folder: Path, registry: CollectorRegistry
) -> None:
    """Ask for a batch of the task, and have it ended by a worker that counts in the registry."""
    upload = FileStore(client).begin()
    upload.write(b"no JSON\n")
    file = upload.keep(_ROOM, "in.jsonl", "batch", 3600)
    new = NewBatch(file.id, "/v1/completions", "24h", 3600, task, 3600, 3600)
    BatchStore(client).create(new, 10)
    worker = BatchWorker(
        client, WorkerSettings(url, folder), [task], metrics=BatchMetrics(registry)
    )
    worker.run_waiting()
