"""Tests the report of a build: counts with their denominators, and the parts of the index."""

import json

import pytest

from tasc_draft import DraftIndex, Tokens, build_index
from tasc_jobs.index.publish import IndexReport
from tasc_store import Artifact

OUTPUTS = Tokens.of([[1, 2], [1, 2], [3]])  # 5 ids, and mark and end-of-sequence of each
PROMPTS = Tokens.of([[4, 5], [4, 6], [7, 8]])
FACTS = {"fingerprint": "f" * 32, "vocab_size": 9, "eos_id": 0}


def report_of(index: DraftIndex, max_bytes: int | None = None) -> IndexReport:
    artifact = Artifact("t", "f" * 32, 7, 1100, "0" * 64, 1, 3, 0.0)
    return IndexReport(artifact, index, {"tokenise": 1.25, "sort": 0.5}, max_bytes)


@pytest.fixture
def index() -> DraftIndex:
    return build_index(OUTPUTS, PROMPTS, **FACTS)


def test_bytes_a_token_are_of_outputs_with_their_marks_and_parts_and_fields_are_listed(index):
    report = report_of(index)
    assert list(report.part_bytes) == ["corpus", "inputs"]
    assert list(report_of(build_index(OUTPUTS, **FACTS)).part_bytes) == ["corpus"]
    found = json.loads(json.dumps(report.as_json))
    assert (found["version"], found["size_bytes"], found["corpus_rows"]) == (7, 1100, 3)
    assert found["seconds"] == {"tokenise": 1.25, "sort": 0.5}
    assert "artifact" not in found
    assert (found["rows"], found["distinct_outputs"]) == (3, 2)
    assert found["tokens"] == 11 == sum(map(len, [[1, 2], [1, 2], [3]])) + 2 * 3
    assert found["corpus_bytes_per_token"] == index.corpus.nbytes / 11
    assert found["bytes_per_token"] == index.nbytes / 11
    assert found["bytes_per_token"] > found["corpus_bytes_per_token"]
    for of in (index.corpus, index):
        assert f"{of.nbytes / 11:.2f} " in report.in_words
