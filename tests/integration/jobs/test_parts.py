"""Tests of batch jobs that write parts: equal answers, kills, bad input, object stores."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import ray
from batch_jobs import ENGINE, record_of, rows
from ray.exceptions import ActorDiedError, ActorUnavailableError

from killable import pids
from object_store import Endpoint, Faults, FaultyProxy, ObjectStore
from support import eventually, write_rows
from tasc_command import Command
from tasc_jobs.batch import job
from tasc_jobs.batch.generate import RowAnswers, generate
from tasc_jobs.batch.inputs import Source
from tasc_jobs.batch.parts import MANIFEST, PartActor, PartSpec, Plan, generate_parts
from tasc_jobs.batch.places import Place
from tasc_jobs.batch.repeats import KnownContents, Repeats
from tasc_jobs.batch.work import JobChanged, JobProgress, JobReport, Record, Row
from tasc_protocol import Request
from tasc_runtime.engine_settings import EngineSettings
from tasc_runtime.errors import FileError
from tasc_store import TaskStore, connect

pytestmark = [pytest.mark.redis, pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]
TASK = "parts"
COUNT = 400


def answer(redis_url: str, source: Source, out: Path | str, **more: Any) -> JobReport:
    return generate_parts(redis_url, TASK, Plan.of(source, str(out), 2000), engine=ENGINE, **more)


def contents(folder: Path) -> dict[str, bytes]:
    files = (file for file in folder.rglob("*") if file.is_file() and file.name[0] != ".")
    found = {str(file.relative_to(folder)): file.read_bytes() for file in files}
    del found[MANIFEST]
    return found


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    folder = tmp_path_factory.mktemp("in")
    write_rows(folder / "a.jsonl", rows(COUNT // 2))
    later = [{**row, "id": f"s{i}"} for i, row in enumerate(rows(COUNT // 2))]
    write_rows(folder / "b.jsonl", [*later, [1]])
    return Source.of(folder)


@pytest.fixture(scope="module")
def right(redis_url, ray_cluster, folder, source, tmp_path_factory) -> dict[str, bytes]:
    """The files of a job that nothing disturbs, with the rows of a job that writes one file."""
    with closing(connect(redis_url)) as client:
        TaskStore(client).put(record_of(TASK, folder))
    out = tmp_path_factory.mktemp("out")
    generate(redis_url, TASK, source, out / "one.jsonl", engine=ENGINE)
    report = answer(redis_url, source, out / "parts", actors=2, dedupe_bytes=0)
    assert (report.rows, report.errors) == (COUNT + 1, 1)
    found = contents(out / "parts")
    names = sorted(name for name in found if name.startswith("part-"))
    assert len(names) > 8
    assert b"".join(found[name] for name in names) == (out / "one.jsonl").read_bytes()
    (refused,) = [json.loads(content) for name, content in found.items() if "_rejected" in name]
    assert refused["reason"] == "not a JSON object"
    return found


def test_engines_copy_answers_of_each_other_until_the_actor_that_keeps_them_dies() -> None:
    actor = ray.remote(num_cpus=0)(KnownContents).remote(1 << 20)
    one, other = Repeats(1 << 20, actor), Repeats(1 << 20, actor)
    first, second, third = (Row(i, f"r{i}", said, i, "f") for i, said in enumerate("aab"))

    def exchanged(repeats: Repeats, rows: list[Row]) -> None:
        for _ in range(2):  # the second call takes what the first one has asked for
            repeats.exchange(rows)
            ray.wait([repeats._call], timeout=60)

    def is_dead() -> bool:
        try:
            ray.get(actor.find.remote([]), timeout=60)
        except ActorDiedError:
            return True
        except ActorUnavailableError:
            pass
        return False

    assert not one.add(first)
    one.finish(first, Record.of(first, {"text": "a"}, None, 1, 1))
    exchanged(one, [])
    exchanged(other, [second, third])
    assert [other.add(row) for row in (second, third)] == [True, False]
    (copy,) = other.copies()
    assert (copy.id, copy.content, copy.repeat) == ("r1", {"text": "a"}, True)
    ray.kill(actor)  # does not wait: the actor may still answer calls
    eventually(is_dead)
    exchanged(one, [third])
    assert one._shared is None
    assert not one.add(third)


class Slow:
    """Stands in for an engine: answers four rows in 0.3 s."""

    def __init__(self) -> None:
        self.decoded = 0

    def work(self, rows: Sequence[Row]) -> list[Record]:
        time.sleep(0.3)
        self.decoded += len(rows)
        return [Record.of(row, {"text": row.payload}, None, 1, 1) for row in rows]


def test_second_engine_decodes_few_of_the_rows_that_the_first_has_answered(tmp_path) -> None:
    lines = [{"input": f"row {i}"} for i in range(100)]
    source = Source.of(write_rows(tmp_path / "in.jsonl", lines))
    shared = ray.remote(num_cpus=0)(KnownContents).remote(1 << 20)
    decoded, outputs = [], []
    for name in ("one", "other"):
        plan = Plan.of(source, str(tmp_path / name), 200)
        plan.place.make()
        fields = "", "", None, EngineSettings(rows=1), RowAnswers(Request(), True), 0.0
        actor, engine = PartActor(PartSpec(*fields, parts=plan.work, dedupe_bytes=1 << 20,
                                           shared=shared)), Slow()  # fmt: skip
        actor.begin(engine)
        records = actor.work(plan.parts)
        while sum(record.is_whole for record in records) < len(plan.parts):
            records += actor.work([])
        actor.work([])  # the shared actor gets the last answers
        decoded.append(engine.decoded)
        outputs.append([file.read_bytes() for file in sorted((tmp_path / name).iterdir())])
    assert decoded[0] == len(lines)
    assert decoded[1] < len(lines) // 2  # it reaches some before it has those that it asks for
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("actor", ["PartActor", "KnownContents"])
def test_job_with_a_killed_actor_has_equal_parts(
    redis_url, source, right, tmp_path, monkeypatch, actor
) -> None:
    monkeypatch.setattr(job, "_REPORT_S", 0.0)  # else the job may end between two reports
    seen = list[int]()

    def kill(found: JobProgress) -> None:
        if found.report.rows > 50 and not seen:
            seen.append(pids(f"ray::{actor}")[0])
            os.kill(seen[0], signal.SIGKILL)

    answer(redis_url, source, tmp_path / "out", actors=2, progress=kill)
    assert seen
    assert contents(tmp_path / "out") == right


@pytest.mark.slow("several jobs")
def test_stopped_job_and_lost_parts_are_resumed(
    redis_url, source, right, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(job, "_REPORT_S", 0.0)  # else the job may end between two reports
    out, done = tmp_path / "out", list[int]()

    def tell(found: JobProgress) -> None:
        done.append(found.report.rows)

    first = answer(redis_url, source, out, progress=tell, should_stop=lambda: max(done) > 200)
    assert first.stopped
    assert first.rows < COUNT
    listed = json.loads((out / MANIFEST).read_bytes())["parts"]
    assert len(listed) > 1
    (out / f"{max(listed)}.jsonl").unlink()
    again = answer(redis_url, source, out)
    assert not again.stopped
    assert 0 < again.resumed < first.rows
    assert again.rows == COUNT + 1
    assert contents(out) == right
    assert answer(redis_url, source, out).resumed == COUNT + 1
    with pytest.raises(JobChanged, match="seed was 0, is 1"):
        answer(redis_url, source, out, asked=Request(seed=1))


@pytest.fixture(scope="module")
def store() -> Iterator[ObjectStore]:
    with ObjectStore() as found:
        found.make("bucket")
        yield found


@pytest.mark.slow("it waits between the attempts of requests")
def test_parts_in_an_object_store_survive_its_faults(redis_url, source, store, right) -> None:
    def place(endpoint: Endpoint, folder: str) -> str:
        # With credentials, because the processes of Ray do not have those of this one.
        return endpoint.url("bucket", folder).replace("s3://", "s3://testing:testing@")

    rows_there = Place.of(place(store.endpoint, "in"))
    for file in source.files[0].iterdir():
        rows_there.write(file.name, file.read_bytes())
    faults = Faults(error=0.1, slow_down=0.05, delay=0.05, cut_request=0.05, cut_response=0.05)
    with FaultyProxy(store.endpoint.port, faults, seed=1) as proxy:
        through = Source.of(place(proxy.endpoint, "in"))
        answer(redis_url, through, place(proxy.endpoint, "out"))
        assert all(proxy.did[name] for name in ("error", "cut_request", "cut_response"))
    out = Place.of(place(store.endpoint, "out"))
    assert b"testing" not in out.read(MANIFEST)
    assert {name: out.read(name) for name in out.names() - {MANIFEST}} == right
    nowhere = store.endpoint.url("nowhere", "out")
    with pytest.raises(FileError, match=r"cannot use s3://nowhere/out/.*NO_SUCH_BUCKET"):
        answer(redis_url, source, nowhere.replace("s3://", "s3://testing:testing@"))


@pytest.mark.slow("it starts an engine and Ray")
def test_example_answers_rows_of_an_object_store(store: ObjectStore, tmp_path: Path) -> None:
    command = Command(tmp_path)
    command.env |= store.endpoint.environment
    program = Path(__file__).parents[3] / "examples" / "object_store.py"
    ran = subprocess.run(
        [sys.executable, program, "s3://bucket/demo"],
        env=command.env,
        capture_output=True,
        text=True,
        timeout=300,
    )
    command.kill()
    assert ran.returncode == 0, ran.stderr
    assert "300 answers, such as intent: " in ran.stdout
