"""Step costs: every point is measured, read between points, and kept in a file."""

from pathlib import Path

import numpy as np
import pytest

from tasc_engine import EngineConfig, ModelSource, Target
from tasc_engine.attention import RowCache
from tasc_engine.cost import REPEATS, Cost, StepCosts, _points, kept, measure

CONFIG = EngineConfig(rows=4, max_model_len=64, max_draft_tokens=8)
SOME = StepCosts(
    "m", "d", "f",
    (Cost(4, 4, 0, 1.0), Cost(4, 8, 0, 2.0), Cost(4, 4, 100, 3.0), Cost(4, 8, 100, 5.0),
     Cost(1, 1, 0, 0.5)),
)  # fmt: skip


def at(rows: int, tokens: float, context: float) -> float:
    return float(SOME.seconds(rows, np.array([tokens], np.float64), context)[0])


def test_a_real_target_is_measured_for_full_and_partial_batches(folder: Path) -> None:
    target = Target.load(ModelSource(folder, dtype="float32"), CONFIG)
    seen: list[tuple[int, int]] = []
    found = measure(target, "tiny", progress=lambda done, of: seen.append((done, of)))
    points = [(c.rows, c.tokens, c.context) for c in found.costs]
    assert points == [(r, r * (1 + n), 56) for r in (4, 2, 1) for n in (0, 1, 3, 7)]
    assert seen == [(i + 1, REPEATS * len(points)) for i in range(REPEATS * len(points))]
    assert all(0 < c.seconds < 10 for c in found.costs)


def test_a_measurement_that_runs_out_of_time_has_the_full_batch_at_least(folder: Path) -> None:
    target = Target.load(ModelSource(folder, dtype="float32"), CONFIG)
    found = measure(target, "tiny", seconds=0.0)
    assert [(c.rows, c.tokens, c.context) for c in found.costs] == [
        (4, 4 * (1 + n), 56) for n in (0, 1, 3, 7)
    ]


@pytest.mark.parametrize(
    ("place", "seconds"),
    [
        ((4, 4, 0), 1.0), ((4, 6, 0), 1.5), ((4, 12, 0), 3.0), ((4, 6, 100), 4.0),
        ((4, 4, 50), 2.0), ((4, 6, 150), 4.0), ((3, 6, 0), 1.5), ((1, 9, 9), 0.5),
    ],
)  # fmt: skip
def test_between_points_costs_are_linear(place: tuple[int, int, int], seconds: float) -> None:
    assert at(*place) == pytest.approx(seconds)


def test_costs_are_measured_once_and_read_from_then_on(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "costs.json"
    assert kept(path, lambda: SOME) == SOME
    assert kept(path, lambda: pytest.fail("measured again")) == SOME


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", '{"model": 1}', '{"model": "m", "device": "d", "dtype": "f", "costs": []}'],
)
def test_a_file_that_is_none_is_measured_anew(tmp_path: Path, content: str) -> None:
    path = tmp_path / "costs.json"
    path.write_text(content)
    assert kept(path, lambda: SOME) == SOME
    assert kept(path, lambda: pytest.fail("not written")) == SOME


def test_where_costs_cannot_be_kept_they_are_measured_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    assert kept(tmp_path / "file" / "costs.json", lambda: SOME) == SOME
    assert "cannot keep step costs in" in caplog.text


@pytest.mark.parametrize("length", range(20, 160, 7))
def test_a_step_of_any_engine_takes_time(length: int) -> None:
    """Contexts next to each other must not be drawn out to where they say less than nothing."""
    most = EngineConfig(rows=4, max_model_len=length, max_draft_tokens=8)
    noisy = np.random.default_rng(length)
    costs = StepCosts(
        "m", "d", "f",
        tuple(Cost(r, r * (1 + n), c, 1.0 + noisy.random()) for r, n, c in points(most)),
    )  # fmt: skip
    for rows in (1, 2, 3, 4):
        for context in (0.0, 32.0, float(length)):
            assert (costs.seconds(rows, np.arange(rows, 60.0), context) > 0.5).all()


def points(config: EngineConfig) -> list[tuple[int, int, int]]:
    class Shaped:
        """All that tells which points are measured."""

    shaped = Shaped()
    shaped.config = config
    shaped.cache = RowCache(1, config.rows * config.max_model_len)
    return list(_points(shaped))
