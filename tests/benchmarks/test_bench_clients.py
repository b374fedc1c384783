"""Tests the matrix of clients: its cases and its pass criteria."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.clients.bench_clients import BEGIN, CLIENTS, PAGE

SCRIPT = """
from cases import ANSWER, case, run
import time
case("same", lambda: ANSWER)
case("other", lambda: "else")
case("class", lambda: 1, int)
case("no such class", lambda: "1", int)
case("error", lambda: int("x"), ValueError, "'x'")
case("no error", lambda: 1, ValueError)
case("nameless error", lambda: int("x"), ValueError, "model")
case("other error", lambda: {}["x"], ValueError)
case("late", lambda: time.sleep(60), None, limit_s=0.05)
case("prints", lambda: print("not JSON") or {"rows": 3}, dict)
run()
"""


def test_every_client_has_cases_and_a_row_in_the_page() -> None:
    table = PAGE.read_text("utf-8").partition(BEGIN)[2]
    names = [case for client in CLIENTS for case in client.cases]
    assert len(names) >= 60
    for client in CLIENTS:
        assert len(set(client.cases)) == len(client.cases) > 0
        assert f"| `{client.name}` |" in table


def test_client_case_passes_only_with_the_expected_result(tmp_path: Path) -> None:
    script = tmp_path / "with_any.py"
    script.write_text(SCRIPT)
    folder = CLIENTS[0].script.parent
    done = subprocess.run(
        [sys.executable, script], env={"PYTHONPATH": str(folder)}, capture_output=True, text=True
    )
    results: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines()]
    passed = [each["case"] for each in results if each["passed"]]
    assert passed == ["same", "class", "error", "prints"]
    assert len(results) == 10
    assert results[-1]["found"] == {"rows": 3}
