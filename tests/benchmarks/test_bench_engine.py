"""The engine's benchmark runs as its users run it, on a few rows and beside transformers only."""

import json
import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).with_name("engine.py")
KEYS = {
    "model", "drafted_over_plain", "drafted_over_plain_b1", "plain_over_transformers",
    "plain_over_openvino", "drafted_over_best_peer", "overhead_share", "identical",
    "bf16_mismatch_per_token", "bf16_mismatch_above_margin", "ttft_ms", "peak_memory_mb",
    "unpredictable_over_plain", "peers", "versions", "git", "threads", "dtype",
}  # fmt: skip


def test_a_few_rows_are_answered_alike_and_drafts_are_accepted(tmp_path) -> None:
    file = tmp_path / "found.json"
    asked = [
        "--demo",
        "--rows",
        "16",
        "--repeats",
        "1",
        "--peers",
        "transformers",
        "--tasks",
        "massive_en",
    ]
    command = [sys.executable, str(BENCHMARK), *asked, "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1]
    assert file.read_text(encoding="utf-8") == last + "\n"
    found = json.loads(last)
    assert set(found) >= KEYS
    assert found["identical"] == 1.0
    assert found["peers"] == ["transformers"]
    settings = found["tasks"]["massive_en"]["settings"]
    assert settings["ours drafted b=8"]["accepted"] > 0
    assert settings["ours drafted b=8"]["steps"] < settings["ours plain b=8"]["steps"]
    assert settings["transformers plain b=8"]["tokens"] > 0
    assert "ceiling, plain b=8" in done.stdout


def test_an_unknown_peer_is_named() -> None:
    command = [sys.executable, str(BENCHMARK), "--peers", "nobody"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "nobody" in done.stderr
