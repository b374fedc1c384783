"""``tasc stats`` of files: table, JSON, a page that needs no network, and what is refused."""

import json
import re

import pytest

from support import assert_self_contained
from tasc_jobs.demo.tasks import MODEL

ROWS = ['{"input": "turn on the light", "output": "intent: on"}', '{"input": "", "output": "off"}']


@pytest.fixture
def train(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text("\n".join([*ROWS * 20, "no row"]) + "\n")
    return path


def test_people_get_tables_of_words(train, tasc, capsys):
    assert tasc("stats", "--train", train) == 0
    out = capsys.readouterr().out
    for said in ("word 2-grams, inputs", "words, outputs", "Renyi-2 bits", "typical set"):
        assert said in out
    assert "not counted: 1" in out
    assert "tokens" not in out


def test_json_is_one_line_and_tells_of_words_and_tokens(train, tasc, capsys):
    assert tasc("stats", "--train", train, "--n", 3, "--tokenizer", MODEL, "--json") == 0
    (line,) = capsys.readouterr().out.splitlines()
    found = json.loads(line)
    assert (found["rejected"], found["input"]["rows"], found["input"]["words"]) == (1, 40, 80)
    assert found["input"]["word_ngrams"]["ngrams"] == 78
    assert found["output"]["token_ngrams"]["ngrams"] == found["output"]["tokens"] > 60


@pytest.mark.parametrize(("tokenizer", "plots"), [([], 3), (["--tokenizer", MODEL], 5)])
def test_the_page_needs_no_network(train, tmp_path, tasc, capsys, tokenizer, plots):
    page = tmp_path / "report.html"
    assert tasc("stats", "--train", train, *tokenizer, "--report", page) == 0
    assert f"report: {page}" in capsys.readouterr().err
    html = page.read_text(encoding="utf-8")
    assert html.count("<svg") == plots
    for title in ("Statistics of train.jsonl", "Frequency of word 2-grams", "How long outputs are"):
        assert title in html
    assert ("Frequency of tokens" in html) == bool(tokenizer)
    assert "Words are what stands between white space" in html
    assert "block efficiency" not in html
    assert_self_contained(html)


def test_a_corpus_without_ngrams_has_a_page_too(tmp_path, tasc, capsys):
    path, page = tmp_path / "one.jsonl", tmp_path / "report.html"
    path.write_text('{"input": "", "output": "yes"}\n')
    assert tasc("stats", "--train", path, "--report", page) == 0
    assert "word 2-grams, outputs" in capsys.readouterr().out
    assert page.read_text(encoding="utf-8").count("<svg") == 1  # lengths


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["--tokenizer", "nowhere"], 1, "tokenizer.json"),
        (["--report", "nowhere/report.html"], 1, "nowhere/report.html"),
        (["--n", "0"], 2, "--n"),
        (["--n", "17"], 2, "--n"),
        (["task"], 2, "--train"),
    ],
)
def test_what_cannot_be_done_is_said(train, tasc, capsys, args, code, message):
    assert tasc("stats", "--train", train, *args) == code
    out, err = capsys.readouterr()
    assert message in re.sub(r"[\s│]+", " ", err)
    assert not out
