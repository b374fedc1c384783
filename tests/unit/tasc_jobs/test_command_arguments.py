"""What a command is told reaches what it starts; nothing of it is started here."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tasc_jobs.batch.generate import generate
from tasc_jobs.cli import index as cli_refresh
from tasc_jobs.cli import worker as cli_worker
from tasc_jobs.cli.generate import generate as generate_command
from tasc_jobs.errors import UsageError
from tasc_jobs.tuning.refresh import Refreshed
from tasc_runtime.errors import FileError


def store(*given: object) -> AbstractContextManager[str]:
    return nullcontext("redis://nowhere")


@pytest.mark.parametrize(("actors", "cpus"), [(1, 4), (7, 8)])
def test_a_workers_own_ray_has_room_for_its_engines(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, actors: int, cpus: int
) -> None:
    started = []

    @contextmanager
    def ray(num_cpus: int) -> Iterator[None]:
        started.append(num_cpus)
        yield

    monkeypatch.setattr(cli_worker, "open_store", store)
    monkeypatch.setattr("tasc_store.connect", lambda url: None)
    monkeypatch.setattr("tasc_jobs.runtime.ray_local.local_ray", ray)
    monkeypatch.setattr(cli_worker, "_metrics", lambda *args: nullcontext())
    idle = SimpleNamespace(run_waiting=lambda: None)
    monkeypatch.setattr("tasc_jobs.worker.batch_worker.BatchWorker", lambda *args, **more: idle)
    cli_worker.worker(once=True, actors=actors, data_dir=tmp_path)
    assert started == [cpus]


@pytest.mark.parametrize(
    ("given", "host"), [("127.0.0.1", "127.0.0.1"), ("::1", "::1"), (None, None)]
)
def test_a_workers_metrics_are_at_an_address_of_its_own(
    given: str | None, host: str | None
) -> None:
    assert cli_worker._address(given) == host
    assert cli_worker._address("localhost") in ("127.0.0.1", "::1")


def test_a_name_that_is_no_address_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cli_worker, "open_store", store)
    monkeypatch.setattr("tasc_store.connect", lambda url: None)
    with pytest.raises(UsageError, match=r"--metrics-host 'no\.such\.invalid' .* name one"):
        cli_worker.worker(once=True, metrics_host="no.such.invalid", data_dir=tmp_path)


def test_rounds_of_refresh_wait_for_rows_behind_the_last_verdict(
    monkeypatch: pytest.MonkeyPatch,
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
            raise KeyboardInterrupt

    monkeypatch.setattr(cli_refresh, "open_store", store)
    monkeypatch.setattr(cli_refresh, "time", SimpleNamespace(sleep=sleep))
    monkeypatch.setattr("tasc_jobs.tuning.refresh.refresh", run)
    with pytest.raises(KeyboardInterrupt):
        cli_refresh.refresh("t", every=1.0)
    assert judged == [0, 0, 300, 300, 600]


def test_an_input_is_never_the_file_of_rejects_that_nobody_named(tmp_path: Path) -> None:
    source, output = tmp_path / "x.rejected.jsonl", tmp_path / "x.jsonl"
    source.write_text('{"id": "a", "input": "hi"}\n')
    said = r"x\.rejected\.jsonl is to be read and to be written"
    with pytest.raises(UsageError, match=said):
        generate_command("t", [str(source)], output)
    with pytest.raises(FileError, match=said):
        generate("redis://nowhere", "t", source, output)
