"""What the tasks of the statistics job do, in this process: no cluster."""

import random
from functools import partial

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tasc_jobs.demo.tasks import MODEL
from tasc_jobs.index.redis_source import RedisCorpusSource
from tasc_jobs.statistics.corpus_counts import TableSum, count_rows, lengths_in, ngrams_in
from tasc_jobs.statistics.ngrams import Units, joined
from tasc_jobs.statistics.task_statistics import file_statistics, statistics_of
from tasc_store import CorpusRow, CorpusStore

pytestmark = pytest.mark.redis

WORDS = ["a", "b", "c", "naïve", "日本"]


@pytest.fixture
def rows(client, task, tmp_path):
    """A random corpus in Redis, and the same rows as a file."""
    rng = random.Random(7)
    said = [" ".join(rng.choices(WORDS, k=rng.randrange(5))) for _ in range(120)]
    pairs = [(said[i], f"{said[i + 60]} {WORDS[i % 3]}") for i in range(60)]
    CorpusStore(client, task).append([CorpusRow(str(i), *pair) for i, pair in enumerate(pairs)])
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f'{{"input": "{i}", "output": "{o}"}}\n' for i, o in pairs))
    return path


def sum_of(tables, units):
    total = TableSum(units)
    for table in tables:
        total.add(table)
    return total


@settings(
    max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
@given(
    n=st.integers(1, 4),
    parts=st.integers(1, 60),
    batch_rows=st.integers(1, 30),
    partitions=st.integers(1, 9),
    rng=st.randoms(),
)
def test_the_parts_of_a_corpus_sum_up_to_the_file_however_it_is_cut(
    redis_url, task, rows, n, parts, batch_rows, partitions, rng
):
    units = Units.of(n, MODEL)
    source = RedisCorpusSource(redis_url, task, batch_rows=batch_rows, previous_words=units.n - 1)
    read = [table for part in source.get_read_tasks(parts) for table in part()]
    counted = list(map(partial(count_rows, units, partitions), read))
    rng.shuffle(counted)
    lengths = sum_of(map(lengths_in, counted), units)
    assert lengths.rows == 60
    found = lengths.histograms()
    for partition in range(partitions):
        part = sum_of((ngrams_in(table, partition) for table in counted), units).histograms()
        found = {key: joined(found[key], part[key]) for key in found}
    whole = sum_of(counted, units)
    assert (whole.rows, whole.histograms()) == (60, found)
    assert statistics_of(found, units) == file_statistics([rows], units)
