"""The engine benchmark as a user runs it, and the code that all benchmarks share."""

import json
from pathlib import Path
from typing import Any

import pytest
from scripts import record, run

from benchmarks.engine.equal import Difference, compare

KEYS = {
    "model", "drafted_over_plain", "drafted_over_plain_b1", "plain_over_transformers",
    "plain_over_openvino", "drafted_over_best_peer", "overhead_share", "identical",
    "bf16_mismatch_per_token", "bf16_mismatch_above_margin", "ttft_ms", "peak_memory_mb",
    "unpredictable_over_plain", "peers", "versions", "git", "threads", "dtype",
}  # fmt: skip


@pytest.mark.slow("benchmark smoke")
def test_a_few_rows_are_answered_alike_and_drafts_are_accepted(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    few = ["--demo", "--rows", "16", "--repeats", "1", "--tasks", "massive_en"]
    done = run("engine/engine.py", *few, "--peers", "transformers", "--json", file)
    found = record(done)
    assert file.read_text(encoding="utf-8") == done.stdout.splitlines()[-1] + "\n"
    assert set(found) >= KEYS
    assert found["identical"] == 1.0
    assert found["peers"] == ["transformers"]
    settings = found["tasks"]["massive_en"]["settings"]
    assert settings["ours drafted b=8"]["accepted"] > 0
    assert settings["ours drafted b=8"]["steps"] < settings["ours plain b=8"]["steps"]
    assert settings["transformers plain b=8"]["tokens"] > 0
    assert "ceiling, plain b=8" in done.stdout


@pytest.mark.slow("benchmark smoke")
def test_costs_that_were_measured_beside_busy_loops_are_mended(tmp_path: Path) -> None:
    few = ["--steps", "60", "--quiet-steps", "40", "--window", "20", "--rows", "32"]
    found = record(run("engine/stale_costs.py", *few, "--keep", tmp_path / "costs.json"))
    assert [len(found[side]["windows"]) for side in ("quiet", "stale")] == [2, 3]
    assert all(w["block_efficiency"] > 1 for w in found["stale"]["windows"])
    assert len(found["figures"]) == 5
    assert set(json.loads((tmp_path / "costs.json").read_text())["measured"]) >= {"load", "at"}


@pytest.mark.slow("benchmark smoke")
def test_llm_generate_answers_as_the_engines_loop() -> None:
    found = record(run("engine/llm_overhead.py", "--rows", "16", "--repeats", "1"))
    assert [figure["bar"] for figure in found["figures"]] == [0.02, 0]
    assert found["figures"][1]["value"] == 0


def test_answers_are_compared_up_to_their_first_difference() -> None:
    def judge(prefixes: Any) -> list[float]:
        assert prefixes == [[9, 1, 2], [9, 5]]
        return [0.5, 1e-9]

    ours, others = [[1, 2, 3, 4], [5], [6, 7]], [[1, 2, 8], [5, 6], [6, 7]]
    found = compare(ours, others, [[9], [9], [9]], judge, limit=0.1)
    assert found.differences == (Difference(0, 2, 0.5), Difference(1, 1, 1e-9))
    assert (found.rows, found.compared, found.above) == (3, 7, 1)
    assert found.identical == pytest.approx(1 / 3)
