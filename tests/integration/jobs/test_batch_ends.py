"""Tests the end of batches that a worker cannot finish, with a real Redis and no engine."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
from batch_jobs import FILES, WorkerRun, request

from support import failing, refused
from tasc_jobs.batch import folder, job
from tasc_jobs.batch.work import EngineFailed, JobBusy, JobReport, JobSpec, NoEngine, Record, Row
from tasc_jobs.errors import ClusterError, JobError
from tasc_jobs.worker import one_batch
from tasc_jobs.worker.one_batch import Ended, HeldLease, OneBatch
from tasc_store import StoreUnreachable, TaskRecord, TaskStore
from tasc_store.batches.batch_store import Batch, BatchStore, NewBatch
from tasc_store.batches.files import RECORDS, FileLimits, FileStore
from tasc_store.batches.leases import BatchLease, Counts, take_batch

pytestmark = pytest.mark.redis

CONTENT = {
    "text": "hi", "tokens": [1], "finish_reason": "stop", "model": "m", "adapter": None,
    "index_version": None,
}  # fmt: skip


class Asked(WorkerRun):
    """A batch of ten lines, and workers for it with stand-ins for their job."""

    def __init__(
        self, client: redis.Redis, url: str, task: str, work: Path, patch: pytest.MonkeyPatch
    ) -> None:
        super().__init__(client, url, task, work)
        self.patch = patch
        patch.setattr(job, "require_ray", lambda: None)
        TaskStore(client).put(TaskRecord(task, "m", "f" * 32, "{input}"))
        body = {"model": task, "prompt": "x"}
        upload = FileStore(client, FILES).begin()
        for i in range(10):
            upload.write(request(f"r{i}", "/v1/completions", body).encode())
        self.file = upload.keep(FileLimits(10**6, 10**12), "in.jsonl", "batch", 3600)
        new = NewBatch(self.file.id, "/v1/completions", "24h", 86_400, task, 7200, 3600)
        self.id = BatchStore(client).create(new, 10**6).id

    def taken(self) -> BatchLease:
        lease = take_batch(self.client, 60.0, [self.task])
        assert lease
        return lease

    def one(self) -> OneBatch:
        return OneBatch(self.client, HeldLease(self.taken()), self.settings)

    def found(self) -> Batch:
        return BatchStore(self.client).get(self.id)

    def batch_does(self, run: Callable[..., Ended]) -> None:
        self.patch.setattr(OneBatch, "run", run)

    def job_does(self, run: Callable[..., JobReport]) -> None:
        self.patch.setattr(one_batch, "run_job", run)

    def expire_file(self) -> None:
        self.client.hdel(RECORDS, self.file.id)

    def lines(self, id_: str | None) -> list[dict[str, Any]]:
        assert id_
        files = FileStore(self.client, FILES)
        return [json.loads(x) for x in b"".join(files.blocks(files.get(id_))).splitlines()]

    def answer_some(self) -> None:
        """Simulates a worker that is killed with five lines answered."""
        spec = self.settings.spec(self.found())
        spec.folder.parent.mkdir(parents=True, exist_ok=True)
        with folder.JobFolder.held(spec.folder) as held:
            held.begin(spec.pins, 1, None)
            held.add([answered(i) for i in (6, 0, 1, 2, 3)])


def answered(row: int) -> Record:
    return Record(row, f"r{row}", row + 1, None, CONTENT, None, 1, 1)


@pytest.fixture
def asked(client, redis_url, task, tmp_path, monkeypatch):
    return Asked(client, redis_url, task, tmp_path, monkeypatch)


def all_done(*args: Any, **named: Any) -> JobReport:
    """Stands in for `run_job` when nothing is left to do."""
    args[3]([answered(i) for i in range(10)], True)
    return JobReport(10, 0, 10, 10)


@pytest.mark.parametrize("content", ['{"format": 1, "pins": {}}', '{"format": 2, "pi', ""])
def test_batch_with_an_unreadable_job_folder_starts_again(asked: Asked, content: str) -> None:
    asked.answer_some()
    one = asked.one()
    (asked.settings.spec(one.batch).folder / "job.json").write_text(content)
    starts: list[JobSpec] = []

    def start(*args: Any, **named: Any) -> JobReport:
        starts.append(args[0])
        return all_done(*args, **named) if args[0].restart else job.run_job(*args, **named)

    asked.job_does(start)
    assert (one.run().status, [spec.restart for spec in starts]) == ("completed", [False, True])
    assert (asked.found().status, asked.found().completed) == ("completed", 10)


def test_batch_that_fails_permanently_keeps_its_answers(asked: Asked) -> None:
    asked.answer_some()
    asked.batch_does(failing(JobError("a line ends every engine")))
    asked.worker().run_waiting()
    batch = asked.found()
    assert batch.status == "failed"
    assert sum("ends every engine" in text for text in asked.said) == 5
    (fault,) = batch.errors
    assert (fault.code, fault.message) == ("worker_failed", "a line ends every engine")
    assert (batch.total, batch.completed, batch.failed) == (10, 5, 0)
    names = [line["custom_id"] for line in asked.lines(batch.output_file_id)]
    assert names == ["r0", "r1", "r2", "r3", "r6"]
    assert {line["error"]["code"] for line in asked.lines(batch.error_file_id)} == {"batch_failed"}


def test_batch_with_unreadable_state_fails_without_answers(asked: Asked) -> None:
    asked.answer_some()
    (asked.settings.spec(asked.found()).folder / "job.json").write_text("damaged")
    assert asked.one().failed("worker_failed", "why").status == "failed"
    batch = asked.found()
    assert (batch.status, batch.output_file_id) == ("failed", None)
    assert [(fault.code, fault.message) for fault in batch.errors] == [("worker_failed", "why")]


def test_cluster_without_engines_ends_the_worker_and_fails_no_batch(asked: Asked) -> None:
    asked.batch_does(failing(NoEngine("0 of 1 engines are up")))
    for _ in range(8):
        with pytest.raises(ClusterError):
            asked.worker().run_for_ever()
    assert (asked.found().status, asked.taken().batch.attempts) == ("validating", 1)


def test_batch_that_runs_in_another_process_counts_no_attempt(asked: Asked) -> None:
    attempts: list[int] = []

    def busy(one: OneBatch) -> Ended:
        attempts.append(one.batch.attempts)
        if len(attempts) < 8:
            raise JobBusy("another process works on the job")
        return one.failed("done", "at last")

    asked.batch_does(busy)
    asked.worker().run_waiting()
    assert (attempts, asked.found().status) == ([1] * 8, "failed")


def test_broken_engines_end_the_worker_and_fail_no_batch(asked: Asked) -> None:
    asked.batch_does(failing(EngineFailed("OSError: no folder /models/m")))
    for _ in range(3):
        with refused(ClusterError, "/models/m"):
            asked.worker(most_faults=4).run_for_ever()
    assert (asked.found().status, asked.found().attempts) == ("validating", 0)
    assert asked.counted("tasc_batch_engine_failures_total") == 12
    assert sum("does not count against the batch" in text for text in asked.said) == 9
    assert asked.taken().batch.attempts == 1


def test_worker_answers_the_batch_once_its_engine_starts(asked: Asked) -> None:
    tries: list[int] = []

    def at_last(*args: Any, **named: Any) -> JobReport:
        tries.append(1)
        if len(tries) < 4:
            raise EngineFailed("no memory")
        return all_done(*args, **named)

    asked.job_does(at_last)
    asked.worker().run_waiting()
    assert len(tries) == 4
    assert (asked.found().status, asked.found().attempts) == ("completed", 1)
    assert asked.counted("tasc_batch_ended_total", status="completed") == 1
    assert asked.counted("tasc_batch_in_progress") == 0


def test_attempts_that_end_in_a_store_outage_are_not_counted(asked: Asked) -> None:
    worker, away = asked.worker(), failing(StoreUnreachable("away"))
    for _ in range(8):
        with asked.patch.context() as gone:
            gone.setattr(OneBatch, "run", away)
            gone.setattr(BatchLease, "release", away)
            with pytest.raises(StoreUnreachable):
                worker.run_waiting()
    asked.job_does(all_done)
    worker.run_waiting()
    assert (asked.found().status, asked.found().attempts) == ("completed", 1)


def test_ended_batch_is_not_reported_as_lost(asked: Asked) -> None:
    finish = BatchLease.finish

    def slow(lease: BatchLease, *args: Any) -> None:
        """Gives the renewing thread time to act first."""
        finish(lease, *args)
        hold.report(Counts(10))
        assert hold.stop == "lost"

    asked.patch.setattr(BatchLease, "finish", slow)
    asked.job_does(all_done)
    hold = HeldLease(asked.taken())
    assert OneBatch(asked.client, hold, asked.settings).run().status == "completed"


def test_batch_taken_by_another_worker_is_reported_as_lost(asked: Asked) -> None:
    asked.job_does(all_done)
    one = asked.one()
    (name,) = asked.client.scan_iter(f"*:lease:{asked.id}")
    asked.client.set(name, "another's")
    assert one.run().status == "lost"


class Read:
    """Stands in for `run_job`: reads all rows, then fails if required, or does the rest."""

    def __init__(self, *ends: Exception | None) -> None:
        self.ends = list(ends)
        self.read: list[list[Row]] = []

    def __call__(self, *args: Any, **named: Any) -> JobReport:
        self.read.append(list(args[1]()))
        if end := self.ends.pop(0):
            raise end
        return all_done(*args, **named)


def test_batch_resumes_from_its_local_file_or_a_new_download(asked: Asked) -> None:
    read, one = Read(*[JobError("the disk failed")] * 2, None), asked.one()
    asked.job_does(read)
    with pytest.raises(JobError):
        one.run()
    (copy,) = asked.settings.folder_of(one.batch).glob("input*")
    copy.write_bytes(bytes(copy.stat().st_size))
    with pytest.raises(JobError):
        one.run()
    asked.expire_file()
    assert (one.run().status, asked.found().completed) == ("completed", 10)
    assert read.read[0] == read.read[1] == read.read[2]


def test_batch_fails_if_its_file_expired_before_the_download(asked: Asked) -> None:
    asked.expire_file()
    ended = asked.one().run()
    assert [fault.code for fault in ended.errors] == ["input_file_lost"]
