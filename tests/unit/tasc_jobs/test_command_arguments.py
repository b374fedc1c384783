"""What a command is told reaches what it starts; nothing of it is started here."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from tasc_jobs.batch.generate import generate
from tasc_jobs.cli.main import app
from tasc_jobs.cli.options import StoreOptions
from tasc_jobs.errors import UsageError
from tasc_jobs.tuning.refresh import Refreshed
from tasc_runtime.errors import FileError


def ended(*given: object) -> BaseException | None:
    """What ended a command; None where it came to its end."""
    return CliRunner().invoke(app, [str(each) for each in given]).exception


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands open a store that is not there."""
    monkeypatch.setattr(StoreOptions, "open", lambda self: nullcontext("redis://nowhere"))
    monkeypatch.setattr("tasc_store.connect", lambda url: None)


@pytest.mark.parametrize(
    ("actors", "given", "cpus", "hosts"),
    [
        (1, "127.0.0.1", 4, ["127.0.0.1"]),
        (7, "::1", 8, ["::1"]),
        (1, "localhost", 4, ["127.0.0.1", "::1"]),
        (1, None, 4, ["10.1.2.3"]),
    ],
)
def test_a_workers_own_ray_has_room_for_its_engines_and_its_metrics_an_address(
    monkeypatch: pytest.MonkeyPatch,
    store: None,
    tmp_path: Path,
    actors: int,
    given: str | None,
    cpus: int,
    hosts: list[str],
) -> None:
    started, told = list[int](), list[str]()

    @contextmanager
    def ray(num_cpus: int) -> Iterator[None]:
        started.append(num_cpus)
        yield

    def port(*args: Any, host: str, **more: Any) -> AbstractContextManager[SimpleNamespace]:
        told.append(host)
        return nullcontext(SimpleNamespace(target=host))

    idle = SimpleNamespace(run_waiting=lambda: None)
    monkeypatch.setattr("tasc_jobs.ray_local.local_ray", ray)
    monkeypatch.setattr("tasc_serve.metrics.discovery.MetricsPort", port)
    monkeypatch.setattr("tasc_serve.metrics.discovery.node_address", lambda: "10.1.2.3")
    monkeypatch.setattr("tasc_jobs.worker.batch_worker.BatchWorker", lambda *args, **more: idle)
    named = () if given is None else ("--metrics-host", given)
    assert not ended("worker", "--once", "--actors", actors, "--data-dir", tmp_path, *named)
    assert started == [cpus]
    assert told[0] in hosts


def test_a_name_that_is_no_address_is_refused(store: None, tmp_path: Path) -> None:
    host = ("--metrics-host", "no.such.invalid")
    error = ended("worker", "--once", "--data-dir", tmp_path, *host)
    assert isinstance(error, UsageError)
    assert str(error).startswith("--metrics-host 'no.such.invalid'")


def test_rounds_of_refresh_wait_for_rows_behind_the_last_verdict(
    monkeypatch: pytest.MonkeyPatch, store: None
) -> None:
    """Rows and what was judged of them: nothing yet, a verdict, too few rows, another verdict."""
    rounds = [(100, 0), (300, 50), (400, 0), (600, 50), (700, 0)]
    left, judged = iter(rounds), []

    def run(*args: Any, **more: Any) -> Refreshed:
        judged.append(more["judged"])
        rows, held = next(left)
        return Refreshed("t", 0, 0, rows, rows, "so", judged_rows=held)

    def sleep(seconds: float) -> None:
        if len(judged) == len(rounds):
            raise SystemExit(7)

    monkeypatch.setattr("time.sleep", sleep)
    monkeypatch.setattr("tasc_jobs.tuning.refresh.refresh", run)
    assert isinstance(ended("refresh", "t", "--every", 1), SystemExit)
    assert judged == [0, 0, 300, 300, 600]


def test_an_input_is_never_the_file_of_rejects_that_nobody_named(tmp_path: Path) -> None:
    source, output = tmp_path / "x.rejected.jsonl", tmp_path / "x.jsonl"
    source.write_text('{"id": "a", "input": "hi"}\n')
    error = ended("generate", "t", "--input", source, "--output", output)
    assert isinstance(error, UsageError)
    assert source.name in str(error)
    with pytest.raises(FileError):
        generate("redis://nowhere", "t", source, output)
