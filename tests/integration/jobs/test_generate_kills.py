"""A batch job whose engine, driver, Redis or Ray is killed ends with the undisturbed output."""

import os
import signal
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from batch_jobs import ENGINE, driver, kill_itself, kill_others, record_of, rows, rows_done

from killable import RedisServer, pids
from support import read_rows, write_rows
from tasc_jobs.batch.generate import generate
from tasc_jobs.batch.inputs import Source
from tasc_jobs.batch.work import JobBusy, JobProgress
from tasc_store import TaskStore, connect

pytestmark = [pytest.mark.redis, pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]
LEAST = 100


@pytest.fixture(scope="module")
def count(everything: bool) -> int:
    """Number of good rows of the job; a bad row follows them."""
    return 2000 if everything else 1200


@pytest.fixture(scope="module")
def source(count: int, tmp_path_factory: pytest.TempPathFactory) -> Source:
    file = tmp_path_factory.mktemp("kills-in") / "in.jsonl"
    return Source.of(write_rows(file, [*rows(count), [1]]))


@pytest.fixture(scope="module")
def undisturbed(redis_url, ray_cluster, folder, source, count, tmp_path_factory):
    output = tmp_path_factory.mktemp("kills-out") / "out.jsonl"
    with closing(connect(redis_url)) as client:
        TaskStore(client).put(record_of("kills", folder))
    report = generate(redis_url, "kills", source, output, engine=ENGINE, actors=2)
    assert (report.rows, report.errors) == (count + 1, 1)
    assert [row["id"] for row in read_rows(output)] == [f"r{i}" for i in range(count)]
    return output.read_bytes()


def once(least: int, count: int, action: Callable[[], object]) -> Callable[[JobProgress], None]:
    """Returns a function that calls ``action`` once ``least`` rows of ``count`` are done."""
    done: list[int] = []

    def told(found: JobProgress) -> None:
        rows = found.report.rows
        if rows >= least and not done and found.engines:
            assert rows < count
            done.append(rows)
            action()

    return told


def test_killed_engine_is_replaced(redis_url, source, count, undisturbed, tmp_path):
    killed: list[int] = []

    def kill() -> None:
        killed.append(pids("ray::EngineActor")[0])
        os.kill(killed[0], signal.SIGKILL)

    output = tmp_path / "out.jsonl"
    generate(redis_url, "kills", source, output, engine=ENGINE, progress=once(50, count, kill))
    assert killed
    assert output.read_bytes() == undisturbed


@pytest.mark.slow("kills a driver")
def test_killed_driver_resumes_and_a_second_driver_is_refused(
    redis_url: str, source: Source, count: int, undisturbed: bytes, tmp_path: Path
) -> None:
    output = tmp_path / "out.jsonl"
    with driver(redis_url, "kills", source.files[0], output, least=LEAST) as process:
        assert rows_done(process) < count
        with pytest.raises(JobBusy):
            generate(redis_url, "kills", source, output, engine=ENGINE)
        kill_itself(process)
    assert not output.exists()
    told: list[JobProgress] = []
    report = generate(redis_url, "kills", source, output, engine=ENGINE, progress=told.append)
    assert 0 < report.resumed < count
    assert (report.rows, output.read_bytes()) == (count + 1, undisturbed)
    assert told[-1].report.rows == count + 1
    # And a third time: nothing is left to do.
    again = generate(redis_url, "kills", source, output, engine=ENGINE)
    assert (again.rows, again.resumed) == (count + 1, count + 1)


@pytest.mark.slow("kills a driver")
def test_killed_driver_with_repeats_resumes_to_the_output_without_copies(
    redis_url: str, count: int, undisturbed: bytes, tmp_path: Path
) -> None:
    output, plain = tmp_path / "out.jsonl", tmp_path / "plain.jsonl"
    distinct = [row["input"] for row in rows(count // 3)]
    repeated = [{"id": f"r{i}", "input": distinct[i * i % len(distinct)]} for i in range(count)]
    source = Source.of(write_rows(tmp_path / "in.jsonl", repeated))
    generate(redis_url, "kills", source, plain, engine=ENGINE, dedupe_bytes=0)
    with driver(redis_url, "kills", source.files[0], output, least=LEAST) as process:
        assert rows_done(process) < count
        kill_itself(process)
    report = generate(redis_url, "kills", source, output, engine=ENGINE, actors=2)
    assert 0 < report.resumed < count
    assert (report.rows, report.errors) == (count, 0)
    assert 0 < report.repeats <= count - len({row["input"] for row in repeated})
    assert [row["id"] for row in read_rows(output)] == [f"r{i}" for i in range(count)]
    assert output.read_bytes() == plain.read_bytes()


@pytest.mark.slow("kills a Ray")
def test_job_fails_when_ray_dies_and_can_be_resumed(
    redis_url, source, count, undisturbed, tmp_path, monkeypatch
):
    # Ray considers a silent node dead after 13 s; here somewhat sooner.
    monkeypatch.setenv("RAY_health_check_period_ms", "500")
    monkeypatch.setenv("RAY_health_check_timeout_ms", "2000")
    monkeypatch.setenv("RAY_health_check_failure_threshold", "2")
    output = tmp_path / "out.jsonl"
    with driver(redis_url, "kills", source.files[0], output, least=LEAST, own_ray=True) as process:
        assert rows_done(process) < count
        victims = [*pids("/raylet ", process.pid), *pids("ray::EngineActor", process.pid)]
        assert len(victims) == 2
        err = kill_others(process, victims)
    assert process.returncode == 1, err
    assert "run the job again, which resumes it" in err
    report = generate(redis_url, "kills", source, output, engine=ENGINE)
    assert 0 < report.resumed < count
    assert output.read_bytes() == undisturbed


@pytest.mark.slow("kills a Redis")
def test_running_job_completes_without_redis(folder, source, count, undisturbed, tmp_path):
    server, output = RedisServer(tmp_path / "redis"), tmp_path / "out.jsonl"
    try:
        with closing(connect(server.url)) as client:
            TaskStore(client).put(record_of("kills", folder))
        told = once(50, count, server.kill)
        generate(server.url, "kills", source, output, engine=ENGINE, progress=told)
        assert server.process.poll() is not None
    finally:
        server.kill()
    assert output.read_bytes() == undisturbed
