"""A task's record gets another adapter: its replicas are replaced while requests go on."""

import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import redis
from ray import serve
from serving import ALPHA, BETA, TEXT, Ask, Service, Task, make_task, replica_pids

from lora_folders import cut, make_adapter, merged_says
from support import eventually, free_port
from tasc_jobs.serve import run_service
from tasc_serve.settings import ServeSettings
from tasc_store import TaskStore


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Task]:
    return {name: make_task(tmp_path_factory.mktemp(name), name) for name in (ALPHA, BETA)}


@pytest.fixture
def served(
    client: redis.Redis, redis_url: str, ray_cluster: None, tasks: dict[str, Task], tmp_path: Path
) -> Iterator[tuple[Service, list[str]]]:
    """What `tasc serve` runs, with two replicas of BETA; and what it says."""
    for task in tasks.values():
        TaskStore(client).put(task.record)
    light = {"num_cpus": 0.1}
    port = free_port()
    settings = ServeSettings.model_validate(
        {
            "tasks": [{"name": ALPHA, **light}, {"name": BETA, **light, "replicas": 2}],
            "http": {"port": port, "gateway_num_cpus": 0.1},
            "engine": {"rows": 4, "max_model_len": 128, "cost_aware": False},
            "poll_interval_s": 0.2,
            "cache_dir": tmp_path,
        }
    )
    said: list[str] = []
    ended = threading.Event()
    arguments = (settings, redis_url, ended.wait, "x", said.append)
    thread = threading.Thread(target=run_service, args=arguments)
    thread.start()
    try:
        eventually(lambda: "every task answers" in said or not thread.is_alive())
        assert thread.is_alive()
        yield Service(f"http://127.0.0.1:{port}", redis_url, settings, tasks), said
    finally:
        ended.set()
        thread.join()
        serve.shutdown()


@contextmanager
def asking(service: Service, ask: Ask) -> Iterator[list[str]]:
    """Clients that ask without a pause; the texts of their answers. Every answer must come."""
    texts: list[str] = []
    errors: list[BaseException] = []
    ended = threading.Event()

    def run() -> None:
        with httpx.Client() as client:
            while not ended.is_set():
                try:
                    texts.append(service.answer(ask, client).text)
                except Exception as error:
                    errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        yield texts
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    assert errors == []


@pytest.mark.ray
@pytest.mark.redis
@pytest.mark.slow("five replicas start, one after the other")
def test_a_changed_adapter_arrives_while_requests_go_on_and_a_broken_one_changes_nothing(
    served: tuple[Service, list[str]], client: redis.Redis, tmp_path: Path
) -> None:
    service, said = served
    task, ask, store = service.tasks[BETA], Ask(BETA, TEXT), TaskStore(client)
    adapter = make_adapter(Path(task.record.model), tmp_path / "lora")
    before = {name: replica_pids(name) for name in (ALPHA, BETA, "gateway")}
    broken = tmp_path / "broken"
    shutil.copytree(adapter, broken)
    cut(broken)
    with asking(service, ask) as texts:
        eventually(lambda: len(texts) > 5)
        assert set(texts) == {service.expected(ask).text}
        bad = f"version {store.put(replace(task.record, adapter=str(broken)))} cannot be used"
        eventually(lambda: any(bad in line for line in said))
        assert replica_pids(BETA) == before[BETA]
        version = store.put(replace(task.record, adapter=str(adapter)))
        eventually(lambda: any(f"version {version} changes adapter" in line for line in said))
        ids = merged_says(Path(task.record.model), adapter, task.prompt(TEXT, chat=False), 24)
        adapted = task.tokenizer.decode(ids)
        eventually(lambda: adapted in texts)
        eventually(lambda: len(now := replica_pids(BETA)) == 2 and not {*now} & {*before[BETA]})
        eventually(lambda: any(f"update to version {version} is complete" in line for line in said))
        count = len(texts)
        eventually(lambda: len(texts) > count + 10)
    assert set(texts) == {service.expected(ask).text, adapted}
    assert set(texts[-5:]) == {adapted}
    assert service.status(BETA)["record_version"] == version
    assert {name: replica_pids(name) for name in (ALPHA, "gateway")} == {
        name: before[name] for name in (ALPHA, "gateway")
    }
