"""Tests of batch jobs that write parts: equal answers, kills, bad input, object stores."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from batch_jobs import ENGINE, rows

from killable import pids
from object_store import Endpoint, Faults, FaultyProxy, ObjectStore
from support import read_rows, write_rows
from tasc_command import Command
from tasc_jobs.batch import job
from tasc_jobs.batch.generate import generate
from tasc_jobs.batch.inputs import Source
from tasc_jobs.batch.parts import MANIFEST, generate_parts
from tasc_jobs.batch.places import Place
from tasc_jobs.batch.work import JobProgress, JobReport

pytestmark = [pytest.mark.redis, pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]
COUNT = 400
PART_BYTES = 2000


@pytest.fixture
def source(tmp_path: Path) -> Source:
    (tmp_path / "in").mkdir()
    write_rows(tmp_path / "in" / "a.jsonl", rows(COUNT // 2))
    later = [{**row, "id": f"s{i}"} for i, row in enumerate(rows(COUNT // 2))]
    write_rows(tmp_path / "in" / "b.jsonl", [*later, [1]])
    return Source.of(tmp_path / "in")


@pytest.fixture
def one_file(redis_url: str, served: str, source: Source, tmp_path: Path) -> list[dict[str, Any]]:
    """The rows of the same job with one file as its output."""
    generate(redis_url, served, source, tmp_path / "one.jsonl", engine=ENGINE)
    return read_rows(tmp_path / "one.jsonl")


def parts_of(folder: Path) -> list[dict[str, Any]]:
    return [row for part in sorted(folder.glob("part-*.jsonl")) for row in read_rows(part)]


def test_parts_have_the_rows_of_one_file(redis_url, served, source, one_file, tmp_path) -> None:
    out = tmp_path / "out"
    report = generate_parts(
        redis_url, served, source, f"{out}/", engine=ENGINE, part_bytes=PART_BYTES, actors=2
    )
    assert (report.rows, report.errors) == (COUNT + 1, 1)
    assert parts_of(out) == one_file
    print(sorted(p.name for p in out.rglob("*")), report)


def answer(redis_url: str, task: str, source: Source, out: Path | str, **more: Any) -> JobReport:
    given = {"engine": ENGINE, "part_bytes": PART_BYTES, **more}
    return generate_parts(redis_url, task, source, str(out), **given)


def contents(folder: Path) -> dict[str, bytes]:
    files = (file for file in folder.rglob("*") if file.is_file() and file.name != MANIFEST)
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def test_killed_engine_and_stopped_job_lose_nothing(
    redis_url, served, source, tmp_path, monkeypatch
) -> None:
    answer(redis_url, served, source, tmp_path / "right")
    right, seen = contents(tmp_path / "right"), list[int]()

    def kill(found: JobProgress) -> None:
        if found.report.rows > 50 and not seen:
            seen.append(pids("ray::PartActor")[0])
            os.kill(seen[0], signal.SIGKILL)

    answer(redis_url, served, source, tmp_path / "killed", progress=kill)
    assert seen
    assert contents(tmp_path / "killed") == right

    monkeypatch.setattr(job, "_REPORT_S", 0.0)  # else the job may end between two reports
    out, done = tmp_path / "stopped", list[int]()
    tell = lambda found: done.append(found.report.rows)  # noqa: E731
    first = answer(
        redis_url, served, source, out, progress=tell, should_stop=lambda: max(done) > 50
    )
    assert first.stopped
    again = answer(redis_url, served, source, out)
    assert not again.stopped
    assert (again.resumed, again.rows) == (first.rows, COUNT + 1)
    assert contents(out) == right
    (lost := min(out.glob("part-*"))).unlink()
    assert answer(redis_url, served, source, out).resumed < COUNT
    assert contents(out) == right
    assert lost.name in right


@pytest.fixture(scope="module")
def store() -> Iterator[ObjectStore]:
    with ObjectStore() as found:
        found.make("bucket")
        yield found


def url_of(endpoint: Endpoint, bucket: str, folder: str) -> str:
    """A URL with credentials, because the processes of Ray do not have those of this one."""
    return endpoint.url(bucket, folder).replace("s3://", "s3://testing:testing@")


def in_bucket(store: ObjectStore, folder: str) -> dict[str, bytes]:
    place = Place.of(url_of(store.endpoint, "bucket", folder))
    return {name: place.read(name) for name in sorted(place.names()) if name != MANIFEST}


def test_parts_in_an_object_store_survive_its_faults(
    redis_url, served, source, store, tmp_path
) -> None:
    answer(redis_url, served, source, tmp_path / "right")
    right = contents(tmp_path / "right")
    rows_there = Place.of(url_of(store.endpoint, "bucket", "in"))
    for file in (tmp_path / "in").iterdir():
        rows_there.write(file.name, file.read_bytes())
    there = Source.of(url_of(store.endpoint, "bucket", "in"))
    answer(redis_url, served, there, url_of(store.endpoint, "bucket", "out"))
    assert in_bucket(store, "out") == {n: c for n, c in right.items() if n != ".lock"}
    faults = Faults(error=0.1, slow_down=0.05, delay=0.05, cut_request=0.05, cut_response=0.05)
    with FaultyProxy(store.endpoint.port, faults, seed=1) as proxy:
        through = Source.of(url_of(proxy.endpoint, "bucket", "in"))
        answer(redis_url, served, through, url_of(proxy.endpoint, "bucket", "faulty"))
        assert all(proxy.did[name] for name in ("error", "cut_request", "cut_response"))
    assert in_bucket(store, "faulty") == in_bucket(store, "out")


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
    assert "2974 answers, such as intent: " in ran.stdout
