"""The engine's figures with their bars, its tables, and the record of the last line.

A ratio is taken for each repeat, of runs of the same turn, so that a machine that becomes slower
slows both. A figure is the median of the ratios, with the least and the greatest.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.common import Figure, about, digits, show_table, versions
from benchmarks.engine.equal import Equality
from benchmarks.engine.loop import Ran
from benchmarks.engine.sides import Measured, version_of
from benchmarks.engine.steps import Ceiling

DRAFTED_8, DRAFTED_1 = 2.5, 4.0  # required of massive_en
OVER_TRANSFORMERS, OVER_OPENVINO, OVER_BEST_PEER = 1.5, 0.9, 1.5
OVERHEAD, UNPREDICTABLE = 0.10, 0.98
_SHOWN = 5  # differences of a comparison


@dataclass(frozen=True)
class Options:
    """The command line.

    Attributes:
        rows: Test rows of each task, counted from the first one; of each run, with ``smollm2``.
        repeats: Timed runs of each setting.
        max_tokens: The length of an answer of another model, end-of-sequence included. The shipped
            model ends its answers itself.
        sequences: Rows that are decoded together, with ``smollm2``, in ascending order.
    """

    rows: int
    repeats: int
    threads: int
    dtype: str
    quantization: str | None
    tasks: tuple[str, ...]
    peers: tuple[str, ...]
    max_tokens: int
    model: Path | None
    shape: str | None
    smollm2: bool
    data: Path | None
    sequences: tuple[int, ...]
    json: Path | None


@dataclass(frozen=True)
class Found:
    """All measurements of one task.

    Attributes:
        exact: The comparison with transformers in float32.
        rounded: The comparison of drafted and plain answers in the dtype of the run; None in
            float32.
    """

    task: str
    measured: tuple[Measured, ...]
    ceiling: Ceiling
    exact: Equality
    rounded: Equality | None

    def of(self, side: str, setting: str) -> Measured | None:
        for found in self.measured:
            if (found.side, found.setting) == (side, setting):
                return found
        return None

    @property
    def best_peer(self) -> Measured | None:
        """The setting of a peer with the most tokens per second."""
        peers = [m for m in self.measured if m.side != "ours"]
        return max(peers, key=lambda m: median(speeds(m)), default=None)


# Figures


def figures(found: Found) -> list[Figure]:
    """The figures of one task that have a bar; there is none for a peer that did not run."""
    bars = (DRAFTED_8, DRAFTED_1) if found.task == "massive_en" else (None, None)
    pairs = [
        ("plain / transformers", "plain 8", found.of("transformers", "plain 8"), OVER_TRANSFORMERS),
        ("plain / openvino", "plain 8", found.of("openvino", "plain 8"), OVER_OPENVINO),
        ("drafted / plain, b=8", "drafted 8", found.of("ours", "plain 8"), bars[0]),
        ("drafted / plain, b=1", "drafted 1", found.of("ours", "plain 1"), bars[1]),
        ("drafted / best peer", "drafted 8", found.best_peer, OVER_BEST_PEER),
        ("unpredictable / plain", "random 8", found.of("ours", "plain 8"), UNPREDICTABLE),
    ]
    made = [
        ratio(found, name, setting, other, bar)
        for name, setting, other, bar in pairs
        if other is not None
    ]
    return [*made, overhead(found)]


def ratio(found: Found, name: str, setting: str, other: Measured, bar: float | None) -> Figure:
    ours = found.of("ours", setting)
    assert ours is not None, f"ours {setting} always runs"
    ratios = [a / b for a, b in zip(speeds(ours), speeds(other), strict=True)]
    return Figure.of_runs(f"{found.task}: {name}", ratios, "x", bar)


def overhead(found: Found) -> Figure:
    """The share of a drafted run that is neither drafting nor verifying."""
    ours = found.of("ours", "drafted 8")
    assert ours is not None, "drafted 8 always runs"
    rest = [share for ran in ours.runs if (share := shares(ran)[2]) is not None]
    return Figure.of_runs(f"{found.task}: overhead share", rest, "", OVERHEAD, upwards=False)


def worst(all_figures: Sequence[Figure], name: str) -> float | None:
    """The worst value of a figure over tasks; None where nothing was measured."""
    own = [f for f in all_figures if f.name.endswith(f": {name}")]
    if not own:
        return None
    return min(f.value for f in own) if own[0].upwards else max(f.value for f in own)


def speeds(found: Measured) -> list[float]:
    """Tokens per second of each run, end-of-sequence included."""
    return [ran.tokens / ran.seconds for ran in found.runs]


def shares(ran: Ran) -> tuple[float | None, float | None, float | None]:
    """Shares of a run's time: draft, verify, rest; None where a side does not report them."""
    if ran.verify is None:
        return None, None, None
    draft = (ran.draft or 0.0) / ran.seconds
    verify = ran.verify / ran.seconds
    return draft, verify, 1 - draft - verify


def milliseconds(found: Measured, what: str, percent: float) -> float | None:
    """A percentile of ``latency`` or ``first`` over the requests, the median of the runs."""
    runs = [getattr(ran, what) for ran in found.runs]
    if not all(runs):
        return None
    return 1000 * median(float(np.percentile(seconds, percent)) for seconds in runs)


def step_ms(found: Measured) -> float | None:
    if not all(ran.steps for ran in found.runs):
        return None
    return 1000 * median(ran.seconds / ran.steps for ran in found.runs)


def block_efficiency(found: Measured) -> float | None:
    ran = found.runs[0]
    return ran.tokens / ran.row_steps if ran.row_steps else None


# Tables


def show_task(found: Found) -> None:
    """All settings of a task, the ceiling of plain steps, and the comparisons of answers."""
    headings = ("", "tokens/s", "least", "greatest", "step ms", "block eff.", "draft %",
                "verify %", "rest %", "p50 ms", "p99 ms", "first p50 ms", "peak MB")  # fmt: skip
    top = found.ceiling
    name, per_second = f"ceiling, plain b={top.batch}", digits(top.tokens_per_second)
    rows: list[list[str] | None] = [[m.name, *map(digits, cells(m))] for m in found.measured]
    rows += [None, [name, per_second, "", "", digits(1000 * top.step_seconds)]]
    show_table(f"{found.task}: medians of {len(found.measured[0].runs)} runs", headings, rows)
    print(
        f"ceiling: {top.weight_bytes / 1e6:.1f} MB of weights at {top.bandwidth / 1e9:.1f} GB/s, "
        f"{2 * top.weights * top.batch / 1e6:.0f} Mop a step at {top.rate / 1e9:.0f} Gop/s: "
        f"{top.steps_per_second:.0f} steps/s"
    )
    show_equality("float32, ours drafted against transformers one by one", found.exact)
    if found.rounded is not None:
        show_equality("this dtype, ours drafted against ours plain", found.rounded)


def cells(measured: Measured) -> list[float | None]:
    per_second = speeds(measured)
    percents = [
        None if None in parts else 100 * median(p for p in parts if p is not None)
        for parts in zip(*map(shares, measured.runs), strict=True)
    ]
    return [
        median(per_second), min(per_second), max(per_second), step_ms(measured),
        block_efficiency(measured), *percents, milliseconds(measured, "latency", 50),
        milliseconds(measured, "latency", 99), milliseconds(measured, "first", 50),
        measured.memory_mb,
    ]  # fmt: skip


def show_equality(name: str, found: Equality) -> None:
    print(
        f"{name}: {found.identical:.4f} of {found.rows} rows equal; {len(found.differences)} first "
        f"differences in {found.compared} tokens, greatest margin {found.greatest_margin:.3g}, "
        f"{found.above} above {found.limit:g}"
    )
    for d in sorted(found.differences, key=lambda d: -d.margin)[:_SHOWN]:
        print(f"  row {d.row}, token {d.place}: margin {d.margin:.3g}")


# The record


def record(
    options: Options, model: str, found: Sequence[Found], all_figures: Sequence[Figure]
) -> dict[str, Any]:
    """The object of the last line.

    Ratios of drafted over plain, the time to the first token and the memory are those of the first
    task; all other figures are the worst of all tasks.
    """
    first = [f for f in all_figures if found and f.name.startswith(f"{found[0].task}: ")]
    drafted = found[0].of("ours", "drafted 8") if found else None
    peers = {peer: version_of(peer) for peer in options.peers if peer != "transformers"}
    return {
        "benchmark": "engine",
        "model": model,
        "rows": options.rows,
        "repeats": options.repeats,
        "drafted_over_plain": worst(first, "drafted / plain, b=8"),
        "drafted_over_plain_b1": worst(first, "drafted / plain, b=1"),
        "plain_over_transformers": worst(all_figures, "plain / transformers"),
        "plain_over_openvino": worst(all_figures, "plain / openvino"),
        "drafted_over_best_peer": worst(all_figures, "drafted / best peer"),
        "overhead_share": worst(all_figures, "overhead share"),
        "unpredictable_over_plain": worst(all_figures, "unpredictable / plain"),
        **equality_of_all(found),
        "ttft_ms": milliseconds(drafted, "first", 50) if drafted else None,
        "peak_memory_mb": drafted.memory_mb if drafted else None,
        "peers": sorted({m.side for f in found for m in f.measured} - {"ours"}),
        "figures": [figure.record for figure in all_figures],
        "tasks": {f.task: task_record(f) for f in found},
        "versions": versions("torch", "transformers", "numpy", "numba") | peers,
        "threads": options.threads,
        "dtype": options.dtype,
        "quantization": options.quantization,
        **about(),
    }


def equality_of_all(found: Sequence[Found]) -> dict[str, Any]:
    """The least share of equal rows; differences of all tasks per token, in the run's dtype."""
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
        "drafted": ran.drafted,
        "steps": ran.steps,
        "step_ms": step_ms(measured),
        "block_efficiency": block_efficiency(measured),
        "latency_ms": [milliseconds(measured, "latency", q) for q in (50, 99)],
        "first_ms": milliseconds(measured, "first", 50),
        "memory_mb": measured.memory_mb,
    }


def equality_record(found: Equality) -> dict[str, Any]:
    return asdict(found) | {"identical": found.identical, "above": found.above}
