"""The gateway benchmark as its users run it, for two seconds."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).with_name("bench_gateway.py")


@pytest.mark.ray
@pytest.mark.redis
def test_overhead_and_throughput_are_told() -> None:
    arguments = ["--models", "tiny", "--seconds", "2", "--pairs", "10", "--no-haproxy"]
    command = [sys.executable, str(BENCHMARK), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])["tiny"]
    assert found["errors"] == 0
    assert found["requests_per_second"] > 0
    assert found["overhead_p50_ms"] > 0
    assert found["engine_p50_ms"] > 0
