"""Tests of batch jobs that write a folder of parts: equal answers, kills, bad input, object stores."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import redis
from batch_jobs import ENGINE, rows

from killable import pids
from support import failing, read_rows, write_rows
from tasc_jobs.batch.generate import generate
from tasc_jobs.batch.inputs import Source
from tasc_jobs.batch.parts import MANIFEST, generate_parts
from tasc_jobs.batch.work import JobProgress, JobReport

pytestmark = [pytest.mark.redis, pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]
COUNT = 400
PART_BYTES = 2000


@pytest.fixture
def source(tmp_path: Path) -> Source:
    (tmp_path / "in").mkdir()
    write_rows(tmp_path / "in" / "a.jsonl", rows(COUNT // 2))
    later = [{**row, "id": f"s{i}"} for i, row in enumerate(rows(COUNT // 2))]
    write_rows(tmp_path / "in" / "b.jsonl", [*later, [1]])
    return Source.of(tmp_path / "in")


@pytest.fixture
def one_file(redis_url: str, served: str, source: Source, tmp_path: Path) -> list[dict[str, Any]]:
    """The rows of the same job with one file as its output."""
    generate(redis_url, served, source, tmp_path / "one.jsonl", engine=ENGINE)
    return read_rows(tmp_path / "one.jsonl")


def parts_of(folder: Path) -> list[dict[str, Any]]:
    return [row for part in sorted(folder.glob("part-*.jsonl")) for row in read_rows(part)]


def test_parts_have_the_rows_of_one_file(redis_url, served, source, one_file, tmp_path) -> None:
    out = tmp_path / "out"
    report = generate_parts(
        redis_url, served, source, f"{out}/", engine=ENGINE, part_bytes=PART_BYTES, actors=2
    )
    assert (report.rows, report.errors) == (COUNT + 1, 1)
    assert parts_of(out) == one_file
    print(sorted(p.name for p in out.rglob("*")), report)
