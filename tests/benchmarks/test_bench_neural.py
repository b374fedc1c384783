"""The neural benchmark as a user runs it, on a few rows, its kept files, and its speed-ups."""

from pathlib import Path
from typing import Literal

import pytest
from scripts import TIMEOUT_S, few_rows, record, run

from benchmarks.neural.parts import SHAPES, speed_up
from tasc_jobs.demo.tasks import MODEL

FEW = {"train": 32, "test": 8}


@pytest.mark.slow("benchmark smoke")
@pytest.mark.timeout(3 * TIMEOUT_S)
def test_few_answers_are_learnt_ranked_drafted_and_tabled(tmp_path: Path) -> None:
    few = ["--rows", "24", "--epochs", "1", "--test-rows", "8", "--repeats", "1"]
    few += ["--processes", "1", "--tasks", "massive_en", "--wide", MODEL]
    where = ["--data", few_rows(tmp_path / "data", FEW), "--work", tmp_path / "work"]
    parts = "vocabtrim,frspec,microspec,hybrid"
    long_s = 2 * TIMEOUT_S
    found = record(run("neural/bench_neural.py", "--parts", parts, *few, *where, timeout_s=long_s))
    for own in found["vocabtrim"].values():
        assert all(by["length"]["raw"] >= 1 for by in own["ranked"].values())
    for sides in found["hybrid"].values():
        assert set(sides) == {"ngrams", "neural", "always", "unsure"}
    assert set(found["microspec"]) == set(found["frspec"]) == {"massive_en", "massive_en (V 100k)"}
    for by_policy in found["microspec"].values():
        assert by_policy["full"]["coverage"] == 1
        sizes = {name: side["size"] for name, side in by_policy.items()}
        assert max(sizes.values()) == sizes.pop("full") > max(sizes.values())
    assert len(found["measured_by"]) == 1
    again = record(run("neural/bench_neural.py", "--parts", "microspec", *few, *where))
    assert again["microspec"] == found["microspec"]


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
