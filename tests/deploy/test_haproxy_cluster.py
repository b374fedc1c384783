"""The shipped load balancer in front of two hosts, one of which is cut off for a while.

The hosts are network namespaces with a Ray node each, and run the shipped `ray-serve.yaml`.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from haproxy_process import find_haproxy

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "chaos" / "bench_chaos.py"


def why_not() -> str | None:
    if find_haproxy() is None:
        return "no haproxy on PATH nor in a wheel"
    done = subprocess.run(
        [sys.executable, str(BENCHMARK), "--hosts", "--check"], capture_output=True, text=True
    )
    assert done.returncode in (0, 1), done.stderr  # 1: this machine cannot; else the script broke
    return None if done.returncode == 0 else done.stderr.strip()


@pytest.mark.slow("two hosts, each a network namespace with a Ray")
@pytest.mark.ray
@pytest.mark.redis
def test_a_host_that_is_cut_off_costs_no_answer() -> None:
    if why := why_not():
        pytest.skip(why)
    asked = ["--hosts", "--requests", "900", "--faults", "partition", "--cut", "10"]
    done = subprocess.run([sys.executable, str(BENCHMARK), *asked], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["requests"] == 900
    assert [found[bad] for bad in ("wrong", "lost", "duplicated", "unclean")] == [0, 0, 0, 0]
    assert found["recovery_seconds"]["partition"] > 0
