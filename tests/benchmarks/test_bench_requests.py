"""The benchmark of requests runs as its users run it, on a few rows."""

import json
import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).with_name("bench_requests.py")
# Too few rows to time anything, or to tell a point of quality.
TIMED = ("time of guides", "two in a batch", "quality lost")


def test_a_few_rows_of_each_part_reach_the_bars_that_are_no_times(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    parts = "grid,choices,schemas,adapters,nf4"  # the rest is a test of its own
    few = ["--requests", "8", "--rows", "8", "--schemas", "4", "--repeats", "1"]
    command = [sys.executable, str(BENCHMARK), "--parts", parts, *few, "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1]
    assert file.read_text(encoding="utf-8") == last + "\n"
    found = json.loads(last)
    assert set(found) >= {*parts.split(","), "git"}
    failed = [f["name"] for f in found["figures"] if f["passed"] is False]
    assert [name for name in failed if not any(timed in name for timed in TIMED)] == []
    assert len(found["figures"]) >= 13


def test_an_unknown_part_is_named() -> None:
    command = [sys.executable, str(BENCHMARK), "--parts", "nothing"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "nothing" in done.stderr
