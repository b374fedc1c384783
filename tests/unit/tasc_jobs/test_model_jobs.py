"""Jobs that run a model: bigrams into a file, and step costs."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from support import refused
from tasc_draft.index.bigrams import read_bigrams
from tasc_engine import ModelSource
from tasc_engine.model.loading import load_model
from tasc_jobs.errors import JobError
from tasc_jobs.index.model_bigrams import BigramJob, make_bigrams, model_bigrams, vocabulary
from tasc_jobs.tuning.forecast import read_cost_file
from tasc_jobs.tuning.measure_cost import CostJob, in_words, measure_cost
from tasc_runtime.errors import FileError
from tasc_text import TaskTokenizer, TextError
from tiny import make_folder


def test_the_file_holds_what_the_model_says(folder: Path, tmp_path: Path) -> None:
    done: list[int] = []
    report = make_bigrams(BigramJob(str(folder), top=4), tmp_path / "table.npz", done.append)
    tokenizer = TaskTokenizer.from_folder(folder)
    table = read_bigrams(tmp_path / "table.npz", tokenizer.fingerprint)
    tokens, logp = model_bigrams(load_model(ModelSource(folder)), tokenizer.vocab_size, top=4)
    np.testing.assert_array_equal(table.tokens, tokens)
    np.testing.assert_allclose(table.logp, logp, atol=1e-5)
    assert table.model == report.model == str(folder)
    assert (report.vocab_size, report.top) == tokens.shape
    assert report.bytes == (tmp_path / "table.npz").stat().st_size
    assert sum(done) == vocabulary(str(folder)) == tokenizer.vocab_size


def test_the_command_ends_with_its_report_as_json(
    folder: Path, tmp_path: Path, tasc: Callable[..., int], capsys: pytest.CaptureFixture
) -> None:
    output = tmp_path / "table.npz"
    assert tasc("model-bigrams", folder, "--output", output, "--top", 2, "--json") == 0
    out, err = capsys.readouterr()
    report = json.loads(out.splitlines()[-1])
    table = read_bigrams(output, report["fingerprint"])
    assert (report["file"], report["top"]) == (str(output), table.tokens.shape[1]) == (
        str(output), 2,
    )  # fmt: skip
    assert f"{report['vocab_size']}/{report['vocab_size']} tokens" in err


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["--output", "nowhere/table.npz"], 1, "nowhere/table.npz"),
        (["--output", "t", "--dtype", "float8"], 1, "float8"),
        (["--output", "t", "--device", "sofa"], 1, "sofa"),
        (["--output", "t", "--top", "9999"], 1, "9999"),
        (["--output", "t", "--adapter", "/nowhere"], 1, "/nowhere"),
        (["--output", "t", "--top", "0"], 2, "--top"),
        ([], 2, "--output"),
    ],
)
def test_what_cannot_be_done_is_said_and_nothing_is_written(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tasc: Callable[..., int],
    capsys: pytest.CaptureFixture, args: list[str], code: int, message: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert tasc("model-bigrams", folder, *args) == code
    err = capsys.readouterr().err
    assert message in err
    assert "Traceback" not in err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("kind", "output", "job"),
    [
        (FileError, "nowhere/t", {}),
        (TextError, "t", {"model": "/nowhere"}),
        (JobError, "t", {"device": "cuda:99"}),
    ],
)
def test_errors_have_the_jobs_own_kinds(
    folder: Path, tmp_path: Path, kind: type[Exception], output: str, job: dict[str, str]
) -> None:
    with refused(kind, *job.values()):
        make_bigrams(BigramJob(**{"model": str(folder), **job}), tmp_path / output)


def test_a_model_the_engine_does_not_take_is_named(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model")
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    content["added_tokens"].append({**content["added_tokens"][0], "id": 999, "content": "more"})
    path.write_text(json.dumps(content))
    with refused(JobError, str(folder)):
        make_bigrams(BigramJob(str(folder)), tmp_path / "t")


def job(folder: Path, **settings: object) -> CostJob:
    return CostJob(str(folder), device="cpu", rows=4, max_model_len=64, **settings)


def test_a_forecast_reads_what_was_measured(tmp_path: Path) -> None:
    costs = measure_cost(job(make_folder(tmp_path / "model")))
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(costs.as_json()))
    for rows in (1, 2, 4):
        curve = read_cost_file(path).curve(rows, context=20)
        assert curve.tokens[0] == rows
        assert curve.plain > 0
    said = in_words(costs)
    assert re.search(r"b =   4, context +\d+; by draft tokens a row  0: [\d.]+, 1: ", said)


@pytest.mark.parametrize(("settings", "words"), [({"dtype": "int8"}, "int8"), ({}, "")])
def test_what_cannot_be_measured_is_refused(
    tmp_path: Path, settings: dict[str, str], words: str
) -> None:
    with refused(JobError, words):
        measure_cost(job(tmp_path, **settings))
