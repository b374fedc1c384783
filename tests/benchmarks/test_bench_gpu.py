"""The GPU benchmark without a GPU: a dry run of all stages, its bars, and its failures."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from scripts import BENCHMARKS, complete, record

from benchmarks.gpu.gpu import LEAST, MOST, Found, Here, one_stage

STAGES = {"prepare", "tests", "equality", "steps", "speed", "finetuning"}
TIMEOUT_S = 1800


def run(*options: str) -> subprocess.CompletedProcess[str]:
    command = [str(BENCHMARKS / "gpu" / "gpu.sh"), *options]
    return complete(command, {**os.environ, "PYTHON": sys.executable}, TIMEOUT_S - 60)


@pytest.mark.slow("benchmark smoke")
@pytest.mark.timeout(TIMEOUT_S)
def test_a_dry_run_finds_every_figure(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    found = record(run("--dry-run", "--out", str(out)))
    assert found == json.loads(out.read_text(encoding="utf-8"))
    assert set(found["stages"]) == STAGES
    assert {n: s["error"] for n, s in found["stages"].items() if "error" in s} == {}
    equality, speed = found["stages"]["equality"], found["stages"]["speed"]
    for name in ("tiny qwen2", "tiny llama", "demo float32", "demo drafted against plain"):
        assert equality[name]["above"] == 0
        assert equality[name]["accepted"] > 0
    assert set(speed["projected_0.5b_drafted_over_plain"]) == {"1", "8"}
    assert found["stages"]["steps"]["where_time_goes_b8"]["longest"]
    lora = found["stages"]["finetuning"]["lora"]
    assert lora["last_loss"] < lora["first_loss"]
    assert lora["share_of_matrix_rate"] > 0
    judged = {name for name, bar in found["bars"].items() if bar["found"] is not None}
    assert judged == {*LEAST, *MOST} - {"tiny_mistral_differences", "tiny_gemma2_differences"}


@pytest.mark.slow("imports torch and transformers in a process of its own")
def test_stages_need_torch_and_transformers_only() -> None:
    """A machine that is lent for its GPU has no store, no Ray and no command line packages."""
    missing = ("redis", "ray", "pydantic", "rich", "typer")
    barred = "; ".join(f"sys.modules[{n!r}] = None" for n in missing)
    stages = "; ".join(f"gpu.stage({name!r})" for name in sorted(STAGES))
    root = BENCHMARKS.parent
    paths = [str(root), *(str(root / part) for part in ("services", "pipelines", "tests"))]
    code = f"import sys; {barred}; from benchmarks.gpu import gpu; {stages}"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_stage_that_fails_says_why_and_keeps_its_figures(tmp_path: Path) -> None:
    here = Here(tmp_path, True)
    Found(here, "steps").put("weight_bytes", 3)
    assert one_stage("nothing", here) == 1
    assert "no stage is called nothing" in Found.read(here, "nothing")["error"]
    assert Found.read(here, "steps") == {"weight_bytes": 3}
