"""Tests that replicas are replaced while requests continue if a task gets another adapter."""

import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from ray import serve
from serving import ALPHA, BETA, TEXT, Ask, Service, Task, asking, make_task, replica_pids

from lora_folders import cut, make_adapter, merged_says
from support import eventually, free_port
from tasc_jobs.serve import run_service
from tasc_serve.settings import ServeSettings
from tasc_store import TaskStore


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Task]:
    return {name: make_task(tmp_path_factory.mktemp(name), name) for name in (ALPHA, BETA)}


@pytest.fixture
def served(client, redis_url, ray_cluster, tasks, tmp_path) -> Iterator[tuple[Service, list[str]]]:
    """The service of `tasc serve` with two replicas of BETA, and its messages."""
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
    messages: list[str] = []
    ended = threading.Event()
    arguments = (settings, redis_url, ended.wait, "x", messages.append)
    thread = threading.Thread(target=run_service, args=arguments)
    thread.start()
    try:
        eventually(lambda: "every task answers" in messages or not thread.is_alive())
        assert thread.is_alive()
        yield Service(f"http://127.0.0.1:{port}", redis_url, settings, tasks), messages
    finally:
        ended.set()
        thread.join()
        serve.shutdown()


@pytest.mark.ray
@pytest.mark.redis
@pytest.mark.slow("five replicas start, one after the other")
def test_changed_adapter_is_rolled_out_under_load_but_a_broken_adapter_is_not(
    served, client, tmp_path
):
    service, messages = served
    task, ask, store = service.tasks[BETA], Ask(BETA, TEXT), TaskStore(client)
    adapter = make_adapter(Path(task.record.model), tmp_path / "lora")
    before = {name: replica_pids(name) for name in (ALPHA, BETA, "gateway")}
    plain = service.expected(ask)
    broken = shutil.copytree(adapter, tmp_path / "broken")
    cut(broken)
    with asking(service, [ask], 3) as answers:
        eventually(lambda: len(answers) > 5)
        assert {answer for _, answer in answers} == {plain}
        bad = f"version {store.put(replace(task.record, adapter=str(broken)))} cannot be used"
        eventually(lambda: any(bad in line for line in messages))
        assert replica_pids(BETA) == before[BETA]
        version = store.put(replace(task.record, adapter=str(adapter)))
        eventually(lambda: any(f"version {version} changes adapter" in line for line in messages))
        ids = merged_says(Path(task.record.model), adapter, task.prompt(TEXT, chat=False), 24)
        adapted = task.tokenizer.decode(ids)
        eventually(lambda: adapted in [answer.text for _, answer in answers])
        eventually(lambda: len(now := replica_pids(BETA)) == 2 and not {*now} & {*before[BETA]})
        complete = f"update to version {version} is complete"
        eventually(lambda: any(complete in line for line in messages))
        count = len(answers)
        eventually(lambda: len(answers) > count + 10)
    texts = [answer.text for _, answer in answers]
    assert set(texts) == {plain.text, adapted}
    assert set(texts[-5:]) == {adapted}
    assert service.status(BETA)["record_version"] == version
    assert {name: replica_pids(name) for name in (ALPHA, "gateway")} == {
        name: before[name] for name in (ALPHA, "gateway")
    }
