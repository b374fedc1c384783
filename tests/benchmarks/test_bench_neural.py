"""The benchmark of neural drafters runs as its users run it, on a few rows."""

from pathlib import Path
from typing import Literal

import pytest
from few_rows import few_rows, last_line, run
from neural_vocabtrim import SHAPES, speed_up

from tasc_jobs.demo.tasks import MODEL

BENCHMARK = "bench_neural.py"
FEW = {"train": 32, "test": 8}


@pytest.mark.timeout(600)
def test_few_answers_are_learnt_ranked_drafted_and_tabled(tmp_path: Path) -> None:
    data, work = few_rows(tmp_path / "data", FEW), tmp_path / "work"
    few = ["--rows", "24", "--epochs", "1", "--test-rows", "8", "--repeats", "1"]
    where = ["--data", str(data), "--work", str(work)]
    few += [*where, "--processes", "1"]
    shipped, wide = ["--tasks", "massive_en"], ["--tasks", "", "--wide", str(MODEL)]
    found = last_line(run(BENCHMARK, "--parts", "vocabtrim,hybrid", *few, *shipped))
    for own in found["vocabtrim"].values():
        assert all(by["length"]["raw"] >= 1 for by in own["ranked"].values())
    for sides in found["hybrid"].values():
        assert set(sides) == {"ngrams", "neural", "always", "unsure"}
    found = last_line(run(BENCHMARK, "--parts", "frspec,microspec", *few, *wide))
    (by_policy,) = found["microspec"].values()
    assert by_policy["full"]["coverage"] == 1
    sizes = {name: side["size"] for name, side in by_policy.items()}
    assert max(sizes.values()) == sizes.pop("full") > max(sizes.values())
    again = last_line(run(BENCHMARK, "--parts", "microspec", *few, *wide))
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


@pytest.mark.parametrize("option", ["--parts", "--kinds", "--tasks"])
def test_an_unknown_part_kind_or_task_is_named(tmp_path: Path, option: str) -> None:
    done = run(BENCHMARK, option, "nothing", "--data", str(tmp_path))
    assert done.returncode == 2
    assert "nothing" in done.stderr
