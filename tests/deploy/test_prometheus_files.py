import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from metric_names import METRICS

DEPLOY = Path(__file__).parents[2] / "deploy"
# A recorded name is level:metric:operation; only what stands alone is an exported series.
SERIES = re.compile(r"(?<![\w:])tasc_\w+(?!\w*:)")


def rules() -> list[dict[str, str]]:
    groups = yaml.safe_load((DEPLOY / "rules.yml").read_text("utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


@pytest.mark.prometheus
@pytest.mark.parametrize(
    "command",
    [
        "check config prometheus.yml",
        "check rules --lint-fatal rules.yml",
        "test rules rules_test.yml rules_service_test.yml",
    ],
)
def test_promtool_accepts_the_files_and_their_tests_pass(command):
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not on PATH; it comes with Prometheus")
    ran = subprocess.run(["promtool", *command.split()], cwd=DEPLOY, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def cases() -> list[dict]:
    """The cases of all test files."""
    files = sorted(DEPLOY.glob("rules*_test.yml"))
    assert len(files) == 2
    return [case for file in files for case in yaml.safe_load(file.read_text("utf-8"))["tests"]]


def test_every_rule_has_a_test():
    fired = {a["alertname"] for c in cases() for a in alerts(c) if a["exp_alerts"]}
    computed = {asked["expr"] for c in cases() for asked in c.get("promql_expr_test", [])}
    assert {rule["alert"] for rule in rules() if "alert" in rule} == fired
    assert {rule["record"] for rule in rules() if "record" in rule} == computed


def test_every_alert_has_a_test_in_which_it_stays_silent():
    silent = {a["alertname"] for c in cases() for a in alerts(c) if spared(c, a)}
    assert {rule["alert"] for rule in rules() if "alert" in rule} == silent


def alerts(case: dict) -> list[dict]:
    return case.get("alert_rule_test", [])


def spared(case: dict, alert: dict) -> set[str]:
    """Returns the tasks that have series and no firing alert."""
    series = " ".join(given["series"] for given in case.get("input_series", ()))
    firing = {one["exp_labels"].get("task", "") for one in alert["exp_alerts"]}
    return set(re.findall(r'task="(\w+)"', series)) - firing


def test_every_alert_has_a_severity_a_summary_and_a_description():
    for rule in rules():
        if "alert" in rule:
            assert rule["labels"]["severity"] in ("info", "warning", "critical")
            notes = rule["annotations"]
            assert min(len(notes["summary"]), len(notes["description"])) > 20


def test_rules_query_only_exported_series():
    asked = {name for rule in rules() for name in SERIES.findall(rule["expr"])}
    assert len(asked) >= 15
    assert asked <= METRICS


def test_documents_name_only_exported_series():
    root = DEPLOY.parent
    files = (root / "README.md", DEPLOY / "README.md", *(root / "docs").rglob("*.md"))
    packages = {
        path.name for path in (*root.glob("services/tasc_*"), *root.glob("pipelines/tasc_*"))
    }
    text = "".join(file.read_text("utf-8") for file in files)
    named = set(re.findall(r"\btasc_[a-z0-9_]+(?!\.json|[a-z0-9_])", text)) - packages
    families = {re.sub("_(bucket|sum|count)$", "", name) for name in METRICS}
    assert named
    assert named <= METRICS | families


def test_prometheus_scrapes_each_process_but_not_the_merged_metrics():
    config = yaml.safe_load((DEPLOY / "prometheus.yml").read_text("utf-8"))
    (job,) = config["scrape_configs"]
    (discovery,) = job["http_sd_configs"]
    assert discovery["url"].endswith(":8081/sd")
    assert "static_configs" not in job
