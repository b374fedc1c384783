"""``tasc enrich`` and ``tasc finetune``: from rows, in files or a corpus, to a model to serve."""

import json
import os
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from tasc_store import CorpusRow, CorpusStore, TaskRecord, TaskStore, connect
from tasc_text import TaskTokenizer
from tiny import make_model, make_tokenizer

Run = Callable[..., str]
ROWS = [(f"{a} {b}", f"intent: {a}_{b}") for a in ("play", "set") for b in ("music", "alarm")] * 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("cli-finetune") / "model"
    make_tokenizer(made)
    make_model(made)
    return made


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    rows = ({"id": str(i), "input": x, "output": y} for i, (x, y) in enumerate(ROWS))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_files_are_enough_for_either(run: Run, file: Path, folder: Path, tmp_path: Path) -> None:
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
            "--output", output, *few, "--json",
        )
    )  # fmt: skip
    assert (found["rows"], found["steps"], found["new_tokens"]) == (20, 3, 6)
    assert TaskTokenizer.from_folder(output / "model").vocab_size == (
        TaskTokenizer.from_folder(enriched).vocab_size
    )


@pytest.mark.redis
def test_a_task_knows_its_model_and_its_rows(
    run: Run, redis_url: str, folder: Path, tmp_path: Path
) -> None:
    name = f"t-{uuid.uuid4().hex}"
    fingerprint = TaskTokenizer.from_folder(folder).fingerprint
    with connect(redis_url) as client:
        TaskStore(client).put(TaskRecord(name, str(folder), fingerprint, "{input}\n"))
        rows = [CorpusRow(str(i), *row) for i, row in enumerate(ROWS)]
        CorpusStore(client, name).append(rows)
    url = ("--redis-url", redis_url)
    enriched, output = tmp_path / "enriched", tmp_path / "out"
    assert "x fewer tokens" in run("enrich", name, "--budget", 5, "--output", enriched, *url)
    few = ("--epochs", 1, "--tokenizer", enriched, "--output", output)
    assert "5 new tokens" in run("finetune", name, *few, *url)
    template = ("--template", r"{input}\n", "--corpus", name)
    made = run("task", "create", f"{name}-ft", "--model", output / "model", *template, *url)
    assert f"{name}-ft" in made
    assert "has a fine-tuned model already" in run("finetune", name, *few, *url, code=1)


def test_what_is_missing_is_named(run: Run, file: Path, folder: Path, tmp_path: Path) -> None:
    output = ("--output", tmp_path / "out")
    assert "either a TASK or --train" in run("enrich", *output, code=2)
    assert "--tokenizer" in run("enrich", "--train", file, *output, code=2)
    (tmp_path / "out").mkdir()
    there = ("enrich", "--train", file, "--tokenizer", folder, *output)
    assert "is there already" in run(*there, code=1)
    assert sorted(os.listdir(tmp_path)) == ["out", "rows.jsonl"]
