"""Tests that all Triton kernels compile for every card ahead, as the engine launches them."""

import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from scripts import BENCHMARKS, complete, record

from interpreted_targets import as_on_gpu
from support import Known, make_engine
from tasc_engine import Request
from tasc_engine.config import EngineConfig
from tasc_engine.kernels.gpu.attention import INTERPRETED
from tasc_engine.model.loading import ModelSource
from tasc_engine.model.target import Target
from tasc_jobs.demo.tasks import ADAPTERS, MODEL
from tiny import make_folder

CARDS = (80, 86, 89, 90, 100)
needs_triton = pytest.mark.skipif(
    find_spec("triton") is None, reason="needs Triton, which .ci/run installs"
)


interpreted = pytest.mark.skipif(not INTERPRETED, reason="needs Triton and TRITON_INTERPRET=1")


def environment() -> dict[str, str]:
    """Without the interpreter, which compiles nothing."""
    return {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}


@cache
def found_for(card: int) -> Any:
    command = [sys.executable, str(BENCHMARKS / "gpu" / "kernels.py"), "--card", str(card)]
    return record(complete(command, environment()))


@needs_triton
@pytest.mark.slow("Triton compiles over a hundred kernels")
@pytest.mark.parametrize("card", CARDS)
def test_kernels_compile_for_a_card_and_fit_it(card: int) -> None:
    found = found_for(card)
    assert found["never_launched"] == []
    kernels = found["kernels"]
    assert {each["kernel"] for each in kernels} >= {"_attention", "_join", "_gate", "_up", "_down"}
    for each in kernels:
        assert 0 < each["registers"][str(card)] <= 255
        assert each["shared"][str(card)] <= found["shared_limits"][str(card)], each
        assert each["stack"][str(card)] == 0, f"spills: {each}"


@needs_triton
@pytest.mark.slow("Triton compiles over a hundred kernels")
def test_page_has_the_kernels_and_their_numbers_of_specialisations() -> None:
    """Registers depend on the version of Triton, so that they are not compared."""
    page = (BENCHMARKS.parent / "docs" / "reference" / "gpu-kernels.md").read_text("utf-8")
    rows = [line.split(" | ")[:3] for line in page.splitlines() if line.startswith("| `")]
    listed = {(name.strip("|` "), dtype): int(number) for name, dtype, number in rows}
    counted = Counter((e["kernel"].strip("_"), e["dtype"]) for e in found_for(90)["kernels"])
    assert listed == counted, "run benchmarks/gpu/kernels.py --write"


@needs_triton
def test_kernel_that_no_run_launches_is_named() -> None:
    """Positive control of the test above; functions that kernels call are no kernels."""
    code = "from benchmarks.gpu import kernels; import json; print(json.dumps("
    code += "{'names': kernels.never_launched([])}))"
    paths = os.pathsep.join([str(BENCHMARKS.parent), os.environ.get("PYTHONPATH", "")])
    done = complete([sys.executable, "-c", code], {**environment(), "PYTHONPATH": paths})
    names = record(done)["names"]
    assert "tasc_engine.kernels.gpu.attention._attention" in names
    assert "tasc_engine.model.operations._gate" in names
    assert not [name for name in names if name.endswith("._row_of")]


@contextmanager
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """The specialisations that interpreted launches would have on a GPU."""
    from triton.runtime import driver
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    from benchmarks.gpu.kernels import Card, noted

    interpret, kernels = InterpretedFunction.run, dict[Any, Any]()

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **settings: Any) -> None:
        if self.fn not in kernels:
            kernels[self.fn] = JITFunction(self.fn, **self.kwargs)
        kernels[self.fn].run(*args, grid=grid, warmup=True, **settings)
        interpret(self, *args, grid=grid, warmup=warmup, **settings)

    with monkeypatch.context() as patch, noted() as found:
        patch.setattr(driver, "_active", Card(90))
        patch.setattr(InterpretedFunction, "run", run)
        yield found


CONFIG = EngineConfig(rows=1, max_draft_tokens=3, prefill_chunk=16)  # few and small steps


def target_of(folder: Path, *adapters: tuple[str, Path], longest: int = 1024) -> Target:
    source = ModelSource(folder, dtype="float32", adapters=adapters)
    return Target.load(source, replace(CONFIG, max_model_len=longest))


@interpreted
@pytest.mark.slow("it interprets the kernels of an engine")
def test_engine_launches_only_compiled_specialisations(monkeypatch, tmp_path: Path) -> None:
    """An engine of the shipped model answers as on a CPU, with drafts and adapters beside none."""
    named = tuple((name, ADAPTERS / name) for name in ("massive_en", "pos_ewt"))
    requests = [
        Request(str(i), tuple(range(5 + i, 9 + 2 * i)), 4, adapter=adapter)
        for i, adapter in enumerate((None, "massive_en", "pos_ewt"))
    ]
    answers: dict[tuple[int, ...], tuple[int, ...]] = {}

    def answer_all() -> dict[str, Any]:
        engine = make_engine(
            MODEL, CONFIG, target=target_of(MODEL, *named),
            proposer=Known(lambda prompt: answers.get(prompt, ())),
        )  # fmt: skip
        return {each.id: tuple(each.tokens) for each in engine.generate(requests)}

    expected = answer_all()
    # Drafts that are right at first, and wrong at the end.
    answers.update({r.prompt: (*expected[r.id][:2], 9, 9) for r in requests})
    as_on_gpu(monkeypatch, padded=True)
    command = [sys.executable, str(BENCHMARKS / "gpu" / "kernels.py"), "--list", "90"]
    compiled = set(record(complete(command, environment()))["specialisations"])
    with launches(monkeypatch) as launched:
        assert answer_all() == expected
    assert launched - compiled == set()
    assert {kernel.split()[0] for kernel in launched} >= {"_attention", "_gate", "_down", "_up"}
    with launches(monkeypatch) as launched:
        target_of(make_folder(tmp_path / "tiny", "llama"), longest=64)
    assert launched - compiled, "positive control: heads of 8 are not on the list"
