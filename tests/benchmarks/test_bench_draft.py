"""The drafts benchmark as a user runs it, its data sets, and its ceiling against brute force."""

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripts import record, run

from benchmarks.draft.ceiling import copy_bound
from tasc_draft import Tokens, build_index
from tasc_draft.index.corpus import CorpusIndex
from tasc_jobs.demo.tasks import TASKS

VOCAB, EOS = 5, 4
TEXTS = st.lists(st.integers(0, 3), min_size=0, max_size=40)


@pytest.mark.slow("benchmark smoke")
def test_shipped_tasks_are_measured_with_bars_peers_and_papers(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    done = run("draft/bench_drafts.py", "--limit", "20", "--json", file)
    found = record(done)
    assert file.read_text(encoding="utf-8") == done.stdout.splitlines()[-1] + "\n"

    assert found["rows"] == 20
    assert found["versions"]["transformers"]
    assert set(found["git"]) == {"revision", "changed"}
    assert found["machine"]["cores"] == os.cpu_count()

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

    figures = {figure["name"]: figure for figure in found["figures"]}
    step = figures["propose + observe p50, 8 nodes"]
    assert 0.0 < step["least"] <= step["value"] <= step["greatest"]
    assert step["passed"] == (step["value"] <= step["bar"])
    tokens = [f for f in figures.values() if f["unit"] == "tokens/step"]
    assert len(tokens) == len(TASKS)
    assert all(f["bar"] is None and f["passed"] is None for f in tokens)

    papers = found["papers"]
    for task in TASKS:
        methods = papers["table_3_shipped"][task]
        assert methods["p_corpus"] > methods["n-grammys bigram"] > 1.0
        assert methods["tasc"] > methods["n-grammys mixed"] > 1.0
        assert papers["figure_4"][task][0] > papers["figure_4"][task][7] >= 0.0
        assert len(papers["figure_7"][task]) == 11
        assert {len(row) for row in papers["trie_2"][task].values()} == {4}
        assert list(papers["trie_3"][task]) == ["8", "16", "32", "64", "128", "256"]
    for title in ("TASC Table 3", "Figure 4", "Figure 7", "Trie Table 2", "Trie Table 3"):
        assert title in done.stdout


@settings(max_examples=60, deadline=None)
@given(st.lists(TEXTS, min_size=1, max_size=5), TEXTS, TEXTS)
def test_the_ceiling_takes_the_longest_run_after_the_last_token(outputs, prompt, answer) -> None:
    corpus = corpus_of(outputs)
    row = np.array(prompt, np.int32), np.array([*answer, EOS], np.int32)
    steps = plain_steps([[VOCAB, *o, EOS] for o in outputs], [*prompt, VOCAB], [*answer, EOS])
    assert copy_bound(corpus, [row]) == pytest.approx((len(answer) + 1) / steps)


def corpus_of(outputs: list[list[int]]) -> CorpusIndex:
    return build_index(Tokens.of(outputs), fingerprint="f", vocab_size=VOCAB, eos_id=EOS).corpus


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
