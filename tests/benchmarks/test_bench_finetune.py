"""The TASC-ft benchmark as a user runs it, its kept fine-tunes, and its figures."""

import gzip
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from scripts import TIMEOUT_S, few_rows, record, run

from benchmarks.finetune.runs import FtRun, Workshop

LEARNT = 8
OTHERS = {"massive_en": "intent: a, slot fills: {}", "pos_ewt": "A B", "clinc150": "a"}
RUN = FtRun("massive_en", budget=0)
FEW = {"train": 48, "test": 8}


@pytest.mark.slow("benchmark smoke")
@pytest.mark.timeout(2 * TIMEOUT_S)
def test_few_rows_are_enriched_learnt_answered_and_tabled(tmp_path: Path) -> None:
    few = ["--tasks", "massive_en", "--test-rows", "8", "--repeats", "1", "--processes", "1"]
    where = ["--data", few_rows(tmp_path / "data", FEW), "--work", tmp_path / "work"]
    found = record(run("finetune/bench_ft.py", "--parts", "lengths,both", *few, *where))
    lengths = found["lengths"]["tasc-demo-7m massive_en"]
    assert lengths["reduction"][0] == 1 < lengths["reduction"][1] <= lengths["reduction"][-1]
    assert len(found["both"]) == 2
    for measured in found["both"].values():
        assert measured["rows"] == measured["identical"] == FEW["test"]
    again = run("finetune/bench_ft.py", "--parts", "both", *few, *where)
    assert "measuring" not in again.stderr
    assert record(again)["both"] == found["both"]


@pytest.fixture
def workshop(tmp_path: Path) -> Workshop:
    for task, output in OTHERS.items():
        (tmp_path / "data" / task).mkdir(parents=True)
        with gzip.open(tmp_path / "data" / task / "train.jsonl.gz", "wt") as lines:
            for n in range(LEARNT):
                lines.write(json.dumps({"id": str(n), "input": "x", "output": output}) + "\n")
    return Workshop(tmp_path / "data", tmp_path / "work", 4, 1)


def keep(workshop: Workshop, run: FtRun, found: Any = None) -> Path:
    """Write the files of a run as `tasc finetune` and a measurement do."""
    folder = workshop.work / run.name
    folder.mkdir(parents=True)
    settings = asdict(run.settings) | {"epochs": float(run.settings.epochs), "device": "cpu"}
    data = {"task": run.task, "rows": LEARNT - 1, "too_long": 1}
    (folder / "finetune.json").write_text(json.dumps({"data": data, "settings": settings}))
    if found is not None:
        (folder / "measured-4x1.json").write_text(json.dumps(found))
    return folder


def change(file: Path, part: str, **to: Any) -> None:
    found = json.loads(file.read_text())
    found[part] |= to
    file.write_text(json.dumps(found))


@pytest.mark.parametrize(
    ("part", "to"),
    [
        ("settings", {"learning_rate": 2e-4}),
        ("settings", {"dropout": 0.2, "batch_rows": 64}),
        ("data", {"rows": 3}),
    ],
)
def test_a_run_that_was_made_otherwise_is_refused(
    workshop: Workshop, part: str, to: dict[str, Any]
) -> None:
    folder = keep(workshop, RUN)
    change(folder / "finetune.json", part, **to)
    with pytest.raises(SystemExit) as refusal:
        workshop.is_made(RUN)
    assert all(name in str(refusal.value) for name in to)
