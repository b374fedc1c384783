"""Tests which indexes the watcher of an engine in this process takes, refuses and tries again.

It needs Redis only.
"""

import queue
from dataclasses import dataclass, replace

import pytest
from serving import Ask, publish

import tiny
from support import eventually, index_of, refused
from tasc_draft import DraftIndex, write_index
from tasc_engine import Request
from tasc_runtime.engine.builder import EngineBuilder
from tasc_runtime.engine.step_loop import EngineLoop
from tasc_runtime.engine_settings import EngineSettings
from tasc_runtime.errors import ServiceError
from tasc_serve.replica.watchers import TaskWatcher
from tasc_store import TaskStore

pytestmark = pytest.mark.redis
ENGINE = EngineSettings(rows=2, max_model_len=128, device="cpu", cost_aware=False)
ASK = Ask("alpha", tiny.SENTENCES[0], 40)


@pytest.fixture
def index(task):
    """The index of the answer that will be requested."""
    tokens = tiny.plain(task.model, task.prompt(ASK.value, chat=False), ASK.max_tokens)
    return index_of(task.tokenizer, [tokens])


@dataclass(frozen=True)
class Watched:
    """A worker whose engine runs and whose indexes are watched."""

    worker: EngineBuilder
    loop: EngineLoop
    versions: list[int]

    def result(self, task):
        """The engine's answer to the one request of these tests."""
        items = queue.Queue()
        prompt = task.prompt(ASK.value, chat=False)
        self.loop.submit(Request("1", prompt, ASK.max_tokens), items.put)
        return items.get(timeout=60).result


@pytest.fixture
def worker(client, task, tmp_path):
    return EngineBuilder.of_task(client, task.record.name, ENGINE, cache_dir=tmp_path)


@pytest.fixture
def watched(client, worker):
    versions = []
    loop = EngineLoop(worker.engine)
    tasks = TaskStore(client)
    watcher = TaskWatcher(
        worker, loop, tasks, 0.05, lambda: versions.append(worker.artifact.version)
    )
    yield Watched(worker, loop, versions)
    assert loop.alive
    watcher.close()
    loop.close()


def test_worker_without_an_index_logs_the_build_command(client, task, tmp_path, caplog):
    worker = EngineBuilder.of_task(client, task.record.name, ENGINE, cache_dir=tmp_path)
    assert (worker.artifact, worker.index_bytes) == (None, 0)
    assert f"tasc build-index {task.record.name}" in caplog.text


def test_first_index_is_installed_and_drafted_from(task, store, index, watched):
    want = task.plain(task.prompt(ASK.value, chat=False), ASK.max_tokens)
    before = watched.result(task)
    artifact = publish(store, index)
    eventually(lambda: watched.versions == [artifact.version])
    assert (watched.worker.artifact, watched.worker.index_bytes) == (artifact, index.nbytes)
    after = watched.result(task)
    assert before.text == after.text == want.text
    assert sum(after.acceptance.accepted) > sum(before.acceptance.accepted)
    assert after.acceptance.steps < want.tokens / 2, "it is this answer's own index"


def test_unsuitable_index_is_logged_once_and_the_next_index_is_installed(
    task, store, index, watched, caplog
):
    foreign = publish(store, replace(index, corpus=replace(index.corpus, fingerprint="f" * 32)))
    eventually(lambda: "does not fit" in caplog.text)
    good = publish(store, index)
    eventually(lambda: watched.versions == [good.version])
    (refusal,) = (r for r in caplog.records if "does not fit" in r.getMessage())
    for part in ("f" * 32, index.fingerprint, f"version {foreign.version}", task.record.name):
        assert part in str(refusal.exc_info[1])


def test_older_index_is_installed_if_made_current_again(store, index, watched):
    first = publish(store, index)
    eventually(lambda: watched.versions[-1:] == [first.version])
    second = publish(store, DraftIndex.empty(index.fingerprint, index.vocab_size))
    eventually(lambda: watched.versions[-1] == second.version)
    store.announce(first.version)
    eventually(lambda: watched.versions[-1] == first.version)


def test_failed_index_download_is_repeated(client, store, index, watched, tmp_path_factory, caplog):
    path = tmp_path_factory.mktemp("new") / "index"
    write_index(index, path)
    version = store.publish(path, corpus_rows=1).version
    (chunk,) = client.scan_iter(f"*{store.task}*:chunk:{version}:0")
    client.rename(chunk, "away")
    store.announce(version)
    eventually(lambda: f"version {version}" in caplog.text)
    assert watched.versions == []
    client.rename("away", chunk)
    eventually(lambda: watched.versions == [version])


def test_model_whose_tokenizer_changed_is_refused(client, task, tmp_path):
    other = replace(task.record, fingerprint="e" * 32)
    TaskStore(client).put(other)
    with refused(ServiceError, "e" * 32, task.record.fingerprint):
        EngineBuilder.of_task(client, other.name, ENGINE, cache_dir=tmp_path)
