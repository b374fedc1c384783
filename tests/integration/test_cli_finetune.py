"""``tasc enrich``, ``finetune``, ``evaluate`` and ``forecast-ft``, from files or a corpus."""

import json
import os
import shlex
from collections.abc import Callable
from dataclasses import replace
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


def last_line(printed: str) -> dict[str, object]:
    found: dict[str, object] = json.loads(printed.splitlines()[-1])
    return found


def test_model_is_evaluated_on_files(run: Run, file: Path, folder: Path, tmp_path: Path) -> None:
    given = ("evaluate", "--test", file, "--model", folder, *ASKED, "--limit", 6)
    tables = run(*given, "--train", file, "--metrics", "labels", "--report", tmp_path / "page.html")
    for printed in ("precision", "drafted", "6 of 6 drafted answers"):
        assert printed in tables
    assert "<svg" in (tmp_path / "page.html").read_text()
    found = last_line(run(*given, "--repeats", 1, "--json"))
    assert (found["rows"], found["repeats"], found["setting"]) == (6, 1, "model")
    assert list(found["sides"]) == ["plain"]


def test_forecast_reads_files(run: Run, file: Path, folder: Path, tmp_path: Path) -> None:
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
def test_evaluation_and_forecast_use_model_prompt_and_rows_of_the_task(
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


@pytest.mark.redis
def test_choices_of_a_task_are_judged_by_their_probabilities(
    run: Run, redis_url: str, client: redis.Redis, name: str, folder: Path, file: Path
) -> None:
    choices = tuple(sorted({output for _, output in ROWS}))
    record = record_of(folder, name, choices=choices)
    fitted_for = record.scoring_fingerprint
    TaskStore(client).put(replace(record, label_temperature=2.0, calibrated_for=fitted_for))
    given = ("evaluate", name, "--metrics", "labels", "--repeats", 1, "--redis-url", redis_url)
    found = last_line(run(*given, "--test", file, "--plain", "--json"))["reliability"]
    assert list(found) == ["uncalibrated", "calibrated"]
    assert 0 <= found["calibrated"]["accuracy"] == found["uncalibrated"]["accuracy"] <= 1
    assert found["calibrated"]["error"] != found["uncalibrated"]["error"]
    # The calibration is for the task's own prompt.
    prompt = ("--template", r"say {input}\n")
    other = last_line(run(*given, "--test", file, *prompt, "--plain", "--json"))["reliability"]
    assert list(other) == ["uncalibrated"]
    rows = write_rows(file.with_name("wrong.jsonl"), [{"input": "x", "output": "intent: y"}])
    assert "'intent: y'" in run(*given, "--test", rows, code=2)


def test_missing_options_and_wrong_values_are_named_in_the_error(
    run, file, folder, tmp_path
) -> None:
    evaluated, forecast = ("evaluate", "--test", file), ("forecast-ft", "--train", file)
    enriched = ("enrich", "--output", tmp_path / "out")
    for given, printed in (
        (evaluated, "--model"),
        ((*evaluated, "--model", folder), "--template"),
        ((*evaluated, "--model", folder, "--dtype", "int4"), "int4"),
        (("forecast-ft",), "--train"),
        ((*forecast, "--tokenizer", folder, "--budget", "1,x"), "--budget is '1,x'"),
        ((*enriched, "--train", file, "--pcs", 0), "--pcs is 0"),
    ):
        assert printed in run(*given, code=2)
    (tmp_path / "out").mkdir()
    there = (*enriched, "--train", file, "--tokenizer", folder)
    assert "already exists" in run(*there, code=1)
    assert sorted(os.listdir(tmp_path)) == ["out", "rows.jsonl"]


def test_model_is_enriched_and_fine_tuned_on_files(run, file, folder, tmp_path) -> None:
    enriched, output = tmp_path / "enriched", tmp_path / "out"
    printed = run(
        "enrich", "--train", file, "--test", file, "--tokenizer", folder, "--budget", 6,
        "--output", enriched, "--json",
    )  # fmt: skip
    report = json.loads(printed.splitlines()[-1])
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
def test_fine_tuned_model_of_a_task_becomes_a_task_with_the_same_corpus(
    run: Run, redis_url: str, task: str, tmp_path: Path
) -> None:
    url = ("--redis-url", redis_url)
    enriched, output = tmp_path / "enriched", tmp_path / "out"
    assert "x fewer tokens" in run("enrich", task, "--budget", 5, "--output", enriched, *url)
    few = ("--epochs", 1, "--tokenizer", enriched, "--output", output)
    printed = run("finetune", task, *few, *url)
    assert "5 new tokens" in printed
    create, build = printed.splitlines()[-2:]
    assert build == f"tasc build-index {task}-ft --redis-url {redis_url}"
    assert create.startswith("tasc ")
    run(*shlex.split(create)[1:])
    with connect(redis_url) as client:
        made, original = TaskStore(client).get(f"{task}-ft"), TaskStore(client).get(task)
    assert (made.template, made.corpus_name) == (original.template, task)
    assert Path(made.model) == output / "model"
    assert f"create {task}-ft-ft " in run("finetune", task, *few, *url)


def test_commands_printed_after_a_fine_tune_create_its_task(run, file, folder, tmp_path) -> None:
    place = tmp_path / "two words"
    place.mkdir()
    rows = file.rename(place / "rows.jsonl")
    given = ("--train", rows, "--model", folder, "--template", r"say {input}\n", "--epochs", 0.01)
    data_dir = ("--data-dir", tmp_path / "my store")
    printed = run("finetune", "calls", *given, "--output", place / "out", *data_dir)
    create, ingest, build = (shlex.split(line)[1:] for line in printed.splitlines()[-3:])
    assert "calls version 1" in run(*create)
    assert "20 rows added" in run(*ingest)
    assert build == ["build-index", "calls", "--data-dir", str(tmp_path / "my store")]
    shown = json.loads(run("task", "show", "calls", *data_dir, "--json"))["record"]
    assert shown["template"] == "say {input}\n"
