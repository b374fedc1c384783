"""The benchmark runs as its users run it, and its ceiling is what its definition says."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from draft_ceiling import copy_bound
from hypothesis import given, settings
from hypothesis import strategies as st

from tasc_draft import Tokens
from tasc_draft.index.corpus_build import build_corpus
from tasc_jobs.demo.tasks import MODEL, TASKS, read_split

BENCHMARK = Path(__file__).with_name("bench_drafts.py")
VOCAB, EOS = 5, 4
TEXTS = st.lists(st.integers(0, 3), min_size=0, max_size=40)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARK), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """The JSON object and all of stdout of a run on the shipped tasks."""
    file = tmp_path_factory.mktemp("bench") / "found.json"
    done = run("--limit", "20", "--json", str(file))
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1]
    assert file.read_text(encoding="utf-8") == last + "\n"
    return json.loads(last), done.stdout


def test_the_shipped_tasks_are_measured_against_peer_and_ceiling(shipped) -> None:
    found, _ = shipped
    assert set(found["tasks"]) == set(TASKS)
    for task in found["tasks"].values():
        assert task["rows"] == 20
        assert task["tokens"] == pytest.approx(task["tokens_per_step"] * task["steps"], rel=1e-3)
        lookup = task["peers"]["prompt lookup"]
        assert lookup["tokens"] == task["tokens"]
        assert 1.0 <= lookup["tokens_per_step"] < task["tokens_per_step"]
        assert 1.0 < task["by_nodes"]["4"] < task["by_nodes"]["32"]
        assert task["frozen"] > 1.0
        assert task["ceiling"] > task["by_nodes"]["4"]


def test_figures_of_time_have_a_spread_and_shipped_tasks_no_bar_on_tokens(shipped) -> None:
    figures = {figure["name"]: figure for figure in shipped[0]["figures"]}
    step = figures["propose + observe p50, 8 nodes"]
    assert 0.0 < step["least"] <= step["value"] <= step["greatest"]
    assert step["passed"] == (step["value"] <= step["bar"])
    tokens = [f for f in figures.values() if f["unit"] == "tokens/step"]
    assert len(tokens) == len(TASKS)
    assert all(f["bar"] is None and f["passed"] is None for f in tokens)


def test_the_papers_tables_are_repeated(shipped) -> None:
    papers, text = shipped[0]["papers"], shipped[1]
    for task in TASKS:
        methods = papers["table_3_shipped"][task]
        assert methods["p_corpus"] > methods["n-grammys bigram"] > 1.0
        assert methods["tasc"] > methods["n-grammys mixed"] > 1.0
        assert papers["figure_4"][task][0] > papers["figure_4"][task][7] >= 0.0
        assert len(papers["figure_7"][task]) == 11
        assert {len(row) for row in papers["trie_2"][task].values()} == {4}
        assert list(papers["trie_3"][task]) == ["8", "16", "32", "64", "128", "256"]
    for title in ("TASC Table 3", "Figure 4", "Figure 7", "Trie Table 2", "Trie Table 3"):
        assert title in text


def test_the_last_line_says_what_was_measured_with_what(shipped) -> None:
    found, _ = shipped
    assert found["versions"]["transformers"]
    assert set(found["git"]) == {"revision", "changed"}
    assert found["machine"]["cores"] == os.cpu_count()
    assert found["rows"] == 20


def test_a_missing_data_set_is_named_and_the_others_are_measured(tmp_path) -> None:
    folder = tmp_path / "massive_en"
    folder.mkdir()
    for split, rows in (("train", 250), ("test", 8)):
        with gzip.open(folder / f"{split}.jsonl.gz", "wt", encoding="utf-8") as lines:
            lines.writelines(json.dumps(r) + "\n" for r in read_split("massive_en", split)[:rows])
    done = run(
        "--data", str(tmp_path), "--tokenizer", str(MODEL), "--limit", "5", "--tables", "bar"
    )
    assert done.returncode == 0, done.stderr
    assert f"clinc150 left out: {tmp_path / 'clinc150'} has no train and no test.jsonl.gz" in (
        done.stderr
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert list(found["tasks"]) == ["massive_en"]
    assert found["tasks"]["massive_en"]["rows"] == 5


def test_without_any_data_set_a_message_says_so(tmp_path) -> None:
    done = run("--data", str(tmp_path), "--tokenizer", str(MODEL))
    assert done.returncode == 1
    assert f"{tmp_path} has none of clinc150" in done.stderr
    assert "Traceback" not in done.stderr


@settings(max_examples=60, deadline=None)
@given(st.lists(TEXTS, min_size=1, max_size=5), TEXTS, TEXTS)
def test_the_ceiling_takes_the_longest_run_behind_the_last_token(outputs, prompt, answer) -> None:
    corpus = build_corpus(Tokens.of(outputs), fingerprint="f", vocab_size=VOCAB, eos_id=EOS)
    row = np.array(prompt, np.int32), np.array([*answer, EOS], np.int32)
    steps = plain_steps([[VOCAB, *o, EOS] for o in outputs], [*prompt, VOCAB], [*answer, EOS])
    assert copy_bound(corpus, [row]) == pytest.approx((len(answer) + 1) / steps)


def test_the_ceiling_follows_runs_longer_than_the_index_sorts_by() -> None:
    passage = [i % 4 for i in range(30)] + [0, 0, 1] + [i % 3 for i in range(30)]
    outputs = [[*passage[:40], 3], passage]
    corpus = build_corpus(Tokens.of(outputs), fingerprint="f", vocab_size=VOCAB, eos_id=EOS)
    row = np.zeros(0, np.int32), np.array([*passage, EOS], np.int32)
    assert len(passage) > 3 * corpus.depth
    assert copy_bound(corpus, [row]) == len(passage) + 1


def plain_steps(documents: list[list[int]], known: list[int], answer: list[int]) -> int:
    steps, at = 0, 0
    while at < len(answer):
        texts = [*documents, [*known, *answer[:at]]]
        last, rest = texts[-1][-1], answer[at:]
        at += 1 + max(
            agreeing(text[i + 1 :], rest)
            for text in texts
            for i, token in enumerate(text)
            if token == last
        )
        steps += 1
    return steps


def agreeing(text: list[int], other: list[int]) -> int:
    for n, (a, b) in enumerate(zip(text, other, strict=False)):
        if a != b:
            return n
    return min(len(text), len(other))
