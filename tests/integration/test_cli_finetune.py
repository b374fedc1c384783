"""``tasc enrich``, ``finetune``, ``evaluate`` and ``forecast-ft``, from files or a corpus."""

import json
import os
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import redis

from support import record_of, write_rows
from tasc_store import CorpusRow, CorpusStore, TaskStore, connect
from tasc_text import TaskTokenizer
from tiny import END, make_folder

Run = Callable[..., str]
ROWS = [(f"{a} {b}", f"intent: {a}_{b}") for a in ("play", "set") for b in ("music", "alarm")] * 5
ASKED = ("--template", r"{input}\n", "--max-tokens", 12)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("cli-evaluate") / "model")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    rows = ({"id": str(i), "input": x, "output": y} for i, (x, y) in enumerate(ROWS))
    return write_rows(tmp_path / "rows.jsonl", rows)


@pytest.fixture
def task(client: redis.Redis, folder: Path, name: str) -> str:
    TaskStore(client).put(record_of(folder, name))
    CorpusStore(client, name).append([CorpusRow(str(i), *r) for i, r in enumerate(ROWS)])
    return name


def last_line(said: str) -> dict[str, object]:
    found: dict[str, object] = json.loads(said.splitlines()[-1])
    return found


def test_files_are_enough_to_evaluate(run: Run, file: Path, folder: Path, tmp_path: Path) -> None:
    given = ("evaluate", "--test", file, "--model", folder, *ASKED, "--limit", 6)
    tables = run(*given, "--train", file, "--metrics", "labels", "--report", tmp_path / "page.html")
    for said in ("precision", "drafted", "6 of 6 drafted answers are the plain ones"):
        assert said in tables
    assert "<svg" in (tmp_path / "page.html").read_text()
    found = last_line(run(*given, "--repeats", 1, "--json"))
    assert (found["rows"], found["repeats"], found["setting"]) == (6, 1, "model")
    assert list(found["sides"]) == ["plain"]


def test_evaluations_check_a_forecast(run: Run, file: Path, folder: Path, tmp_path: Path) -> None:
    given = ("--test", file, "--train", file, "--model", folder, *ASKED, "--limit", 4)
    line = run("evaluate", *given, "--repeats", 1, "--plain", "--setting", "one", "--json")
    other = {**last_line(line), "budget": 60, "renyi2_bits": 9.0, "ms_per_answer": 1e-6}
    (tmp_path / "runs.jsonl").write_text(line + json.dumps(other) + "\n")
    found = last_line(run("forecast-ft", "--check", tmp_path / "runs.jsonl", "--json"))
    assert (found["mean_tau"], found["right_share"], found["runs"]) == (-1, 1, 2)
    assert "one" in run("forecast-ft", "--check", tmp_path / "runs.jsonl")


def test_files_are_enough_to_forecast(run: Run, file: Path, folder: Path, tmp_path: Path) -> None:
    given = ("forecast-ft", "--train", file, "--budget", "4,0")
    found = last_line(run(*given, "--tokenizer", folder, "--test", file, "--json"))
    assert [point["budget"] for point in found["points"]] == [0, 4]
    assert found["price"] is None
    report = ("--report", tmp_path / "page.html")
    tables = run(*given, "--model", folder, *ASKED[:2], *report)
    assert "ms for an answer's prompt" in tables
    assert "not measured" not in tables
    assert (tmp_path / "page.html").read_text().count("<svg") == 2


@pytest.mark.redis
def test_a_task_knows_its_model_its_prompt_and_its_rows(
    run: Run, redis_url: str, task: str, folder: Path, file: Path
) -> None:
    url = ("--redis-url", redis_url)
    few = ("--test", file, "--limit", 3, "--repeats", 1)
    found = last_line(run("evaluate", task, *few, "--max-tokens", 9, *url, "--json"))
    assert (found["model"], found["setting"], found["rows"]) == (str(folder), task, 3)
    assert found["identical"] == 3
    expected = last_line(run("forecast-ft", task, "--budget", "0,3", *url, "--json"))
    assert (expected["rows"], expected["name"]) == (10, task)
    timed = last_line(run("forecast-ft", task, "--budget", "3", "--model", folder, *url, "--json"))
    assert timed["points"][0]["ms_per_answer"] > 0


def test_what_is_missing_or_no_is_named(run: Run, file: Path, folder: Path, tmp_path: Path) -> None:
    evaluated, forecast = ("evaluate", "--test", file), ("forecast-ft", "--train", file)
    enriched = ("enrich", "--output", tmp_path / "out")
    for given, said in (
        (evaluated, "--model"),
        ((*evaluated, "--model", folder), "--template"),
        ((*evaluated, "--model", folder, "--dtype", "int4"), "dtype is int4"),
        (("forecast-ft",), "name one of a TASK"),
        ((*forecast, "--check", file), "name one of a TASK"),
        (forecast, "--tokenizer"),
        ((*forecast, "--model", folder), "--template"),
        ((*forecast, "--tokenizer", folder, "--budget", "1,x"), "--budget is '1,x'"),
        ((*enriched, "--train", file, "--pcs", 0), "--pcs is 0"),
        (enriched, "either a TASK or --train"),
        ((*enriched, "--train", file), "--tokenizer"),
    ):
        assert said in run(*given, code=2)
    assert "is no run" in run("forecast-ft", "--check", file, code=1)
    (tmp_path / "out").mkdir()
    there = (*enriched, "--train", file, "--tokenizer", folder)
    assert "already exists" in run(*there, code=1)
    assert sorted(os.listdir(tmp_path)) == ["out", "rows.jsonl"]


def test_files_are_enough_to_finetune(run: Run, file: Path, folder: Path, tmp_path: Path) -> None:
    enriched, output = tmp_path / "enriched", tmp_path / "out"
    said = run(
        "enrich", "--train", file, "--test", file, "--tokenizer", folder, "--budget", 6,
        "--output", enriched, "--json",
    )  # fmt: skip
    report = json.loads(said.splitlines()[-1])
    assert report["length_reduction"] == report["tokens_before"] / report["tokens_after"] > 1.5
    assert (report["judged_on"], report["new_tokens"]) == ("test", 6)
    few = ("--epochs", 1, "--batch-rows", 8, "--template", r"{input}\n", "--threads", 1)
    found = json.loads(
        run(
            "finetune", "intents", "--train", file, "--model", folder, "--tokenizer", enriched,
            "--output", output, *few, "--eos", END, "--json",
        )
    )  # fmt: skip
    assert (found["rows"], found["steps"], found["new_tokens"], found["end"]) == (20, 3, 6, END)
    assert TaskTokenizer.from_folder(output / "model").vocab_size == (
        TaskTokenizer.from_folder(enriched).vocab_size
    )
    # A fine-tuned model has its prompt, so none is given.
    measured = ("evaluate", "--test", file, "--model", output / "model", "--limit", 2)
    assert last_line(run(*measured, "--plain", "--repeats", 1, "--json"))["rows"] == 2


@pytest.mark.redis
def test_a_task_knows_what_to_tune(run: Run, redis_url: str, task: str, tmp_path: Path) -> None:
    url = ("--redis-url", redis_url)
    enriched, output = tmp_path / "enriched", tmp_path / "out"
    assert "x fewer tokens" in run("enrich", task, "--budget", 5, "--output", enriched, *url)
    few = ("--epochs", 1, "--tokenizer", enriched, "--output", output)
    said = run("finetune", task, *few, *url)
    assert "5 new tokens" in said
    again = run("finetune", task, *few, *url)
    assert again == said  # the same steps, seconds and folder: nothing was trained again
    assert str(output) in run("finetune", task, *few, "--seed", 1, *url, code=1)
    create, build = said.splitlines()[-2:]
    assert build == f"tasc build-index {task}-ft --redis-url {redis_url}"
    assert create.startswith("tasc ")
    run(*shlex.split(create)[1:])
    with connect(redis_url) as client:
        made, original = TaskStore(client).get(f"{task}-ft"), TaskStore(client).get(task)
    assert (made.template, made.corpus_name) == (original.template, task)
    assert Path(made.model) == output / "model"
    assert f"create {task}-ft-ft " in run("finetune", task, *few, *url)


def test_a_fine_tune_of_files_says_how_to_make_its_task(
    run: Run, file: Path, folder: Path, tmp_path: Path
) -> None:
    place = tmp_path / "two words"
    place.mkdir()
    rows = file.rename(place / "rows.jsonl")
    given = ("--train", rows, "--model", folder, "--template", r"say {input}\n", "--epochs", 0.01)
    data_dir = ("--data-dir", tmp_path / "my store")
    said = run("finetune", "calls", *given, "--output", place / "out", *data_dir)
    create, ingest, build = (shlex.split(line)[1:] for line in said.splitlines()[-3:])
    assert "calls version 1" in run(*create)
    assert "20 rows added" in run(*ingest)
    assert build == ["build-index", "calls", "--data-dir", str(tmp_path / "my store")]
    shown = json.loads(run("task", "show", "calls", *data_dir, "--json"))["record"]
    assert shown["template"] == "say {input}\n"
