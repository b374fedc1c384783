"""``tasc train-drafter``, from files or from a task and its corpus."""

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from drafter_training import INPUTS, ROWS, make
from support import read_rows, record_of, write_rows
from tasc_store import CorpusStore, NeuralDrafting, TaskStore, connect
from tasc_train.drafter.hyperparameters import DrafterSettings

Run = Callable[..., str]
SHORT = ("--epochs", 1, "--batch-rows", 8, "--max-tokens", 12, "--json")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("cli-drafter"), "qwen2").target


@pytest.fixture
def file(tmp_path: Path) -> Path:
    rows = ({"id": row.key, "input": row.input, "output": row.output} for row in ROWS)
    return write_rows(tmp_path / "rows.jsonl", rows)


def test_drafter_is_trained_from_files(run: Run, file: Path, folder: Path, tmp_path: Path) -> None:
    given = ("train-drafter", "calls", "--model", folder, "--template", "{input} ->")
    own = ("--kind", "eagle", "--noise", 0, "--output", tmp_path / "e")
    found = json.loads(run(*given, *own, "--train", file, *SHORT))
    assert (found["noise"], found["own_share"]) == (0, DrafterSettings.own_share)
    assert (found["kind"], found["rows"], found["held_out"], found["steps"]) == ("eagle", 38, 2, 5)
    answers = ("--answers", tmp_path / "e" / "answers.jsonl", "--limit", 20, "--hidden", 16)
    printed = run(
        *given, *answers, "--kind", "independent", "--output", tmp_path / "i", *SHORT[:-1],
        "--train", file,
    )  # fmt: skip
    assert "3 steps on 19 answers (0 were left out), loss " in printed
    assert "of 1 held-out answers" in printed
    assert json.loads((tmp_path / "i" / "config.json").read_text())["hidden_size"] == 16


@pytest.mark.redis
def test_drafter_is_trained_from_a_task_and_its_corpus(run, redis_url, folder, name, tmp_path):
    with connect(redis_url) as client:
        TaskStore(client).put(record_of(folder, name, "{input} ->"))
        CorpusStore(client, name).append(ROWS)
    url = ("--redis-url", redis_url)
    given = ("train-drafter", name, "--kind", "eagle", "--output", tmp_path)
    found = json.loads(run(*given, *SHORT, *url))
    create = run(*given, *SHORT[:-1], *url).splitlines()[-1].partition(": tasc ")[2]
    run(*shlex.split(create))
    with connect(redis_url) as client:
        assert TaskStore(client).get(name).neural == NeuralDrafting(str(tmp_path))
    assert (found["task"], found["rows"]) == (name, 38)
    assert {row["input"] for row in read_rows(tmp_path / "answers.jsonl")} == set(INPUTS)
    lone = ("--kind", "eagle", "--output", tmp_path, "--adapter", folder, *url)
    assert "is given without its base model" in run("train-drafter", name, *lone, code=2)
