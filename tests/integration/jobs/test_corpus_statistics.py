"""The statistics job on a real Ray over a real Redis, against the files it was filled from."""

from importlib.resources import files
from pathlib import Path

import pytest

from tasc_jobs.demo.tasks import MODEL
from tasc_jobs.index.ingest import ingest
from tasc_jobs.statistics.ngrams import Units
from tasc_jobs.statistics.task_statistics import corpus_statistics, file_statistics
from tasc_store import connect

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
    "parallelism",
    [1, 3, pytest.param(16, marks=MORE_JOBS), pytest.param(None, marks=MORE_JOBS)],
)
def test_any_number_of_ranges_gives_the_papers_figures(
    ray_cluster, redis_url, pos_ewt, parallelism
):
    told = []
    found = corpus_statistics(
        redis_url, pos_ewt, parallelism=parallelism, progress=lambda *to: told.append(to)
    )
    counted = [to for to in told if to[0] == "count"]
    assert counted == sorted(counted)
    assert (counted[0], counted[-1]) == (("count", 0, 12_544), ("count", 12_544, 12_544))
    partitions = parallelism or 1
    summed = [("sum", done, partitions) for done in range(partitions + 1)]
    assert told == counted + (summed if partitions > 1 else [])
    assert found == file_statistics([TRAIN])
    needed = [side.words.ngrams.ngrams_for_80_percent for side in (found.input, found.output)]
    assert needed == [65_288, 63]  # 65,287 when a range forgets its border


@pytest.mark.parametrize("n", [pytest.param(1, marks=MORE_JOBS), 3])
def test_longer_ngrams_and_tokens_are_those_of_the_files(ray_cluster, redis_url, pos_ewt, n):
    units = Units.of(n, MODEL)
    found = corpus_statistics(redis_url, pos_ewt, units, parallelism=3)
    assert found == file_statistics([TRAIN], units)
    assert found.input.words.ngrams.ngrams == 204_577 - (n - 1)
    assert found.output.tokens is not None
    assert found.output.tokens.count > found.output.words.count
