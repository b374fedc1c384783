"""What a build says of itself: counts with their denominators, and what is in the index."""

import json

import pytest

from tasc_draft import DraftIndex, Tokens, build_index
from tasc_jobs.index_report import IndexReport
from tasc_store import Artifact

OUTPUTS = Tokens.of([[1, 2], [1, 2], [3]])  # 5 ids, and mark and end-of-sequence of each
PROMPTS = Tokens.of([[4, 5], [4, 6], [7, 8]])


def report_of(index: DraftIndex) -> IndexReport:
    artifact = Artifact("t", "f" * 32, 7, 1100, "0" * 64, 1, 3, 0.0)
    return IndexReport.of(artifact, index, {"tokenise": 1.25, "sort": 0.5})


@pytest.fixture
def report() -> IndexReport:
    index = build_index(OUTPUTS, PROMPTS, fingerprint="f" * 32, vocab_size=9, eos_id=0)
    return report_of(index)


def test_rows_outputs_and_tokens_are_counted(report: IndexReport) -> None:
    assert (report.rows, report.distinct_outputs, report.tokens) == (3, 2, 11)
    assert report.bytes_per_token == 100.0


def test_only_parts_that_are_there_are_listed(report: IndexReport) -> None:
    assert list(report.part_bytes) == ["corpus", "inputs"]
    plain = build_index(OUTPUTS, fingerprint="f" * 32, vocab_size=9, eos_id=0)
    assert list(report_of(plain).part_bytes) == ["corpus"]


def test_for_machines_it_is_one_flat_object_with_the_artifact_s_fields(report: IndexReport) -> None:
    found = json.loads(json.dumps(report.as_json))
    assert (found["version"], found["size_bytes"], found["corpus_rows"]) == (7, 1100, 3)
    assert found["seconds"] == {"tokenise": 1.25, "sort": 0.5}
    assert "artifact" not in found


def test_for_people_it_names_all_that_was_asked(report: IndexReport) -> None:
    for part in (
        "version 7 is current", "3 rows", "2 distinct outputs", "11 tokens", "1,100 bytes",
        "100.0 for each token", "inputs", "took 1.8 s", "sort 0.5 s",
    ):  # fmt: skip
        assert part in report.in_words
