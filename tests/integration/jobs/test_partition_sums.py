"""Partitions of n-grams summed by Ray tasks, also when a worker dies on the way."""

import os
import sys
from pathlib import Path

import pyarrow as pa
import pytest
import ray

from tasc_jobs.errors import ClusterError
from tasc_jobs.statistics.corpus_counts import TableSum, count_rows, partition_sums
from tasc_jobs.statistics.ngrams import Units, joined

pytestmark = pytest.mark.ray
UNITS, PARTITIONS = Units(1), 3


class Deadly:
    """A table that kills the first processes that read it, one for each file still missing."""

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
def table() -> pa.Table:
    texts = [f"a b{row % 7} c{row}" for row in range(50)]
    return count_rows(UNITS, PARTITIONS, pa.table({"input": texts, "output": texts}))


def summed(blocks):
    """Frequencies by side and unit."""
    parts = list(partition_sums(blocks, UNITS, PARTITIONS))
    assert len(parts) == PARTITIONS
    both = parts[0]
    for part in parts[1:]:
        both = {key: joined(both[key], part[key]) for key in both}
    return {key: found.frequencies for key, found in both.items()}


def test_partitions_of_several_tables_sum_up_to_all(ray_cluster, table):
    expected = TableSum(UNITS)
    for _ in range(4):
        expected.add(table)
    found = summed([ray.put(table) for _ in range(4)])
    assert found == {key: of.frequencies for key, of in expected.histograms().items()}


def test_a_partition_whose_worker_dies_is_summed_again(ray_cluster, table, tmp_path):
    files = [tmp_path / "once", tmp_path / "twice"]
    found = summed([ray.put(table), ray.put(Deadly(table, files))])
    assert all(file.exists() for file in files)
    assert found == summed([ray.put(table)] * 2)


@pytest.mark.slow("kills workers until Ray gives up")
def test_a_partition_whose_workers_always_die_says_what_to_do(ray_cluster, table, tmp_path):
    files = [tmp_path / str(deaths) for deaths in range(100)]
    with pytest.raises(ClusterError):
        summed([ray.put(Deadly(table, files))])
    assert sum(file.exists() for file in files) >= 4
