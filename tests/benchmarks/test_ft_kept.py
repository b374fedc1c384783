"""Fine-tunes that are kept: refused if made otherwise, and what is said of their figures."""

import gzip
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import ft_both
import ft_forecast
import ft_kept
import ft_seeds
import pytest
from bench_ft import Asked
from ft_runs import FtRun, Workshop
from rich.console import Console

LEARNT = 8
OTHERS = {"massive_en": "intent: a, slot fills: {}", "pos_ewt": "A B", "clinc150": "a"}
RUN = FtRun("massive_en", budget=0)


@pytest.fixture
def workshop(tmp_path: Path) -> Workshop:
    for task, output in OTHERS.items():
        (tmp_path / "data" / task).mkdir(parents=True)
        with gzip.open(tmp_path / "data" / task / "train.jsonl.gz", "wt") as lines:
            for n in range(LEARNT):
                lines.write(json.dumps({"id": str(n), "input": "x", "output": output}) + "\n")
    return Workshop(tmp_path / "data", tmp_path / "work", 4, 1)


def keep(workshop: Workshop, run: FtRun, found: Any = None) -> Path:
    """As `tasc finetune` and a measurement leave a run."""
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


def asked_of(workshop: Workshop, tasks: Sequence[str] = ()) -> Asked:
    return Asked((), workshop.data, workshop.work, (), tuple(tasks), 4, 1, 1, False, None)


def test_a_run_that_was_made_as_asked_is_kept(workshop: Workshop) -> None:
    assert not workshop.is_made(RUN)
    folder = keep(workshop, RUN)
    assert workshop.is_made(RUN)
    older = json.loads((folder / "finetune.json").read_text())
    del older["settings"]["dropout"]
    (folder / "finetune.json").write_text(json.dumps(older))
    assert workshop.is_made(RUN)


@pytest.mark.parametrize(
    ("part", "to", "said"),
    [
        ("settings", {"learning_rate": 2e-4}, "learning_rate is 0.0002 there and 0.003 here"),
        ("settings", {"dropout": 0.2, "batch_rows": 64}, "dropout is 0.2 .*, batch_rows is 64"),
        ("data", {"rows": 3}, "rows is 4 there and 8 here"),
    ],
)
def test_a_run_that_was_made_otherwise_is_refused(
    workshop: Workshop, part: str, to: dict[str, Any], said: str
) -> None:
    folder = keep(workshop, RUN)
    change(folder / "finetune.json", part, **to)
    with pytest.raises(SystemExit, match=f"{folder} was .*{said}.*another --work, or delete"):
        workshop.is_made(RUN)


def test_a_tokenizer_of_other_settings_is_refused(workshop: Workshop) -> None:
    run = FtRun("massive_en", n_max=2, budget=1)
    folder = workshop.tokenizer(run)
    assert workshop.tokenizer(run) == folder
    change(folder / "enrichment.json", "settings", pcs=0.5)
    with pytest.raises(SystemExit, match="pcs is 0.5 there and 0.02 here"):
        workshop.tokenizer(run)


def test_figures_of_another_prompt_or_library_are_refused(workshop: Workshop) -> None:
    about = ft_kept.circumstances(RUN.of.prompt)
    file = keep(workshop, RUN, {"rows": 4}) / "measured-4x1.json"
    assert workshop.measured(RUN) == {"rows": 4}  # older ones say nothing of it
    ft_kept.write_whole(file, {"rows": 4, "measured_with": about})
    assert workshop.measured(RUN) == {"rows": 4, "measured_with": about}
    assert [each.name for each in file.parent.glob("*measured*")] == [file.name]
    other = replace(RUN.of, template="{input}?").prompt
    assert about["template"] != ft_kept.circumstances(other)["template"]
    for name in about:
        ft_kept.write_whole(file, {"measured_with": about | {name: "other"}})
        with pytest.raises(SystemExit, match=f"{file} was made otherwise: {name} is 'other'"):
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
    workshop: Workshop, both: tuple[float, float, float], counts: list[int]
) -> None:
    quality = {"exact_match": 0.1, "joint_accuracy": 0.7, "intent_accuracy": 1, "slot_f1": 1}
    plain, drafted, new = side((9, 10, 11)), side((7, 8, 9)), side((7.5, 8.5, 9))
    sides = ({"plain": plain, "drafted": drafted}, {"plain": new, "drafted": side(both)})
    for budget, each in zip(ft_both.BUDGETS, sides, strict=True):
        keep(workshop, FtRun("massive_en", budget=budget), {"quality": quality, "sides": each})
    console = Console(file=io.StringIO(), width=200)
    figures, _ = ft_both.measure(asked_of(workshop, ["massive_en"]), console)
    assert [figure.value for figure in figures] == counts
    assert "joint_accuracy 0.700, 0.700" in console.file.getvalue()  # type: ignore[attr-defined]


def test_each_measure_is_held_to_its_own_spread_of_seeds(workshop: Workshop) -> None:
    for seed in ft_seeds.SEEDS:
        for budget in ft_seeds.BUDGETS:
            run = FtRun("massive_en", "demo", 4, budget, seed, 11_514, 4, 64)
            with_new = budget > 0
            keep(workshop, run, {
                "quality": {
                    "joint_accuracy": 0.7 + 0.01 * seed - 0.01 * with_new,
                    "intent_accuracy": 0.9, "slot_f1": 0.8 + 0.005 * seed - 0.03 * with_new,
                },
                "sides": {}, "budget": budget, "steps_per_answer": 1, "ms_per_answer": 1,
            })  # fmt: skip
    console = Console(file=io.StringIO(), width=200)
    figures, _ = ft_seeds.measure(asked_of(workshop, ["massive_en"]), console)
    found = {figure.name.split()[1]: figure for figure in figures[1:]}
    assert {n: f.passed for n, f in found.items()} == {
        "joint_accuracy": True, "intent_accuracy": True, "slot_f1": False,
    }  # fmt: skip
    assert found["slot_f1"].value == pytest.approx(3)
    assert found["slot_f1"].bar == pytest.approx(1)


def forecast(workshop: Workshop, new: Callable[[FtRun], int]) -> tuple[list[Any], Any, str]:
    base = workshop.base("half")
    base.mkdir(parents=True)
    (base / "config.json").write_text("{}")  # is there already
    for task in ft_forecast.TASKS:
        for name in ft_forecast.BASES:
            for seed, n_max in enumerate(ft_forecast.N_MAX[task]):
                for budget in ft_forecast.BUDGETS:
                    run = FtRun(task, name, n_max, budget, seed, ft_forecast.ROWS[task])
                    ms = (
                        budget + 1 if (task, name, seed) == ("pos_ewt", "demo", 0) else 999 - budget
                    )
                    keep(workshop, run, {
                        "sides": {}, "budget": new(run), "renyi2_bits": new(run) / 100,
                        "ms_per_answer": ms, "steps_per_answer": 999 - budget,
                    })  # fmt: skip
    console = Console(file=io.StringIO(), width=200)
    figures, found = ft_forecast.measure(asked_of(workshop), console)
    return figures, found["check"], console.file.getvalue()  # type: ignore[attr-defined]


def test_taus_have_the_least_and_the_greatest_of_the_settings(workshop: Workshop) -> None:
    (times, steps, _), checked, said = forecast(workshop, lambda run: run.budget)
    assert (times.least, times.value, times.greatest) == (-1, -0.75, 1)
    assert (steps.least, steps.value, steps.greatest) == (-1, -1, -1)
    assert checked["runs"] == checked["lines"] == 40
    assert "40 distinct fine-tunes" in said


def test_fine_tunes_with_the_same_tokens_are_one(workshop: Workshop) -> None:
    _, checked, said = forecast(
        workshop, lambda run: min(run.budget, 231 if run.task == "clinc150" else 500)
    )
    assert (checked["runs"], checked["lines"]) == (36, 40)
    assert "36 distinct fine-tunes" in said
