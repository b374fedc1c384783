"""The benchmark of neural drafters runs as its users run it, on a few rows."""

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest
from neural_vocabtrim import SHAPES, speed_up

from tasc_jobs.demo.tasks import MODEL, read_split

BENCHMARK = Path(__file__).with_name("bench_neural.py")
FEW = {"train": 32, "test": 8}


def run(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARK), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def last_line(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


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
    few += [*where, "--processes", "1"]
    shipped, wide = ["--tasks", "massive_en"], ["--tasks", "", "--wide", str(MODEL)]
    found = last_line(run("--parts", "vocabtrim,hybrid", *few, *shipped))
    for own in found["vocabtrim"].values():
        assert all(by["length"]["raw"] >= 1 for by in own["ranked"].values())
    for sides in found["hybrid"].values():
        assert set(sides) == {"ngrams", "neural", "always", "unsure"}
    found = last_line(run("--parts", "frspec,microspec", *few, *wide))
    (by_policy,) = found["microspec"].values()
    assert by_policy["full"]["coverage"] == 1
    sizes = {name: side["size"] for name, side in by_policy.items()}
    assert max(sizes.values()) == sizes.pop("full") > max(sizes.values())
    again = last_line(run("--parts", "microspec", *few, *wide))
    assert again["microspec"] == found["microspec"]  # what is there is kept


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
