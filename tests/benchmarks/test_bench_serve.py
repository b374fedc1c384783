"""The gateway benchmark as a user runs it, for two seconds."""

import pytest
from scripts import record, run


@pytest.mark.slow("benchmark smoke")
@pytest.mark.ray
@pytest.mark.redis
def test_overhead_and_throughput_are_measured() -> None:
    few = ["--models", "tiny", "--seconds", "2", "--pairs", "10", "--no-haproxy"]
    found = record(run("serve/bench_gateway.py", *few))["tiny"]
    assert found["errors"] == 0
    assert found["requests_per_second"] > 0
    assert found["overhead_p50_ms"] > 0
    assert found["engine_p50_ms"] > 0
