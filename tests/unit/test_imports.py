"""Which heavy libraries a package brings in, seen in a fresh process."""

import json
import subprocess
import sys

import pytest

FORBIDDEN = {
    "tasc_text": {"torch", "transformers", "ray", "redis", "fastapi", "numba"},
    "tasc_draft": {"torch", "transformers", "ray", "redis", "fastapi"},
    "tasc_store": {"torch", "transformers", "ray", "fastapi"},
    "tasc_engine": {
        "ray",
        "fastapi",
        "redis",
        "bitsandbytes",
        "llguidance",
        "prometheus_client",
    },
    "tasc_engine.neural.card": {"torch", "transformers"},
    "tasc_serve.gateway": {"torch", "transformers"},
    "tasc_jobs.cli": {"torch", "transformers", "ray", "fastapi"},
    "tasc_jobs.tasks.register": {"torch", "transformers", "ray", "fastapi"},
    "tasc_jobs.finetune.job": {"peft", "bitsandbytes"},  # it silences them before
}


@pytest.mark.parametrize("package", FORBIDDEN)
def test_importing_a_package_leaves_out_what_it_must_not_know(package: str) -> None:
    code = f"import sys, json, {package}; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(json.loads(done.stdout.splitlines()[-1]))
    assert package in loaded
    assert not loaded & FORBIDDEN[package]
