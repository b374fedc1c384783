"""A task on its way from `LLM` to a store and back: saved, registered with its index, answered."""

from pathlib import Path
from typing import Any

import pytest

from tasc_command import InProcess
from tasc_runtime.engine.builder import EngineBuilder
from tasc_runtime.engine_settings import EngineSettings
from tasc_runtime.errors import ServiceError
from tasc_runtime.llm import LLM
from tasc_runtime.protocol import Call
from tasc_store import ArtifactStore, TaskStore, UnknownTask, connect
from tiny import SENTENCES, make_folder

pytestmark = pytest.mark.redis
SIZES = {"rows": 2, "max_model_len": 128, "cost_aware": False}
TASK = {"dtype": "float64", "max_tokens": 24, "template": "say {input}\n"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def saved(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What an `LLM` saved that drafts from what the model says, partly reversed."""
    folder = tmp_path_factory.mktemp("saved")
    answers = LLM(model, **TASK, **SIZES).generate(SENTENCES)
    said = [a.text[::-1] if a.index % 3 == 0 else a.text for a in answers]
    pairs = list(zip(SENTENCES, said, strict=True))
    LLM(model, corpus=pairs, cache_dir=folder / "cache", **TASK, **SIZES).save(folder / "task")
    return folder / "task"


@pytest.fixture
def tasc(in_process: InProcess, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``tasc task`` on the shared store."""
    monkeypatch.setenv("REDIS_URL", redis_url)
    return lambda *args, code=0: in_process.run("task", *args, code=code)


def drafted(llm: LLM) -> list[tuple[str, int, int]]:
    return [(a.text, a.drafted, a.accepted) for a in llm.generate(SENTENCES)]


def test_a_saved_task_is_registered_with_its_index_and_answers_and_drafts_alike(
    tasc: Any, saved: Path, redis_url: str, name: str, tmp_path: Path
) -> None:
    lines = tasc("create", name, "--from", saved).splitlines()
    assert lines[:2] == [f"{name} version 1", "index version 1 is current: 6 outputs"]
    assert [line.split(":")[0] for line in lines[2:]] == ["not taken", "not taken"]
    assert "rows: 2, max_model_len: 128, cost_aware: False" in lines[3]
    local = LLM.load(saved)
    expected = drafted(local)
    assert local.summary().accepted_by_source["corpus"] > 0
    with connect(redis_url) as client:
        settings = EngineSettings(**SIZES)
        built = EngineBuilder.of_task(client, name, settings, cache_dir=tmp_path)
    calls = (Call(str(n), text, templated=True) for n, text in enumerate(SENTENCES))
    results = {r.id: r for r in built.engine.generate(built.request(call) for call in calls)}
    assert [
        (r.text, sum(r.acceptance.drafted), sum(r.acceptance.accepted))
        for _, r in sorted(results.items())
    ] == expected
    task = LLM.from_task(name, redis_url, **SIZES)
    assert drafted(task) == expected
    task.save(tmp_path / "again")
    out = tasc("create", f"{name}.copy", "--from", tmp_path / "again")
    assert drafted(LLM.from_task(f"{name}.copy", redis_url, **SIZES)) == expected, out


def test_a_task_is_opened_from_a_store_that_is_named_and_has_it(
    tasc: Any, saved: Path, redis_url: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasc("create", name, "--from", saved)
    assert LLM.from_task(name, **SIZES).record.name == name  # REDIS_URL is set
    monkeypatch.delenv("REDIS_URL")
    with pytest.raises(ServiceError):
        LLM.from_task(name, **SIZES)
    with pytest.raises(UnknownTask):
        LLM.from_task(f"{name}.gone", redis_url, **SIZES)


def test_options_that_contradict_a_saved_task_are_refused_and_nothing_is_written(
    tasc: Any, saved: Path, redis_url: str, name: str, tmp_path: Path
) -> None:
    for args, said in (
        (("--max-tokens", 5, "--template", "{input}"), "than --template, --max-tokens; leave"),
        (("--corpus", "other"), "than --corpus; leave"),
        (("--from", tmp_path), "is not what LLM.save writes"),
    ):
        err = tasc("create", name, "--from", saved, *args, code=1 if tmp_path in args else 2)
        assert said in err
        assert err.count("\n") == 1
    assert "--model and --template must be given" in tasc("create", name, code=2)
    assert name not in TaskStore(connect(redis_url)).names()
    tasc("create", name, "--from", saved, "--max-tokens", 24)  # the same value is no contradiction
    assert "is there already" in tasc("create", name, "--from", saved, code=2)
    assert "index version 2 is" in tasc("create", name, "--from", saved, "--replace")


def test_a_saved_task_whose_model_has_another_tokenizer_now_or_no_corpus(
    tasc: Any, redis_url: str, name: str, tmp_path: Path
) -> None:
    folder = make_folder(tmp_path / "model")
    LLM(folder, **SIZES).save(tmp_path / "task")
    assert "no index" in tasc("create", name, "--from", tmp_path / "task")
    record = TaskStore(connect(redis_url)).get(name)
    assert ArtifactStore(connect(redis_url), name, record.fingerprint).current() is None
    tokenizer = folder / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace("<|end|>", "<|END|>"))
    err = tasc("create", name, "--from", tmp_path / "task", "--replace", code=2)
    assert record.fingerprint in err
