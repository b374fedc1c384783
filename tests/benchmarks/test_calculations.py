"""Tests calculations of benchmarks: ceilings, comparisons, correlations, speed-ups, kept runs."""

import gzip
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.common import read_json
from benchmarks.draft.ceiling import copy_bound
from benchmarks.engine.equal import Difference, compare
from benchmarks.engine.fresh import blocks_of
from benchmarks.finetune.agreement import MeasuredRun, check, falls_at_rises, kendall_tau
from benchmarks.finetune.runs import FtRun, Workshop
from benchmarks.gpu.gpu import Found, Here, one_part
from benchmarks.neural.parts import SHAPES, speed_up
from tasc_draft import Tokens, build_index

VOCAB, EOS = 5, 4
TEXTS = st.lists(st.integers(0, 3), min_size=0, max_size=40)


@settings(max_examples=60, deadline=None)
@given(st.lists(TEXTS, min_size=1, max_size=5), TEXTS, TEXTS)
def test_copy_bound_uses_the_longest_run_after_the_last_token(outputs, prompt, answer) -> None:
    index = build_index(Tokens.of(outputs), fingerprint="f", vocab_size=VOCAB, eos_id=EOS)
    row = np.array(prompt, np.int32), np.array([*answer, EOS], np.int32)
    steps = plain_steps([[VOCAB, *o, EOS] for o in outputs], [*prompt, VOCAB], [*answer, EOS])
    assert copy_bound(index.corpus, [row]) == pytest.approx((len(answer) + 1) / steps)


def plain_steps(documents: list[list[int]], known: list[int], answer: list[int]) -> int:
    steps, at = 0, 0
    while at < len(answer):
        texts = [*documents, [*known, *answer[:at]]]
        last, rest = texts[-1][-1], answer[at:]
        at += 1 + max(
            agreeing(text[i + 1 :], rest)
            for text in texts
            for i, token in enumerate(text)
            if token == last
        )
        steps += 1
    return steps


def agreeing(text: list[int], other: list[int]) -> int:
    pairs = enumerate(zip(text, other, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(text), len(other)))


def test_answers_are_compared_up_to_their_first_difference() -> None:
    def judge(prefixes: Any) -> list[float]:
        assert prefixes == [[9, 1, 2], [9, 5]]
        return [0.5, 1e-9]

    ours, others = [[1, 2, 3, 4], [5], [6, 7]], [[1, 2, 8], [5, 6], [6, 7]]
    found = compare(ours, others, [[9], [9], [9]], judge, limit=0.1)
    assert found.differences == (Difference(0, 2, 0.5), Difference(1, 1, 1e-9))
    assert (found.rows, found.compared, found.above) == (3, 7, 1)
    assert found.identical == pytest.approx(1 / 3)


def test_runs_over_fresh_rows_share_none_and_leave_rows_for_the_warm_up() -> None:
    blocks = blocks_of(rows=4, repeats=3, sequences=(1, 8))
    assert [len(own) for own in blocks.values()] == [3, 3]
    rows = [row for own in blocks.values() for block in own for row in block]
    assert sorted(rows) == list(range(4, 28))


@pytest.mark.parametrize(
    ("part", "to"),
    [
        ("settings", {"learning_rate": 2e-4}),
        ("settings", {"dropout": 0.2, "batch_rows": 64}),
        ("data", {"rows": 3}),
    ],
)
def test_kept_run_with_other_settings_is_refused(
    tmp_path: Path, part: str, to: dict[str, Any]
) -> None:
    outputs = {"massive_en": "intent: a, slot fills: {}", "pos_ewt": "A B", "clinc150": "a"}
    for task, output in outputs.items():
        (tmp_path / "data" / task).mkdir(parents=True)
        with gzip.open(tmp_path / "data" / task / "train.jsonl.gz", "wt") as lines:
            for n in range(8):
                lines.write(json.dumps({"id": str(n), "input": "x", "output": output}) + "\n")
    workshop = Workshop(tmp_path / "data", tmp_path / "work", 4, 1)
    kept = FtRun("massive_en", budget=0)
    own = asdict(kept.settings) | {"epochs": float(kept.settings.epochs), "device": "cpu"}
    found = {"data": {"task": kept.task, "rows": 7, "too_long": 1}, "settings": own}
    found[part] |= to
    (workshop.work / kept.name).mkdir(parents=True)
    (workshop.work / kept.name / "finetune.json").write_text(json.dumps(found))
    with pytest.raises(SystemExit) as refusal:
        workshop.is_made(kept)
    assert all(name in str(refusal.value) for name in to)


def test_failing_gpu_part_records_why_and_keeps_the_figures_of_other_parts(tmp_path: Path) -> None:
    here = Here(tmp_path, tmp_path / "work", dry=True)
    Found(here, "steps").figure("b=8", [3.0, 1.0, 2.0], "ms", 0.5)
    assert one_part("nothing", here) == 1
    assert "no part is called nothing" in read_json(tmp_path / "nothing.json")["error"]
    kept = read_json(tmp_path / "steps.json")["figures"]["b=8"]
    assert (kept["value"], kept["least"], kept["greatest"], kept["of_ceiling"]) == (2, 1, 3, 0.25)


@pytest.mark.parametrize(
    ("kind", "length", "head", "expected"),
    [
        ("eagle", 3.141, 394.0 / 394.0, 1.475),
        ("eagle", 3.081, 101.3 / 394.0, 1.745),
        ("independent", 3.846, 131.3 / 131.3, 2.765),
        ("independent", 3.682, 33.8 / 131.3, 2.900),
    ],
)
def test_memory_bound_speed_ups_equal_the_papers_values(
    kind: Literal["eagle", "independent"], length: float, head: float, expected: float
) -> None:
    """The expected values are the first column of Table 1 of VocabTrim."""
    assert speed_up(length, SHAPES["Llama-3.2-3B"], kind, head) == pytest.approx(
        expected, rel=0.005
    )


def measured(budget: int, bits: float, ms: float, steps: float = 1.0, of: str = "a") -> MeasuredRun:
    return MeasuredRun(of, budget, bits, ms, steps)


def test_each_setting_is_compared_separately_and_the_mean_covers_all_settings() -> None:
    one = [measured(60, 5, 7, 4), measured(0, 4, 9, 8), measured(125, 6, 6, 3)]
    other = [measured(n, bits, 6 + bits, of="b") for n, bits in ((0, 1), (60, 2), (125, 3))]
    found = check(one + other)
    settings = [(s.runs, s.rises, s.right, s.tau, s.tau_steps) for s in found.settings]
    assert settings == [(3, 2, 2, -1, -1), (3, 2, 0, 1, None)]
    assert [found.as_json[name] for name in ("runs", "mean_tau", "right_share")] == [6, 0, 0.5]


def test_runs_of_one_budget_count_once_with_their_medians() -> None:
    runs = [measured(0, 1, 9), measured(60, 2, 8), measured(60, 2, 100), measured(60, 2, 7)]
    (found,) = check(runs).settings
    assert (found.runs, found.lines, found.tau) == (2, 4, -1)
    alone = check(runs[:1]).as_json
    assert (alone["mean_tau"], alone["right_share"]) == (None, None)


@pytest.mark.parametrize(
    ("one", "other", "tau"),
    [
        ([1, 2, 3, 4, 5], [3, 4, 1, 2, 5], (6 - 4) / 10),  # six pairs in order, four against it
        ([1, 2, 3, 4], [9, 5, 3, 1], -1),
        ([1, 2, 2, 3], [1, 2, 3, 3], 4 / 5),  # four pairs in order, one tie in either
        ([1, 1, 2], [1, 2, 3], 2 / 6**0.5),  # two pairs in order, one tie in the first alone
        ([1, 1, 1], [1, 2, 3], None),
    ],
)
def test_kendall_tau_equals_values_computed_by_hand(
    one: list[int], other: list[int], tau: float | None
) -> None:
    assert kendall_tau(one, other) == kendall_tau(other, one) == pytest.approx(tau)


def test_falls_of_a_series_are_counted_where_the_other_series_rises() -> None:
    # Rises 1 -> 2 (falls), 2 -> 3 (rises), 2.5 -> 4 (stays).
    assert falls_at_rises([1, 2, 3, 2.5, 4, 4], [9, 7, 8, 1, 1, 0]) == (3, 1)
