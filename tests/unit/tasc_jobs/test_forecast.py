"""A forecast's arithmetic against values worked out by hand, and the file it reads."""

import json
import re
from pathlib import Path

import pytest
import yaml

from support import refused
from tasc_draft import Replay
from tasc_jobs.errors import JobError
from tasc_jobs.tuning.forecast import (
    EXAMPLE,
    CostFile,
    Outlook,
    StepCurve,
    how_to_set,
    outlook,
    priced,
    read_cost_file,
)
from tasc_jobs.tuning.replay_page import forecast_page
from tasc_runtime.errors import FileError
from tasc_serve.settings import ServeSettings

# 10 ms for the 8 tokens of a plain step, 30 ms for 24 and 110 ms for 88.
CURVE = StepCurve(8, 128, (8, 24, 88), (0.010, 0.030, 0.110))


def replay(tokens: int, steps: int, nodes: int, microseconds: float = 0.0) -> Replay:
    times = [microseconds] * steps
    return Replay(2, steps, tokens, nodes, steps, [steps], [steps // 2], times, [0.0, 0.0])


def cost(rows: int, tokens: int, seconds: float, context: int = 128) -> dict:
    return {"rows": rows, "tokens": tokens, "context": context, "seconds": seconds}


def costs(*measured: dict, **more: object) -> dict:
    return {"model": "m", "device": "d", "dtype": "float32", "costs": list(measured), **more}


def test_a_steps_cost_is_linear_between_what_was_measured():
    assert CURVE.plain == 0.010
    assert CURVE.at(16) == pytest.approx(0.020)
    assert CURVE.at(56) == pytest.approx(0.070)
    assert CURVE.at(88) == pytest.approx(0.110)
    assert CURVE.at(88.5) is None


def test_the_speed_up_is_what_one_gets_by_hand():
    # 3 tokens a step, 2 nodes: 8 * (1 + 2) = 24 tokens, 30 ms; 3 * 10 / 30 = 1 without drafting.
    assert priced(CURVE, 2, replay(30, 10, 20)).speed_up == pytest.approx(1.0)
    # 625 us for each of 8 rows are 5 ms more.
    option = priced(CURVE, 2, replay(30, 10, 20, microseconds=625.0))
    assert option.step_seconds == pytest.approx(0.035)
    assert option.speed_up == pytest.approx(3 * 10 / 35)
    # The machine's own 250 us a row, 2 ms in all, count instead where the file has them.
    option = priced(CURVE, 2, replay(30, 10, 20, microseconds=625.0), 250e-6)
    assert option.speed_up == pytest.approx(3 * 10 / 32)


def test_finding_neighbours_at_a_rows_start_is_drafting_too():
    found = Replay(2, 4, 8, 0, 0, [], [], [100.0] * 4, [1000.0, 600.0])
    assert priced(CURVE, 2, found).draft_seconds == pytest.approx((400 + 1600) / 4 * 1e-6)


def test_the_best_budget_is_taken_where_drafting_pays():
    found = outlook(
        CURVE, {2: replay(30, 10, 20), 1: replay(18, 10, 10), 4: replay(60, 10, 40)}, 0.0
    )
    # 1: 16 tokens, 20 ms, 1.8 * 10 / 20; 4: 40 tokens, 50 ms, 6 * 10 / 50
    assert [o.speed_up for o in found.options] == pytest.approx([1.0, 0.9, 1.2])
    assert (found.budget, found.speed_up) == (4, pytest.approx(1.2))
    assert found.verdict() == "b = 8: draft 4 tokens, 1.20 x"
    assert found.figures()["draft"] is True


def test_where_drafting_loses_the_verdict_says_not_to():
    found = outlook(CURVE, {1: replay(18, 10, 10), 4: replay(30, 10, 40)}, 0.0)
    assert (found.budget, found.speed_up) == (0, 1.0)
    said = "b = 8: do not draft; drafting loses: 0.90 x at its best, with 1 tokens"
    assert found.verdict() == said
    assert found.figures()["draft"] is False


def test_a_step_larger_than_any_measured_is_not_guessed():
    found = outlook(CURVE, {16: replay(90, 10, 150), 4: replay(60, 10, 40)}, 0.0)
    assert [o.speed_up for o in found.options] == [None, pytest.approx(1.2)]
    assert found.budget == 4
    alone = outlook(CURVE, {16: replay(90, 10, 150)}, 0.0)
    assert (alone.budget, alone.best) == (0, None)
    assert "unknown" in alone.verdict()


def test_the_report_says_every_verdict_and_what_was_not_measured():
    replays = {4: replay(60, 10, 40), 16: replay(90, 10, 150)}
    page = forecast_page("t", [outlook(CURVE, replays, 0.0)], replays, 4, ("first",))
    assert page.summary == ("first", "b = 8: draft 4 tokens, 1.20 x")
    assert [row[-1] for row in page.tables[0].rows] == ["1.20 x", "not measured"]
    assert page.plots[0].lines[0].y == [pytest.approx(1.2)]


def test_a_budget_other_than_the_tasks_own_is_followed_by_the_setting_that_gives_it():
    replays = {4: replay(60, 10, 40)}
    page = forecast_page("t", [outlook(CURVE, replays, 0.0)], replays, 16, ())
    verdict, setting = page.summary
    assert verdict == "b = 8: draft 4 tokens, 1.20 x"
    assert setting.startswith("b = 8: t drafts up to 16 tokens so far; ")
    assert "`tasc tune t --step-cost FILE --rows 8`" in setting
    (settings,) = re.findall(r"put (.*) into serve\.yaml", setting)
    (task,) = ServeSettings.model_validate(yaml.safe_load(f"{{{settings}}}")).tasks
    assert (task.name, task.draft.num_speculative_tokens) == ("t", 4)


def test_a_budget_above_the_engines_own_bound_names_that_bound_too():
    large = StepCurve(1, 0, (1, 100), (1.0, 1.0))
    for budget, most in ((32, 32), (48, 48), (80, 63)):
        said = how_to_set("t", outlook(large, {budget: replay(60, 10, 40)}, 0.0), 16)
        assert said is not None
        (settings,) = re.findall(r"put (.*) into serve\.yaml", said)
        found = yaml.safe_load(settings.replace(" and ", "\n"))
        assert found["tasks"][0]["draft"] == {"num_speculative_tokens": budget}
        assert ServeSettings.model_validate(found).engine.max_draft_tokens == most


def test_where_not_to_draft_the_setting_is_none_and_where_nothing_is_known_none_is_named():
    loses = outlook(CURVE, {4: replay(30, 10, 40)}, 0.0)
    assert "{num_speculative_tokens: 0}" in str(how_to_set("t", loses, 16))
    assert how_to_set("t", loses, 0) is None
    assert how_to_set("t", outlook(CURVE, {16: replay(90, 10, 150)}, 0.0), 8) is None


def test_a_file_gives_the_curve_of_its_rows_at_the_nearest_context(tmp_path):
    path = tmp_path / "cost.json"
    measured = [cost(8, 88, 0.11), cost(8, 8, 0.01), cost(8, 24, 0.03)]
    far = [cost(8, 8, 1.0, 1024), cost(8, 88, 2.0, 1024), cost(1, 1, 0.5), cost(1, 9, 0.6)]
    path.write_text(json.dumps(costs(*measured, *far, draft_seconds=1e-5)))
    found = read_cost_file(path)
    assert found.draft_seconds == 1e-5
    assert found.curve(8, 500.0) == CURVE
    assert found.curve(8, 600.0).context == 1024
    assert found.curve(1, 0.0).plain == 0.5


def test_rows_without_costs_are_refused_by_name():
    found = CostFile.model_validate(costs(cost(1, 1, 0.1), cost(1, 9, 0.2), cost(8, 8, 0.1)))
    with refused(JobError, "b = 32", "--rows 1,8"):
        found.curve(32, 0.0)
    with refused(JobError, "8 to 8"):
        found.curve(8, 0.0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (costs(cost(1, 1, 0.1), speed=1), "speed: "),
        (costs({**cost(1, 1, 0.1), "ms": 1}), "costs.0.ms: "),
        (costs(cost(1, 1, 0.1), cost(1, 1, 0.2)), "1 rows, 1 tokens, context 128"),
        (costs(cost(1, 1, 0.0)), "costs.0.seconds"),
        (costs(cost(0, 1, 0.1)), "costs.0.rows"),
        (costs(), "costs: "),
        ({"costs": [cost(1, 1, 0.1)]}, "model: "),
        ([], "cost.json"),
        ("{", "JSON"),
    ],
)
def test_a_file_of_another_kind_is_refused(tmp_path, content, message):
    path = tmp_path / "cost.json"
    with refused(FileError, "cost.json"):
        read_cost_file(path)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with refused(FileError, "cost.json", message):
        read_cost_file(path)


def test_all_faults_of_a_file_are_said_at_once_beside_a_right_file(tmp_path):
    path = tmp_path / "cost.json"
    wrong = [{"rows": 0, "tokens": 8, "seconds": 0.1}, {"rows": 8, "seconds": 0.1, "ms": 1}]
    path.write_text(json.dumps({"model": "m", "dtype": 32, "costs": wrong}))
    with pytest.raises(FileError) as refusal:
        read_cost_file(path)
    said = str(refusal.value)
    faults = ("device", "dtype", "costs.0.rows", "costs.0.context", "costs.1.tokens", "costs.1.ms")
    assert all(f"{fault}: " in said for fault in faults)
    assert "model: " not in said
    assert said.endswith(f"a right file: {EXAMPLE}")
    assert "\n" not in said


def test_the_examples_of_a_right_file_are_right(tmp_path):
    readme = (Path(__file__).parents[3] / "README.md").read_text(encoding="utf-8")
    (in_readme,) = re.findall(r'^\{"model": .*?\]\}$', readme, re.DOTALL | re.MULTILINE)
    for example in (EXAMPLE, in_readme):
        (tmp_path / "cost.json").write_text(example)
        assert read_cost_file(tmp_path / "cost.json").curve(8, 64.0).plain > 0


def test_an_outlook_without_options_drafts_nothing():
    assert Outlook(8, 128, 0.01, ()).budget == 0
