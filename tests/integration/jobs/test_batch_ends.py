"""How a batch ends that its worker cannot answer to the end: real Redis, and no engine."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from prometheus_client import CollectorRegistry

from tasc_jobs.batch import folder, job
from tasc_jobs.batch.work import EngineFailed, JobReport, JobSpec, NoEngine, Record, Row
from tasc_jobs.errors import ClusterError, JobError
from tasc_jobs.worker import one_batch
from tasc_jobs.worker.batch_worker import BatchWorker, TaskBackoff
from tasc_jobs.worker.one_batch import Ended, HeldLease, OneBatch, WorkerSettings
from tasc_serve.metrics.batch_metrics import BatchMetrics
from tasc_store import StoreUnreachable, TaskRecord, TaskStore
from tasc_store.batches.batch_store import Batch, BatchStore, NewBatch
from tasc_store.batches.files import FileLimits, FileStore, StoredFile
from tasc_store.batches.leases import BatchLease, Counts, take_batch

pytestmark = pytest.mark.redis

CONTENT = {
    "text": "hi", "tokens": [1], "finish_reason": "stop", "model": "m", "adapter": None,
    "index_version": None,
}  # fmt: skip


class Asked:
    """A batch of ten lines, and a worker's settings for it."""

    def __init__(self, client: redis.Redis, url: str, task: str, work: Path) -> None:
        TaskStore(client).put(TaskRecord(task, "m", "f" * 32, "{input}"))
        self.client, self.task, self.settings = client, task, WorkerSettings(url, work)
        body = {"model": task, "prompt": "x"}
        lines = (
            {"custom_id": f"r{i}", "method": "POST", "url": "/v1/completions", "body": body}
            for i in range(10)
        )
        upload = FileStore(client).begin()
        upload.write("".join(json.dumps(line) + "\n" for line in lines).encode())
        self.said: list[str] = []
        self.registry = CollectorRegistry()
        self.metrics = BatchMetrics(self.registry)
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

    def worker(self, most_faults: int = 5) -> BatchWorker:
        return BatchWorker(
            self.client,
            self.settings,
            [self.task],
            poll_s=0.01,
            backoff=TaskBackoff(most_faults, first_s=0.01),
            metrics=self.metrics,
            say=self.said.append,
        )

    def counted(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(name, {"task": self.task, **labels})

    def lines(self, id_: str | None) -> list[dict[str, Any]]:
        assert id_
        files = FileStore(self.client)
        return [json.loads(x) for x in b"".join(files.blocks(files.get(id_))).splitlines()]

    def answer_some(self) -> None:
        """As a worker does that is killed with five lines answered."""
        spec = self.settings.spec(self.found())
        spec.folder.parent.mkdir(parents=True, exist_ok=True)
        with folder.JobFolder.held(spec.folder) as held:
            held.begin(spec.pins, 1, None)
            held.add([answered(i) for i in (6, 0, 1, 2, 3)])


def answered(row: int) -> Record:
    return Record(row, f"r{row}", row + 1, None, CONTENT, None, 1, 1)


@pytest.fixture
def asked(
    client: redis.Redis, redis_url: str, task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Asked:
    monkeypatch.setattr(job, "require_ray", lambda: None)
    return Asked(client, redis_url, task, tmp_path)


def all_done(*args: Any, **named: Any) -> JobReport:
    """As `run_job` where there is nothing left to do."""
    args[3]([answered(i) for i in range(10)], True)
    return JobReport(10, 0, 10, 10)


@pytest.mark.parametrize("content", ['{"format": 1, "pins": {}}', '{"format": 2, "pi', ""])
def test_a_batch_that_another_release_began_is_answered_anew(
    asked: Asked, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    asked.answer_some()
    one = asked.one()
    (asked.settings.spec(one.batch).folder / "job.json").write_text(content)
    starts: list[JobSpec] = []

    def start(*args: Any, **named: Any) -> JobReport:
        starts.append(args[0])
        return all_done(*args, **named) if args[0].restart else job.run_job(*args, **named)

    monkeypatch.setattr(one_batch, "run_job", start)
    assert one.run().status == "completed"
    assert [spec.restart for spec in starts] == [False, True]
    assert (asked.found().status, asked.found().completed) == ("completed", 10)


def test_a_batch_that_fails_at_last_hands_out_what_was_answered(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked.answer_some()

    def fails(one: OneBatch) -> Ended:
        raise JobError("a line ends every engine")

    monkeypatch.setattr(OneBatch, "run", fails)
    asked.worker().run_waiting()
    batch = asked.found()
    assert batch.status == "failed"
    assert [fault.message for fault in batch.errors] == ["a line ends every engine"]
    assert (batch.total, batch.completed, batch.failed) == (10, 5, 0)
    names = [line["custom_id"] for line in asked.lines(batch.output_file_id)]
    assert names == ["r0", "r1", "r2", "r3", "r6"]
    assert {line["error"]["code"] for line in asked.lines(batch.error_file_id)} == {"batch_failed"}


def test_a_batch_whose_state_cannot_be_read_fails_without_answers(asked: Asked) -> None:
    asked.answer_some()
    (asked.settings.spec(asked.found()).folder / "job.json").write_text("damaged")
    assert asked.one().failed("worker_failed", "why").status == "failed"
    batch = asked.found()
    assert (batch.status, batch.output_file_id) == ("failed", None)
    assert [(fault.code, fault.message) for fault in batch.errors] == [("worker_failed", "why")]


def test_a_sick_cluster_ends_the_worker_and_fails_no_batch(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(one: OneBatch) -> Ended:
        raise NoEngine("0 of 1 engines are up")

    monkeypatch.setattr(OneBatch, "run", fails)
    for _ in range(8):
        with pytest.raises(ClusterError):
            asked.worker().run_for_ever()
    assert asked.found().status == "validating"
    assert asked.taken().batch.attempts == 1


def test_engines_that_cannot_be_built_end_the_worker_and_fail_no_batch(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(one: OneBatch) -> Ended:
        raise EngineFailed("OSError: no folder /models/m")

    monkeypatch.setattr(OneBatch, "run", fails)
    for _ in range(3):
        with pytest.raises(ClusterError) as ended:
            asked.worker(most_faults=4).run_for_ever()
        assert "/models/m" in str(ended.value)
    assert (asked.found().status, asked.found().attempts) == ("validating", 0)
    assert asked.counted("tasc_batch_engine_failures_total") == 12
    assert sum("does not count against the batch" in text for text in asked.said) == 9
    assert asked.taken().batch.attempts == 1


def test_a_worker_whose_engine_comes_up_at_last_answers_the_batch(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[int] = []

    def at_last(*args: Any, **named: Any) -> JobReport:
        tries.append(1)
        if len(tries) < 4:
            raise EngineFailed("no memory")
        return all_done(*args, **named)

    monkeypatch.setattr(one_batch, "run_job", at_last)
    asked.worker().run_waiting()
    assert len(tries) == 4
    assert (asked.found().status, asked.found().attempts) == ("completed", 1)
    assert asked.counted("tasc_batch_ended_total", status="completed") == 1
    assert asked.counted("tasc_batch_in_progress") == 0


def test_a_store_that_is_away_when_a_batch_is_given_back_counts_no_attempt(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = asked.worker()

    def away(*args: object) -> None:
        raise StoreUnreachable("away")

    for _ in range(8):
        with monkeypatch.context() as gone:
            gone.setattr(OneBatch, "run", away)
            gone.setattr(BatchLease, "release", away)
            with pytest.raises(StoreUnreachable):
                worker.run_waiting()
    monkeypatch.setattr(one_batch, "run_job", all_done)
    worker.run_waiting()
    assert (asked.found().status, asked.found().attempts) == ("completed", 1)


def test_a_batch_that_ended_is_not_said_to_be_lost(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = BatchLease.finish

    def slow(lease: BatchLease, *args: Any) -> None:
        """The thread that renews is heard before the rest of it."""
        finish(lease, *args)
        hold.tell(Counts(10))
        assert hold.stop == "lost"

    monkeypatch.setattr(BatchLease, "finish", slow)
    monkeypatch.setattr(one_batch, "run_job", all_done)
    hold = HeldLease(asked.taken())
    assert OneBatch(asked.client, hold, asked.settings).run().status == "completed"


def test_a_batch_that_is_anothers_is_lost(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_batch, "run_job", all_done)
    one = asked.one()
    (name,) = asked.client.scan_iter(f"*:lease:{asked.id}")
    asked.client.set(name, "another's")
    assert one.run().status == "lost"


class Read:
    """Stands in for `run_job`: reads all rows, then fails if told, or does what is left to do."""

    def __init__(self, *ends: Exception | None) -> None:
        self.ends = list(ends)
        self.read: list[list[Row]] = []

    def __call__(self, *args: Any, **named: Any) -> JobReport:
        self.read.append(list(args[1]()))
        if end := self.ends.pop(0):
            raise end
        return all_done(*args, **named)


def test_a_batch_goes_on_from_its_own_copy_of_a_file_that_expired(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, one = Read(JobError("the disk failed"), None), asked.one()
    monkeypatch.setattr(one_batch, "run_job", read)
    with pytest.raises(JobError):
        one.run()
    (name,) = asked.client.scan_iter(f"*:file:{asked.file.id}")
    asked.client.delete(name)
    assert one.run().status == "completed"
    assert (asked.found().completed, read.read[1]) == (10, read.read[0])


def test_without_a_copy_a_file_that_expired_is_lost(asked: Asked) -> None:
    (name,) = asked.client.scan_iter(f"*:file:{asked.file.id}")
    asked.client.delete(name)
    ended = asked.one().run()
    assert [fault.code for fault in ended.errors] == ["input_file_lost"]


def test_a_copy_that_is_not_what_was_uploaded_is_fetched_again(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, one = Read(JobError("the disk failed"), None), asked.one()
    monkeypatch.setattr(one_batch, "run_job", read)
    with pytest.raises(JobError):
        one.run()
    (copy,) = asked.settings.folder_of(one.batch).glob("input*")
    copy.write_bytes(bytes(copy.stat().st_size))
    assert one.run().status == "completed"
    assert read.read[1] == read.read[0]


def test_two_workers_that_fetch_a_file_at_once_do_not_meet(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, one, blocks = Read(JobError("first"), JobError("second")), asked.one(), FileStore.blocks

    def meanwhile(files: FileStore, file: StoredFile) -> Iterator[bytes]:
        monkeypatch.setattr(FileStore, "blocks", blocks)
        whole = b"".join(files.blocks(file))
        yield whole[:7]
        with pytest.raises(JobError):
            one.run()
        yield whole[7:]

    monkeypatch.setattr(one_batch, "run_job", read)
    monkeypatch.setattr(FileStore, "blocks", meanwhile)
    with pytest.raises(JobError):
        one.run()
    assert len(read.read) == 2
    assert read.read[0] == read.read[1]
    left = asked.settings.folder_of(one.batch).iterdir()
    assert [path.name for path in left] == ["input.jsonl"]
