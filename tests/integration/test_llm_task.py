"""Tests a task that `LLM` saves, that is registered with its index, and that answers."""

import json
from pathlib import Path
from typing import Any

import pytest
import redis

from tasc_command import InProcess
from tasc_jobs.index.publish import current_index
from tasc_protocol import Request
from tasc_runtime.engine.builder import EngineBuilder
from tasc_runtime.engine_settings import EngineSettings
from tasc_runtime.errors import ServiceError
from tasc_runtime.llm import LLM
from tasc_store import ArtifactStore, TaskStore, UnknownTask
from tiny import SENTENCES, make_folder

pytestmark = pytest.mark.redis
SIZES = {"rows": 2, "max_model_len": 128, "cost_aware": False}
TASK = {"dtype": "float64", "max_tokens": 24, "template": "say {input}\n"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def saved(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder saved by an `LLM` that drafts from the model's answers, partly reversed."""
    folder = tmp_path_factory.mktemp("saved")
    answers = LLM(model, **TASK, **SIZES).generate(SENTENCES)
    outputs = [a.text[::-1] if a.index % 3 == 0 else a.text for a in answers]
    pairs = list(zip(SENTENCES, outputs, strict=True))
    LLM(model, corpus=pairs, cache_dir=folder / "cache", **TASK, **SIZES).save(folder / "task")
    return folder / "task"


@pytest.fixture
def tasc(tasc_here: InProcess) -> Any:
    """``tasc task`` on the shared store."""
    return lambda *args, code=0: tasc_here.run("task", *args, code=code)


def current(client: redis.Redis, task: str) -> Any:
    """The record of a task's current index, or None."""
    return ArtifactStore(client, task, TaskStore(client).get(task).fingerprint).current()


def drafted(llm: LLM) -> list[tuple[str, int, int]]:
    return [(a.text, a.drafted, a.accepted) for a in llm.generate(SENTENCES)]


def test_registered_task_answers_and_drafts_like_the_saved_task(
    tasc: Any, saved: Path, client: redis.Redis, redis_url: str, name: str, tmp_path: Path
) -> None:
    lines = tasc("create", name, "--from", saved).splitlines()
    assert lines[:2] == [f"{name} version 1", "index version 1 is current: 6 outputs"]
    assert [line.split(":")[0] for line in lines[2:]] == ["not imported", "not imported"]
    assert "rows: 2, max_model_len: 128, cost_aware: False" in lines[3]
    local = LLM.load(saved)
    expected = drafted(local)
    assert local.summary().accepted_by_source["corpus"] > 0
    built = EngineBuilder.of_task(client, name, EngineSettings(**SIZES), cache_dir=tmp_path)
    calls = (Request(str(n), text, templated=True) for n, text in enumerate(SENTENCES))
    results = {r.id: r for r in built.engine.generate(built.reader.request(call) for call in calls)}
    assert [
        (r.text, sum(r.acceptance.drafted), sum(r.acceptance.accepted))
        for _, r in sorted(results.items())
    ] == expected
    task = LLM.from_task(name, redis_url, **SIZES)
    assert drafted(task) == expected
    task.save(tmp_path / "again")
    out = tasc("create", f"{name}.copy", "--from", tmp_path / "again")
    assert drafted(LLM.from_task(f"{name}.copy", redis_url, **SIZES)) == expected, out


def test_task_is_opened_from_the_named_store(tasc, saved, redis_url, name, monkeypatch) -> None:
    tasc("create", name, "--from", saved)
    assert LLM.from_task(name, **SIZES).record.name == name  # REDIS_URL is set
    monkeypatch.delenv("REDIS_URL")
    with pytest.raises(ServiceError):
        LLM.from_task(name, **SIZES)
    with pytest.raises(UnknownTask):
        LLM.from_task(f"{name}.gone", redis_url, **SIZES)


def test_options_that_contradict_a_saved_task_are_refused(tasc, saved, client, name) -> None:
    for args, named in (
        (("--max-tokens", 5, "--template", "{input}"), ("--template", "--max-tokens")),
        (("--corpus", "other"), ("--corpus",)),
    ):
        err = tasc("create", name, "--from", saved, *args, code=2)
        assert all(option in err for option in named)
        assert err.count("\n") == 1
    assert "--from" in tasc("create", name, code=2)
    assert name not in TaskStore(client).names()
    tasc("create", name, "--from", saved, "--max-tokens", 24)  # the same value is no contradiction
    tasc("create", name, "--from", saved, code=2)
    tasc("create", name, "--from", saved, "--replace")
    assert current(client, name).version == 2


def test_folder_without_a_saved_task_registers_nothing(tasc, client, name, tmp_path) -> None:
    for folder in (tmp_path, tmp_path / "absent"):
        err = tasc("create", name, "--from", folder, code=1)
        assert str(folder) in err
        assert err.count("\n") == 1
    assert name not in TaskStore(client).names()


def test_saved_task_whose_tokenizer_changed_is_refused(tasc, client, name, tmp_path) -> None:
    folder = make_folder(tmp_path / "model")
    LLM(folder, **SIZES).save(tmp_path / "task")
    tasc("create", name, "--from", tmp_path / "task")
    assert current(client, name) is None
    record = TaskStore(client).get(name)
    tokenizer = folder / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace("<|end|>", "<|END|>"))
    err = tasc("create", name, "--from", tmp_path / "task", "--replace", code=2)
    assert record.fingerprint in err


def test_saved_task_without_a_corpus_keeps_the_current_index(
    tasc: Any, saved: Path, model: Path, client: redis.Redis, name: str, tmp_path: Path
) -> None:
    LLM(model, **TASK, **SIZES).save(tmp_path / "task")
    assert "version" not in tasc("create", name, "--from", tmp_path / "task").splitlines()[1]
    tasc("create", name, "--from", saved, "--replace")
    before = current(client, name)
    line = tasc("create", name, "--from", tmp_path / "task", "--replace").splitlines()[1]
    assert f"version {before.version} " in line
    assert current(client, name) == before


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_index_registered_with_a_task_has_an_unknown_number_of_rows(
    tasc: Any, tasc_here: InProcess, saved: Path, client: redis.Redis, name: str, tmp_path: Path
) -> None:
    """The index may have rows of the corpus or other rows, so a refresh does not judge it."""
    tasc("create", name, "--from", saved)
    tasc_here.run("tune", name, code=1)  # there are no rows yet
    rows = [{"input": f"row {n}", "output": f"{n % 7} {n % 5} {n % 3}"} for n in range(220)]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    tasc_here.run("ingest", name, file)
    assert "rows unknown" in tasc_here.run("index", "list", name)
    listed = json.loads(tasc_here.run("index", "list", name, "--json"))["versions"]
    assert [each["corpus_rows"] for each in listed] == [None]
    tuned = json.loads(tasc_here.run("tune", name, "--json"))
    assert (tuned["version"], tuned["corpus_rows"]) == (2, None)
    assert tuned["judged_rows"] > 0
    store = ArtifactStore(client, name, current(client, name).fingerprint)
    index = current_index(store)
    assert index.corpus.documents == len(SENTENCES)  # it is the one that came with the task
    assert index.settings is not None

    done = json.loads(tasc_here.run("refresh", name, "--json"))
    assert (done["new_rows"], done["old_version"], done["version"]) == (220, 2, 3)
    assert done["old_tokens_per_step"] is None
    assert done["new_tokens_per_step"] > 0
    assert current(client, name).corpus_rows == 220
