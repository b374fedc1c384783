"""The requests benchmark as a user runs it, on a few rows."""

from pathlib import Path

import pytest
from scripts import record, run

# Bars that need more rows: times, and points of quality.
TIMED = ("time of guides", "two in a batch", "quality lost")


@pytest.mark.slow("benchmark smoke")
def test_a_few_rows_of_each_part_reach_the_bars_that_are_not_times(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    parts = "grid,choices,schemas,adapters,nf4"  # `sampling` is a test of tasc_engine
    few = ["--requests", "8", "--rows", "8", "--schemas", "4", "--repeats", "1"]
    done = run("requests/bench_requests.py", "--parts", parts, *few, "--json", file)
    found = record(done)
    assert file.read_text(encoding="utf-8") == done.stdout.splitlines()[-1] + "\n"
    assert set(found) >= {*parts.split(","), "git"}
    failed = [f["name"] for f in found["figures"] if f["passed"] is False]
    assert [name for name in failed if not any(timed in name for timed in TIMED)] == []
    assert len(found["figures"]) >= 13
