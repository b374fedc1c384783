"""The batch benchmark as a user runs it, with a tiny model, and its plan of kills."""

from pathlib import Path

import pytest
from scripts import record, run

from benchmarks.batch.runs import planned


@pytest.mark.slow("benchmark smoke")
@pytest.mark.redis
@pytest.mark.ray
def test_a_job_killed_twice_has_the_undisturbed_output(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    few = ["--rows", "600", "--kills", "2", "--tiny", "--shared-ray"]
    done = run("batch/bench_batch.py", *few, "--json", file)
    found = record(done)
    assert file.read_text(encoding="utf-8") == done.stdout.splitlines()[-1] + "\n"
    assert (found["rows"], found["identical"]) == (600, True)
    assert (found["missing"], found["doubled"]) == (0, 0)
    assert found["kills"] >= 1
    assert "outputs equal byte for byte" in done.stdout


@pytest.mark.parametrize("seed", range(20))
def test_every_kind_of_kill_comes_before_one_comes_again(seed: int) -> None:
    faults = planned(5, seed, 1000)
    moments = [fault.at_row for fault in faults]
    assert len(faults) == 5
    assert len({fault.kind for fault in faults[:3]}) == 3
    assert moments == sorted(moments)
    assert moments[0] > 0
    assert moments[-1] < 900
