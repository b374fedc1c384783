"""The benchmark of batch jobs runs as its users run it, on a few rows and a tiny model."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from batch_faults import planned

BENCHMARK = Path(__file__).with_name("bench_batch.py")


@pytest.mark.redis
@pytest.mark.ray
def test_a_job_killed_twice_has_the_undisturbed_output(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    few = ["--rows", "600", "--kills", "2", "--tiny", "--shared-ray"]
    command = [sys.executable, str(BENCHMARK), *few, "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1]
    assert file.read_text(encoding="utf-8") == last + "\n"
    found = json.loads(last)
    assert (found["rows"], found["identical"]) == (600, True)
    assert (found["missing"], found["doubled"]) == (0, 0)
    assert found["kills"] >= 1
    assert "outputs equal byte for byte" in done.stdout


def test_every_kind_of_kill_comes_before_one_comes_again() -> None:
    for seed in range(20):
        faults = planned(5, seed, 1000)
        assert len(faults) == 5
        assert len({fault.kind for fault in faults[:3]}) == 3
        moments = [fault.at_row for fault in faults]
        assert moments == sorted(moments)
        assert moments[0] > 0
        assert moments[-1] < 900
