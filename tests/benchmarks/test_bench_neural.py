"""The benchmark of neural drafters runs as its users run it, on a few rows."""

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest
from neural_vocabtrim import SHAPES, speed_up

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
    done = run("--parts", "vocabtrim,frspec,microspec,hybrid", *few, *where, *targets)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    tables = found["microspec"]
    assert len(tables) == 2  # the shipped target, and one from scratch with the same tokenizer
    for by_policy in tables.values():
        assert by_policy["full"]["coverage"] == 1
        sizes = {name: side["size"] for name, side in by_policy.items()}
        assert max(sizes.values()) == sizes.pop("full") > max(sizes.values())
    assert all(by["length"]["raw"] >= 1 for own in found["vocabtrim"].values()
               for by in own["ranked"].values())  # fmt: skip
    assert len(found["frspec"]) == 2
    for sides in found["hybrid"].values():
        assert set(sides) == {"ngrams", "neural", "always", "unsure"}
    again = run("--parts", "microspec", *few, *where, *targets)
    assert json.loads(again.stdout.splitlines()[-1])["microspec"] == tables  # what is there is kept


@pytest.mark.parametrize(
    ("kind", "length", "head", "wanted"),
    [
        ("eagle", 3.141, 394.0 / 394.0, 1.475),
        ("eagle", 3.081, 101.3 / 394.0, 1.745),
        ("independent", 3.846, 131.3 / 131.3, 2.765),
        ("independent", 3.682, 33.8 / 131.3, 2.900),
    ],
)
def test_memory_bound_speed_ups_are_the_papers(
    kind: Literal["eagle", "independent"], length: float, head: float, wanted: float
) -> None:
    """Table 1 of VocabTrim, its first column."""
    assert speed_up(length, SHAPES["Llama-3.2-3B"], kind, head) == pytest.approx(wanted, rel=0.005)


def test_an_unknown_part_of_drafters_is_named(tmp_path: Path) -> None:
    done = run("--parts", "nothing", "--data", str(tmp_path))
    assert done.returncode == 2
    assert "nothing" in done.stderr
