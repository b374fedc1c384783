"""A task's record gets another adapter: its replicas are replaced, or stay where it is broken."""

import shutil
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import redis
from ray import serve
from serving import ALPHA, BETA, Ask, Service, Task, make_task, replica_pids

import tiny
from lora_folders import WEIGHTS, cut, make_adapter, merged_says
from support import eventually, free_port
from tasc_jobs.serve import RecordUpdates, run_service
from tasc_serve.settings import ServeSettings
from tasc_store import TaskRecord, TaskStore, connect

PROMPT = tiny.SENTENCES[0]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Task]:
    return {name: make_task(tmp_path_factory.mktemp(name), name) for name in (ALPHA, BETA)}


@pytest.fixture(scope="module")
def adapters(tasks: dict[str, Task], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two LoRA adapters of BETA's model."""
    base = Path(tasks[BETA].record.model)
    return [make_adapter(base, tmp_path_factory.mktemp("lora"), seed) for seed in range(2)]


class Updates:
    """`RecordUpdates` of one task, and what they did."""

    def __init__(self, client: redis.Redis, record: TaskRecord) -> None:
        self.store = TaskStore(client)
        self.store.put(record)
        self.deployed: list[Mapping[str, str]] = []
        self.said: list[str] = []
        self.following = RecordUpdates(
            self.store, [record.name], self.deployed.append, 0.01, self.said.append, again_s=0.0
        )


@pytest.fixture
def record(tasks: dict[str, Task]) -> TaskRecord:
    return replace(tasks[BETA].record, name=f"rolling-{uuid.uuid4().hex}", corpus=None)


@pytest.mark.redis
def test_only_what_needs_other_replicas_deploys_the_service_again(
    client: redis.Redis, record: TaskRecord, adapters: list[Path]
) -> None:
    updates, following = (made := Updates(client, record)), made.following
    first = following.digests
    updates.store.put(replace(record, max_tokens=7))
    following.look()
    assert updates.deployed == []
    updates.store.put(replace(record, max_tokens=7, adapter=str(adapters[0])))
    for _ in range(2):
        following.look()
    (second,) = updates.deployed
    assert second == following.digests != first
    assert [f"{record.name}: version 3 changes adapter;" in line for line in updates.said] == [True]
    updates.store.put(record)
    following.look()
    assert updates.deployed == [second, first]


@pytest.mark.redis
@pytest.mark.parametrize("named", [False, True], ids=["adapter", "adapters"])
@pytest.mark.parametrize(
    "breaks",
    [shutil.rmtree, cut, lambda folder: (folder / WEIGHTS).unlink()],
    ids=["missing", "another shape", "no safetensors"],
)
def test_a_broken_adapter_deploys_nothing_until_it_is_put_right(
    client: redis.Redis,
    record: TaskRecord,
    adapters: list[Path],
    breaks: Callable[[Path], object],
    named: bool,
    tmp_path: Path,
) -> None:
    updates = Updates(client, record)
    place = tmp_path / "next"
    shutil.copytree(adapters[0], place)
    breaks(place)
    given = {"adapters": (("x", str(place)),)} if named else {"adapter": str(place)}
    updates.store.put(replace(record, **given))
    for _ in range(3):
        updates.following.look()
    (said,) = updates.said
    assert "version 2 cannot be used, version 1 stays in use" in said
    assert str(place) in said
    assert f"`tasc task use {record.name} 1`" in said
    assert updates.deployed == []
    shutil.copytree(adapters[0], place, dirs_exist_ok=True)
    updates.following.look()
    assert len(updates.deployed) == 1


@pytest.mark.redis
def test_an_update_that_fails_is_said_once_and_tried_again(
    client: redis.Redis, record: TaskRecord, adapters: list[Path]
) -> None:
    store, said, tries = TaskStore(client), [], []
    store.put(record)

    def update(digests: Mapping[str, str]) -> None:
        tries.append(digests)
        if len(tries) < 3:
            raise ConnectionError("no controller")

    with RecordUpdates(store, [record.name], update, 0.01, said.append):
        store.put(replace(record, adapter=str(adapters[0])))
        eventually(lambda: len(said) == 2)
    assert len(tries) == 3
    assert "no controller" in said[0]
    assert "version 2 changes adapter" in said[1]


@pytest.fixture
def served(
    redis_url: str, ray_cluster: None, tasks: dict[str, Task], tmp_path: Path
) -> Iterator[tuple[Service, list[str]]]:
    """What `tasc serve` runs, with two replicas of BETA; and what it says."""
    with connect(redis_url) as client:
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
    served: tuple[Service, list[str]], client: redis.Redis, adapters: list[Path], tmp_path: Path
) -> None:
    service, said = served
    task, ask, store = service.tasks[BETA], Ask(BETA, PROMPT), TaskStore(client)
    before = {name: replica_pids(name) for name in (ALPHA, BETA, "gateway")}
    broken = tmp_path / "broken"
    shutil.copytree(adapters[0], broken)
    cut(broken)
    with asking(service, ask) as texts:
        eventually(lambda: len(texts) > 5)
        assert set(texts) == {service.expected(ask).text}
        bad = f"version {store.put(replace(task.record, adapter=str(broken)))} cannot be used"
        eventually(lambda: any(bad in line for line in said))
        assert replica_pids(BETA) == before[BETA]
        version = store.put(replace(task.record, adapter=str(adapters[0])))
        eventually(lambda: any(f"version {version} changes adapter" in line for line in said))
        ids = merged_says(Path(task.record.model), adapters[0], task.prompt(PROMPT, chat=False), 24)
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
