"""The benchmark of TASC-ft runs as its users run it, on a few rows."""

from pathlib import Path

from few_rows import few_rows, last_line, run

FEW = {"train": 48, "test": 8}
BENCHMARK = "bench_ft.py"


def test_few_rows_are_enriched_learnt_answered_and_tabled(tmp_path: Path) -> None:
    data, work = few_rows(tmp_path / "data", FEW), tmp_path / "work"
    few = ["--tasks", "massive_en", "--test-rows", "8", "--repeats", "1", "--processes", "1"]
    where = ["--data", str(data), "--work", str(work)]
    found = last_line(run(BENCHMARK, "--parts", "lengths,both", *few, *where))
    lengths = found["lengths"]["tasc-demo-7m massive_en"]
    assert lengths["reduction"][0] == 1 < lengths["reduction"][1] <= lengths["reduction"][-1]
    assert len(found["both"]) == 2
    for measured in found["both"].values():
        assert measured["rows"] == measured["identical"] == FEW["test"]
    again = run(BENCHMARK, "--parts", "both", *few, *where)
    assert "measuring" not in again.stderr  # what is there is not made again
    assert last_line(again)["both"] == found["both"]


def test_an_unknown_part_is_named(tmp_path: Path) -> None:
    done = run(BENCHMARK, "--parts", "nothing", "--data", str(tmp_path))
    assert done.returncode == 2
    assert "nothing" in done.stderr
