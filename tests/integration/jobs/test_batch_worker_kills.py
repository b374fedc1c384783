"""Tests that each line is in one file once if a worker is killed, stopped, or loses its batch."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest
import ray
import redis
from batch_jobs import WorkerRun, answers, asked, batch_service, line, record_of
from openai import OpenAI
from openai.types import Batch as Shown

from support import eventually
from tasc_jobs.batch.work import JobProgress
from tasc_serve.metrics.discovery import live_targets
from tasc_store import TaskStore, connect
from tasc_store.batches.batch_store import Batch, BatchStore, NewBatch
from tasc_store.batches.leases import BatchLease, take_batch

pytestmark = [pytest.mark.redis, pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]
LINES = 3000  # more than are answered between two checks of their number
BAD = LINES // 100
_CONFIG = """
tasks: [{name: any}]
engine: {rows: 8, max_model_len: 64, cost_aware: false}
"""


def lines(task: str, count: int = LINES) -> list[str]:
    """Returns lines; one in a hundred cannot be answered."""
    return [
        line(task, f"r{i}", f"wake me at {i} " + "please " * (i % 5 + (i % 100 == 7) * 90))
        for i in range(count)
    ]


def files_of(openai: OpenAI, batch: Shown) -> tuple[dict[str, dict], dict[str, dict]]:
    """Returns answers and errors of an ended batch, checked to have each line once."""
    good, bad = answers(openai, batch.output_file_id), answers(openai, batch.error_file_id)
    assert not good.keys() & bad.keys()
    return good, bad


def said(found: dict[str, dict]) -> dict[str, object]:
    return {name: each["response"]["body"]["choices"] for name, each in found.items()}


@contextmanager
def worker_process(url: str, task: str, work: Path) -> Iterator[subprocess.Popen[str]]:
    """Runs `tasc worker` on this process's Ray, and kills it at the end of the block."""
    config = work.with_suffix(".yaml")
    config.write_text(_CONFIG)
    code = "from tasc_jobs.cli.main import main; main()"
    command = [sys.executable, "-c", code, "worker", "--tasks", task, "--redis-url", url]
    command += ["--work-dir", str(work), "--config", str(config), "--lease", "2", "--poll", "0.1"]
    env = os.environ | {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    process = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        print(process.communicate()[1])  # shown where the test fails


def done(openai: OpenAI, batch: Shown) -> int:
    return openai.batches.retrieve(batch.id).request_counts.completed


def go(run: WorkerRun, least: int = 0, action: Callable[[], object] = lambda: None) -> list[int]:
    """Answers batches, and calls ``action`` once ``least`` lines are done.

    Returns the number of finished lines at each check.
    """
    happened, seen = list[object](), list[int]()

    def told(batch: Batch, progress: JobProgress) -> None:
        done = progress.report.rows
        seen.append(done)
        if least <= done < (progress.total or 0) and progress.engines and not happened:
            happened.append(action())

    run.worker(on_progress=told).run_waiting()
    assert happened or not least
    return seen


@pytest.fixture(scope="module")
def undisturbed(redis_url, ray_cluster, folder, tmp_path_factory):
    with connect(redis_url) as client, batch_service(client) as openai:
        TaskStore(client).put(record_of("undisturbed", folder))
        batch = asked(openai, lines("undisturbed"))
        go(WorkerRun(client, redis_url, "undisturbed", tmp_path_factory.mktemp("undisturbed")))
        good, bad = files_of(openai, openai.batches.retrieve(batch.id))
    assert (len(good), len(bad)) == (LINES - BAD, BAD)
    return said(good)


def running(client: redis.Redis, task: str) -> float:
    """Returns the number of the task's running batches from the metrics of workers in `/sd`."""
    found = 0.0
    for target in live_targets(client):
        with suppress(httpx.HTTPError):  # one that was killed is listed for a while
            text = httpx.get(f"http://{target}/metrics").text
            counted = re.search(rf'^tasc_batch_in_progress{{task="{task}"}} (.*)$', text, re.M)
            found += float(counted[1]) if counted else 0
    return found


def test_killed_worker_neither_loses_nor_repeats_lines(
    openai: OpenAI, redis_url: str, served: str, run: WorkerRun, undisturbed: dict[str, object]
) -> None:
    batch = asked(openai, lines(served))
    with worker_process(redis_url, served, run.settings.folder):
        eventually(lambda: running(run.client, served) == 1)  # before its engine is up
        eventually(lambda: done(openai, batch) >= 20)
    assert openai.batches.retrieve(batch.id).status == "in_progress"
    reached = done(openai, batch)
    assert 20 <= reached < LINES
    resumed: list[int] = []
    while not run.ended:  # until the lease of the dead worker has expired
        resumed += go(run)
    assert resumed[0] >= reached
    whole = openai.batches.retrieve(batch.id)
    assert (whole.request_counts.completed, whole.request_counts.failed) == (LINES - BAD, BAD)
    good, bad = files_of(openai, whole)
    assert said(good) == undisturbed
    assert (list(good), len(bad)) == ([f"r{i}" for i in range(LINES) if i % 100 != 7], BAD)


@pytest.mark.slow("thousands of lines")
def test_cancelled_batch_keeps_its_answers(openai: OpenAI, run: WorkerRun, served: str) -> None:
    count = 4000  # more than are answered before it is noticed
    batch = asked(openai, lines(served, count))
    seen: list[str] = []
    go(run, 1, lambda: seen.append(openai.batches.cancel(batch.id).status))
    assert seen == ["cancelling"]
    cancelled = openai.batches.retrieve(batch.id)
    assert cancelled.status == "cancelled"
    assert cancelled.cancelled_at is not None
    good, bad = files_of(openai, cancelled)
    assert good
    assert len(good) + len(bad) == count
    left = {n for n, each in bad.items() if (each["error"] or {}).get("code") == "batch_cancelled"}
    assert left
    counts = cancelled.request_counts
    assert (counts.total, counts.completed) == (count, len(good))
    assert (counts.failed, run.left()) == (len(bad) - len(left), [])


def test_batch_expires_at_its_deadline(openai: OpenAI, run: WorkerRun, served: str) -> None:
    text = "".join(lines(served, 10_000)).encode()
    file = openai.files.create(file=("in.jsonl", text), purpose="batch")
    window_s = 4  # more than it takes to begin, less than all lines take
    given = (file.id, "/v1/chat/completions", "24h", window_s, served)
    new = NewBatch(*given, kept_s=7200, output_ttl_s=3600)
    id_ = BatchStore(run.client).create(new, max_batches=1000).id
    go(run)
    expired = openai.batches.retrieve(id_)
    assert expired.status == "expired"
    assert expired.expired_at is not None
    good, bad = files_of(openai, expired)
    assert len(good) + len(bad) == 10_000
    codes = {(each["error"] or {}).get("code") for each in bad.values()}
    assert "batch_expired" in codes


@pytest.mark.slow("two jobs")
def test_worker_does_not_touch_a_batch_that_another_worker_holds(openai, run, served, undisturbed):
    batch = asked(openai, lines(served))
    others: list[BatchLease] = []

    def take() -> None:
        """Takes the batch, as if this worker had been silent for long."""
        (name,) = run.client.scan_iter(f"*:lease:{batch.id}")
        run.client.delete(name)
        lease = take_batch(run.client, 600.0, [served])
        assert lease
        others.append(lease)

    go(run, 1, take)
    assert run.ended[-1].status == "lost"
    assert openai.batches.retrieve(batch.id).status == "in_progress"
    others[0].release()
    go(run)
    good, bad = files_of(openai, openai.batches.retrieve(batch.id))
    assert (said(good), len(bad)) == (undisturbed, BAD)
