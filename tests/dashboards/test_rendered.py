import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from metric_names import METRICS

FOLDER = Path(__file__).parents[2] / "dashboards"
RULES = FOLDER.parent / "deploy" / "rules.yml"
FILES = {"latency.json": 32, "drafting.json": 20, "corpora.json": 14}  # queries at least


def render(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-B", str(FOLDER / "render.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def dashboard(name: str) -> dict:
    return json.loads((FOLDER / name).read_text("utf-8"))


def drawn(board: dict) -> list[dict]:
    """Returns all panels except the titles of sections."""
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def test_committed_dashboard_json_equals_the_rendered_json():
    checked = render("--check")
    assert (checked.returncode, checked.stderr) == (0, "")


@pytest.mark.parametrize("name", FILES)
def test_queries_name_only_exported_series_and_defined_variables(name):
    board = dashboard(name)
    queries = [target["expr"] for panel in drawn(board) for target in panel["targets"]]
    variables = {v["name"]: v for v in board["templating"]["list"]}
    assert len(queries) >= FILES[name]
    asked = {series for query in queries for series in re.findall(r"(?<!:)\btasc_\w+", query)}
    assert asked
    assert asked <= METRICS
    recorded = re.findall(r"record: (\S+)", RULES.read_text("utf-8"))
    assert {name for query in queries for name in re.findall(r"\w+:\w+:\w+", query)} <= {*recorded}
    used = {word for query in queries for word in re.findall(r"\$(\w+)", query)}
    assert used - {"__rate_interval", "1"} == {"task", "model_name"}  # 1: of label_replace
    assert set(variables) == {"datasource", "task", "model_name"}
    for label in ("task", "model_name"):
        assert variables[label]["query"] == f"label_values(tasc_verify_steps_total, {label})"


@pytest.mark.parametrize("name", FILES)
def test_panels_do_not_overlap(name):
    board = dashboard(name)
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"])
                 for y in range(at["y"], at["y"] + at["h"])}  # fmt: skip
        assert not cells & taken
        taken |= cells
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"]) > 5


@pytest.mark.parametrize("name", FILES)
def test_each_panel_has_a_unit_and_a_description_with_advice(name):
    for panel in drawn(dashboard(name)):
        about, wrong = panel["description"].split("\n\n**Looks wrong?** ")
        assert min(len(about), len(wrong)) > 20
        defaults = panel["fieldConfig"]["defaults"]
        assert defaults["unit"]
        assert {m["options"]["match"] for m in defaults["mappings"]} == {"nan", "null"}
        assert {m["options"]["result"]["text"] for m in defaults["mappings"]} == {"No traffic"}


def test_dashboards_show_every_series():
    text = "".join((FOLDER / name).read_text("utf-8") for name in FILES)
    shown = {series for series in METRICS if re.search(rf"\b{series}\b", text)}
    families = {re.sub("_(bucket|sum|count)$", "", name) for name in METRICS}
    assert families == {re.sub("_(bucket|sum|count)$", "", name) for name in shown}
