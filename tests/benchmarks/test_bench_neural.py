"""The benchmark of neural drafters runs as its users run it, on a few rows."""

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tasc_jobs.demo.tasks import MODEL, read_split

BENCHMARK = Path(__file__).with_name("bench_neural.py")
FEW = {"train": 32, "test": 8}


def run(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARK), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.timeout(600)
def test_few_answers_are_learnt_ranked_drafted_and_tabled(tmp_path: Path) -> None:
    data, work = tmp_path / "data" / "massive_en", tmp_path / "work"
    data.mkdir(parents=True)
    for split, rows in FEW.items():
        with gzip.open(data / f"{split}.jsonl.gz", "wt", encoding="utf-8") as lines:
            lines.writelines(
                json.dumps(row) + "\n" for row in read_split("massive_en", split)[:rows]
            )
    few = ["--rows", "24", "--epochs", "1", "--test-rows", "8", "--repeats", "1"]
    where = ["--data", str(data.parent), "--work", str(work)]
    targets = ["--tasks", "massive_en", "--wide", str(MODEL), "--processes", "1"]
    done = run("--parts", "microspec,hybrid", *few, *where, *targets)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    tables = found["microspec"]
    assert len(tables) == 2  # the shipped target, and one from scratch with the same tokenizer
    for by_policy in tables.values():
        assert by_policy["full"]["coverage"] == 1
        assert all(side["equal"] for side in by_policy.values())
        assert all(side["size"] < by_policy["full"]["size"] for name, side in by_policy.items()
                   if name != "full")  # fmt: skip
    for sides in found["hybrid"].values():
        assert set(sides) == {"ngrams", "neural", "always", "served"}
        assert all(side["equal"] for side in sides.values())
    again = run("--parts", "microspec", *few, *where, *targets)
    assert json.loads(again.stdout.splitlines()[-1])["microspec"] == tables  # what is there is kept


def test_an_unknown_part_of_drafters_is_named(tmp_path: Path) -> None:
    done = run("--parts", "nothing", "--data", str(tmp_path))
    assert done.returncode == 2
    assert "nothing" in done.stderr
