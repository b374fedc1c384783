"""The engine benchmark's last line: every figure, what it was measured with, and on what."""

import platform
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from statistics import median
from typing import Any

from draft_bars import Figure
from draft_report import git_revision, processor, rounded
from engine_args import Asked
from engine_equal import Equality
from engine_figures import Found, block_efficiency, milliseconds, speeds, step_ms, worst
from engine_peers import version_of
from engine_sides import Measured
from engine_work import model_of as folder_of

_PACKAGES = ("torch", "transformers", "numpy", "numba")


def report(asked: Asked, found: Sequence[Found], figures: Sequence[Figure]) -> dict[str, Any]:
    """Ratios of drafted over plain, first-token time and memory are the first task's; all other
    figures are the worst of the tasks'."""
    first = [f for f in figures if found and f.name.startswith(f"{found[0].task}: ")]
    made = {
        **model_of(asked),
        "drafted_over_plain": worst(first, "drafted / plain, b=8"),
        "drafted_over_plain_b1": worst(first, "drafted / plain, b=1"),
        "plain_over_transformers": worst(figures, "plain / transformers"),
        "plain_over_openvino": worst(figures, "plain / openvino"),
        "drafted_over_best_peer": worst(figures, "drafted / best peer"),
        "overhead_share": worst(figures, "overhead share"),
        "unpredictable_over_plain": worst(figures, "unpredictable / plain"),
        **equal(found),
        **of_drafted(found),
        "peers": sorted({m.side for f in found for m in f.measured} - {"ours"}),
        "figures": [figure.record for figure in figures],
        "tasks": {f.task: task_record(f) for f in found},
        **surroundings(asked),
    }
    record: dict[str, Any] = rounded(made)
    return record


def model_of(asked: Asked) -> dict[str, Any]:
    name = asked.shape or folder_of(asked).name
    return {"benchmark": "engine", "model": name, "rows": asked.rows, "repeats": asked.repeats}


def equal(found: Sequence[Found]) -> dict[str, Any]:
    """Least share of equal rows; differences of all tasks per token, in the dtype that ran."""
    other = [f.rounded for f in found if f.rounded is not None]
    compared = sum(e.compared for e in other)
    return {
        "identical": min((f.exact.identical for f in found), default=None),
        "bf16_mismatch_per_token": (
            sum(len(e.differences) for e in other) / compared if compared else None
        ),
        "bf16_mismatch_above_margin": sum(e.above for e in other) if other else None,
        "bf16_greatest_margin": max((e.greatest_margin for e in other), default=None),
    }


def of_drafted(found: Sequence[Found]) -> dict[str, Any]:
    drafted = found[0].of("ours", "drafted 8") if found else None
    return {
        "ttft_ms": milliseconds(drafted, "first", 50) if drafted else None,
        "peak_memory_mb": drafted.memory_mb if drafted else None,
    }


def task_record(found: Found) -> dict[str, Any]:
    top = found.ceiling
    return {
        "settings": {m.name: setting_record(m) for m in found.measured},
        "ceiling": asdict(top) | {"tokens_per_second": top.tokens_per_second},
        "float32": equality_record(found.exact),
        "dtype": equality_record(found.rounded) if found.rounded else None,
    }


def setting_record(measured: Measured) -> dict[str, Any]:
    ran, per_second = measured.runs[0], speeds(measured)
    return {
        "tokens_per_second": median(per_second),
        "spread": [min(per_second), max(per_second)],
        "tokens": ran.tokens,
        "accepted": ran.accepted,
        "steps": ran.steps,
        "step_ms": step_ms(measured),
        "block_efficiency": block_efficiency(measured),
        "latency_ms": [milliseconds(measured, "latency", q) for q in (50, 99)],
        "first_ms": milliseconds(measured, "first", 50),
        "memory_mb": measured.memory_mb,
    }


def equality_record(found: Equality) -> dict[str, Any]:
    return asdict(found) | {"identical": found.identical, "above": found.above}


def surroundings(asked: Asked) -> dict[str, Any]:
    peers = {peer: version_of(peer) for peer in asked.peers if peer != "transformers"}
    packages = {name: version(name) for name in _PACKAGES}
    return {
        "versions": {"python": platform.python_version(), **packages, **peers},
        "git": git_revision(),
        "threads": asked.threads,
        "dtype": asked.dtype,
        "processor": processor(),
    }
