"""The TASC-ft benchmark as a user runs it, its kept fine-tunes, and its figures."""

import gzip
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from scripts import TIMEOUT_S, few_rows, record, run

from benchmarks.common import write_json
from benchmarks.finetune import parts
from benchmarks.finetune.parts import Options
from benchmarks.finetune.runs import FtRun, Workshop, circumstances

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


def options_of(workshop: Workshop, tasks: Sequence[str] = ()) -> Options:
    return Options((), workshop.data, workshop.work, (), tuple(tasks), 4, 1, 1, False, None)


def test_a_run_that_was_made_as_asked_is_kept(workshop: Workshop) -> None:
    assert not workshop.is_made(RUN)
    folder = keep(workshop, RUN)
    assert workshop.is_made(RUN)
    older = json.loads((folder / "finetune.json").read_text())
    del older["settings"]["dropout"]
    (folder / "finetune.json").write_text(json.dumps(older))
    assert workshop.is_made(RUN)


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


def test_a_tokenizer_of_other_settings_is_refused(workshop: Workshop) -> None:
    run = FtRun("massive_en", n_max=2, budget=1)
    folder = workshop.tokenizer(run)
    assert workshop.tokenizer(run) == folder
    change(folder / "enrichment.json", "settings", pcs=0.5)
    with pytest.raises(SystemExit):
        workshop.tokenizer(run)


def test_figures_of_another_prompt_or_library_are_refused(workshop: Workshop) -> None:
    about = circumstances(RUN.of.prompt)
    file = keep(workshop, RUN, {"rows": 4}) / "measured-4x1.json"
    assert workshop.measured(RUN) == {"rows": 4}  # older files do not have it
    write_json(file, {"rows": 4, "measured_with": about})
    assert workshop.measured(RUN) == {"rows": 4, "measured_with": about}
    assert [each.name for each in file.parent.glob("*measured*")] == [file.name]
    other = replace(RUN.of, template="{input}?").prompt
    assert about["template"] != circumstances(other)["template"]
    for name in about:
        write_json(file, {"measured_with": about | {name: "other"}})
        with pytest.raises(SystemExit, match=name):
            workshop.measured(RUN)


def side(ms: tuple[float, float, float]) -> Any:
    return {
        "ms_per_answer": dict(zip(("least", "median", "most"), ms, strict=True)),
        "steps_per_answer": 1.0,
    }


@pytest.mark.parametrize(
    ("both", "counts"),
    [((5, 6, 6.9), [1, 1]), ((5, 6, 7.1), [1, 0]), ((5, 8.1, 9), [0, 0])],
)
def test_both_are_better_by_medians_and_by_all_runs(
    workshop: Workshop,
    both: tuple[float, float, float],
    counts: list[int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    quality = {"exact_match": 0.1, "joint_accuracy": 0.7, "intent_accuracy": 1, "slot_f1": 1}
    plain, drafted, new = side((9, 10, 11)), side((7, 8, 9)), side((7.5, 8.5, 9))
    sides = ({"plain": plain, "drafted": drafted}, {"plain": new, "drafted": side(both)})
    for budget, each in zip(parts.BEFORE_AFTER, sides, strict=True):
        keep(workshop, FtRun("massive_en", budget=budget), {"quality": quality, "sides": each})
    figures, _ = parts.both(options_of(workshop, ["massive_en"]))
    assert [figure.value for figure in figures] == counts
    assert "joint_accuracy 0.700, 0.700" in capsys.readouterr().out


def test_each_measure_is_held_to_its_own_spread_of_seeds(workshop: Workshop) -> None:
    for seed in parts.SEEDS:
        for budget in parts.BEFORE_AFTER:
            run = FtRun("massive_en", "demo", 4, budget, seed, 11_514, 4, 64)
            with_new = budget > 0
            keep(workshop, run, {
                "quality": {
                    "joint_accuracy": 0.7 + 0.01 * seed - 0.01 * with_new,
                    "intent_accuracy": 0.9, "slot_f1": 0.8 + 0.005 * seed - 0.03 * with_new,
                },
                "sides": {}, "budget": budget, "steps_per_answer": 1, "ms_per_answer": 1,
            })  # fmt: skip
    figures, _ = parts.seeds(options_of(workshop, ["massive_en"]))
    found = {figure.name.split()[1]: figure for figure in figures[1:]}
    assert {n: f.passed for n, f in found.items()} == {
        "joint_accuracy": True, "intent_accuracy": True, "slot_f1": False,
    }  # fmt: skip
    assert found["slot_f1"].value == pytest.approx(3)
    assert found["slot_f1"].bar == pytest.approx(1)


@pytest.mark.parametrize(
    ("most", "distinct"), [(500, 40), (231, 36)], ids=["all tokens", "fewer tokens than asked for"]
)
def test_the_forecast_has_the_extremes_of_settings_and_counts_distinct_fine_tunes(
    workshop: Workshop, capsys: pytest.CaptureFixture[str], most: int, distinct: int
) -> None:
    base = workshop.base("half")
    base.mkdir(parents=True)
    (base / "config.json").write_text("{}")  # the base exists already
    for task, name, budget in product(parts.FORECAST_TASKS, parts.BASES, parts.FORECAST_BUDGETS):
        new = min(budget, most) if task == "clinc150" else budget
        for seed, n_max in enumerate(parts.N_MAX[task]):
            run = FtRun(task, name, n_max, budget, seed, parts.FORECAST_ROWS[task])
            rises = (task, name, seed) == ("pos_ewt", "demo", 0)
            keep(workshop, run, {
                "sides": {}, "budget": new, "renyi2_bits": new / 100,
                "ms_per_answer": budget + 1 if rises else 999 - budget,
                "steps_per_answer": 999 - budget,
            })  # fmt: skip
    (times, steps, _), found = parts.forecast(options_of(workshop))
    assert (found["check"]["runs"], found["check"]["lines"]) == (distinct, 40)
    assert f"{distinct} distinct fine-tunes" in capsys.readouterr().out
    if distinct == 40:
        assert (times.least, times.value, times.greatest) == (-1, -0.75, 1)
        assert (steps.least, steps.value, steps.greatest) == (-1, -1, -1)
