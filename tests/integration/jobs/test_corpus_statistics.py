"""Tests the statistics job on a real Ray against files with the same rows, also if workers die."""

import os
import sys
from collections import deque
from importlib.resources import files
from pathlib import Path

import pyarrow as pa
import pytest
import ray

from tasc_jobs.errors import ClusterError
from tasc_jobs.index.ingest import ingest
from tasc_jobs.index.redis_source import RedisCorpusSource
from tasc_jobs.statistics import corpus_counts
from tasc_jobs.statistics.corpus_counts import (
    _PART_BYTES,
    TableSum,
    count_rows,
    partition_sums,
    split,
    split_by_partition,
)
from tasc_jobs.statistics.ngrams import Units, joined
from tasc_jobs.statistics.task_statistics import corpus_statistics, file_statistics
from tasc_store import CorpusRow, CorpusStore, connect

pytestmark = [pytest.mark.ray, pytest.mark.redis]
MORE_JOBS = pytest.mark.slow("another job over the same corpus")
TRAIN = Path(str(files("tasc_jobs.demo"))) / "data" / "pos_ewt.train.jsonl.gz"


@pytest.fixture(scope="module")
def pos_ewt(redis_url, tmp_path_factory):
    with connect(redis_url) as client:
        report = ingest(client, "pos_ewt", [TRAIN], reject=tmp_path_factory.mktemp("r") / "bad")
    assert report.added == 12_544
    return "pos_ewt"


@pytest.mark.parametrize(
    "parallelism", [1, 3, pytest.param(40, marks=MORE_JOBS), pytest.param(None, marks=MORE_JOBS)]
)
def test_statistics_are_equal_at_any_parallelism(ray_cluster, redis_url, pos_ewt, parallelism):
    reported, units = [], Units(across_rows=True)
    how = {"parallelism": parallelism, "progress": lambda *to: reported.append(to)}
    found = corpus_statistics(redis_url, pos_ewt, units, **how)
    counted = [to for to in reported if to[0] == "count"]
    assert counted == sorted(counted)
    assert (counted[0], counted[-1]) == (("count", 0, 12_544), ("count", 12_544, 12_544))
    partitions = parallelism or 1
    summed = [("sum", done, partitions) for done in range(partitions + 1)]
    assert reported == counted + (summed if partitions > 1 else [])
    assert found == file_statistics([TRAIN], units)
    needed = [side.words.ngrams.ngrams_for_80_percent for side in (found.input, found.output)]
    assert needed == [65_288, 63]  # 65,287 when a range forgets its border


def test_ranges_are_few_but_keep_all_cpus_busy(ray_cluster, redis_url, pos_ewt, client, task):
    cpus = int(ray.cluster_resources()["CPU"])
    source = RedisCorpusSource(redis_url, pos_ewt)
    found = [source.ranges(least, 32 << 20) for least in (1, 12_544 // cpus, 6272, 12_544, 20_000)]
    assert found == [4 * cpus, cpus, 2, 1, 1]
    rows = [CorpusRow(f"{n}", "x" * (1 << 20), "") for n in range(40)]
    CorpusStore(client, task).append(rows)
    large = RedisCorpusSource(redis_url, task)  # each row has a little more than 1 MiB
    assert large.ranges(20_000, 16 << 20) == 3
    assert large.ranges(1, 2 << 20) == 21 + -21 % cpus  # each CPU has as many ranges


@MORE_JOBS
def test_large_corpus_has_several_ranges_and_more_partitions(
    ray_cluster, redis_url, pos_ewt, monkeypatch
):
    monkeypatch.setattr(corpus_counts, "_LEAST_ROWS", 3000)
    monkeypatch.setattr(corpus_counts, "_PARTITION_BYTES", 1 << 17)
    reported, units = [], Units(across_rows=True)
    found = corpus_statistics(redis_url, pos_ewt, units, progress=lambda *to: reported.append(to))
    assert reported[-1][1] == reported[-1][2] > 8
    assert found == file_statistics([TRAIN], units)


UNITS, PARTITIONS = Units(1), 3


class Deadly:
    """A table that kills the first processes that read it, one for each missing file."""

    def __init__(self, table: pa.Table, files: list[Path]) -> None:
        self.parts = table, files

    def __reduce__(self):
        return read, self.parts


def read(table: pa.Table, files: list[Path]) -> pa.Table:
    for file in files:
        if not file.exists():
            file.touch()
            os._exit(1)
    return table


@pytest.fixture(autouse=True)
def _workers_cannot_import_this_file():
    module = sys.modules[__name__]
    ray.cloudpickle.register_pickle_by_value(module)
    yield
    ray.cloudpickle.unregister_pickle_by_value(module)


@pytest.fixture
def whole() -> pa.Table:
    texts = [f"a b{row % 7} c{row}" for row in range(50)]
    return count_rows(UNITS, PARTITIONS, pa.table({"input": texts, "output": texts}))


@pytest.fixture
def tables(whole) -> list[pa.Table]:
    """A table of n-grams for each partition."""
    return split(whole, PARTITIONS)[1:]


def summed(*parts):
    """Frequencies by side and unit."""
    refs = [[ray.put(table) for table in tables] for tables in parts]
    parts = list(partition_sums(deque(refs), UNITS))
    assert len(parts) == PARTITIONS
    both = parts[0]
    for part in parts[1:]:
        both = {key: joined(both[key], part[key]) for key in both}
    return {key: found.frequencies for key, found in both.items()}


def test_tables_are_split_together_also_if_a_worker_dies(ray_cluster, whole, tmp_path):
    counts = [whole, whole, Deadly(whole, [tmp_path / "once"]), whole, whole]
    half = PARTITIONS * _PART_BYTES // 2
    found = list(split_by_partition(((ray.put(each), half) for each in counts), PARTITIONS))
    assert (tmp_path / "once").exists()
    assert [len(parts) for _, parts in found] == [PARTITIONS] * 3
    split_sum, right = TableSum(UNITS), TableSum(UNITS)
    for lengths, parts in found:
        assert lengths["ngram"].null_count == lengths.num_rows
        for table in (lengths, *ray.get(list(parts))):
            split_sum.add(table)
    for _ in counts:
        right.add(whole)
    assert split_sum.rows == 50 * len(counts)
    assert split_sum.histograms() == right.histograms()


def test_partition_whose_worker_dies_is_summed_again(ray_cluster, tables, tmp_path):
    files = [tmp_path / "once", tmp_path / "twice"]
    first, *others = tables
    found = summed([first, Deadly(first, files)], *([table] * 2 for table in others))
    assert all(file.exists() for file in files)
    assert found == summed(*([table] * 2 for table in tables))


@pytest.mark.slow("kills workers until Ray gives up")
def test_partition_with_dying_workers_raises_an_error_with_a_solution(
    ray_cluster, tables, tmp_path
):
    files = [tmp_path / str(deaths) for deaths in range(100)]
    with pytest.raises(ClusterError):
        summed([Deadly(tables[0], files)], *([table] for table in tables))
    assert sum(file.exists() for file in files) >= 4
