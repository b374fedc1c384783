import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tasc_serve.metric_names import METRICS

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
        "test rules rules_test.yml",
    ],
)
def test_prometheus_accepts_and_passes(command):
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not on PATH; it comes with Prometheus")
    ran = subprocess.run(["promtool", *command.split()], cwd=DEPLOY, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_every_rule_has_a_test():
    tests = yaml.safe_load((DEPLOY / "rules_test.yml").read_text("utf-8"))["tests"]
    fired = {
        case["alertname"]
        for test in tests
        for case in test.get("alert_rule_test", [])
        if case["exp_alerts"]
    }
    computed = {case["expr"] for test in tests for case in test.get("promql_expr_test", [])}
    assert {rule["alert"] for rule in rules() if "alert" in rule} == fired
    assert {rule["record"] for rule in rules() if "record" in rule} == computed


def test_rules_ask_only_for_series_that_are_exported():
    asked = {name for rule in rules() for name in SERIES.findall(rule["expr"])}
    assert len(asked) >= 7
    assert asked <= METRICS


def test_prometheus_scrapes_the_processes_and_not_their_sum():
    config = yaml.safe_load((DEPLOY / "prometheus.yml").read_text("utf-8"))
    (job,) = config["scrape_configs"]
    (discovery,) = job["http_sd_configs"]
    assert discovery["url"].endswith(":8081/sd")
    assert "static_configs" not in job
