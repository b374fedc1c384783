"""The benchmark of the way in as a user runs it, with windows of a second."""

import pytest
from scripts import record, run


@pytest.mark.slow("benchmark smoke")
@pytest.mark.ray
@pytest.mark.redis
def test_the_way_in_is_measured_beside_the_engine_alone() -> None:
    few = ["--rounds", "1", "--seconds", "1", "--connections", "1,4", "--requests", "4"]
    found = record(run("serve/way_in.py", *few, "--only", "engine,service"))
    assert found["errors"] == 0
    assert found["http_over_engine"]["4"] > 0
    assert found["streaming_over_whole"] > 0
    assert found["cpu_ms_per_request"]["gateway"] > 0
    assert found["cpu_ms_per_request"]["replica_beside_engine"] > 0
