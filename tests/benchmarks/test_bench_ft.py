"""The benchmark of TASC-ft runs as its users run it, on a few rows."""

import gzip
import json
import subprocess
import sys
from pathlib import Path

from tasc_jobs.demo.tasks import read_split

BENCHMARK = Path(__file__).with_name("bench_ft.py")
FEW = {"train": 48, "test": 8}


def run(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARK), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_few_rows_are_enriched_learnt_answered_and_tabled(tmp_path: Path) -> None:
    data, work = tmp_path / "data" / "massive_en", tmp_path / "work"
    data.mkdir(parents=True)
    for split, rows in FEW.items():
        with gzip.open(data / f"{split}.jsonl.gz", "wt", encoding="utf-8") as lines:
            lines.writelines(
                json.dumps(row) + "\n" for row in read_split("massive_en", split)[:rows]
            )
    few = ["--tasks", "massive_en", "--test-rows", "8", "--repeats", "1", "--processes", "1"]
    where = ["--data", str(data.parent), "--work", str(work)]
    done = run("--parts", "lengths,both", *few, *where)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    lengths = found["lengths"]["tasc-demo-7m massive_en"]
    assert lengths["reduction"][0] == 1 < lengths["reduction"][1] <= lengths["reduction"][-1]
    assert len(found["both"]) == 2
    for measured in found["both"].values():
        assert measured["rows"] == measured["identical"] == FEW["test"]
    again = run("--parts", "both", *few, *where)
    assert "measuring" not in again.stderr  # what is there is not made again
    assert json.loads(again.stdout.splitlines()[-1])["both"] == found["both"]


def test_an_unknown_part_is_named(tmp_path: Path) -> None:
    done = run("--parts", "nothing", "--data", str(tmp_path))
    assert done.returncode == 2
    assert "nothing" in done.stderr
