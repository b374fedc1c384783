"""Drafted against plain answers of the shipped task on the device, as a stage.

It also says what the same drafts would bring to the 0.5B shape: a projection, from that shape's
measured steps and from what the demo model accepted when drafts were spent by those costs.
"""

from statistics import median
from typing import Any

import numpy as np
from gpu_found import Found, Here
from gpu_work import ROWS, Ran, Work

from tasc_engine.cost import StepCosts, measure

BATCHES = (1, ROWS)


def speed(found: Found, here: Here) -> None:
    work = Work.of_demo(here, here.dtype, here(384, 9))
    costs = measure(work.target, "demo", here(20, 1))
    found.put("costs", costs.as_json())
    rates: dict[str, dict[str, Any]] = {}
    for batch in BATCHES:
        rates[str(batch)] = repeated(work, batch, costs, here)
        found.put("runs", rates)
        found.put("drafted_over_plain", {b: over(r, "drafted") for b, r in rates.items()})
        found.put("always_over_plain", {b: over(r, "always") for b, r in rates.items()})
    larger = costs_of_steps(here)
    if larger is not None:
        rows = here(128, 3)
        found.put("projected_0.5b_drafted_over_plain", {
            str(batch): projected(work, batch, rows, larger) for batch in BATCHES
        })  # fmt: skip


def over(runs: dict[str, Any], kind: str) -> float:
    return float(runs[kind]["tokens_per_second"] / runs["plain"]["tokens_per_second"])


def repeated(work: Work, batch: int, costs: StepCosts, here: Here) -> dict[str, Any]:
    """Each kind in turn, round after round, behind one that warms up; medians."""
    rows = here(48 * batch, batch + 1)
    kinds: dict[str, tuple[bool, StepCosts | None]] = {
        "plain": (False, None), "drafted": (True, costs), "always": (True, None)
    }  # fmt: skip
    ran: dict[str, list[Ran]] = {kind: [] for kind in kinds}
    for _ in range(here(4, 2)):
        for kind, (drafted, spent_by) in kinds.items():
            ran[kind].append(work.run(drafted, batch, rows, spent_by))
    return {kind: summed(runs[1:]) for kind, runs in ran.items()}


def summed(runs: list[Ran]) -> dict[str, Any]:
    last, seconds = runs[-1].totals, median(r.seconds for r in runs)
    drafting = median(r.totals.draft_seconds for r in runs)
    verifying = median(r.totals.verify_seconds for r in runs)
    return {
        "tokens_per_second": median(r.tokens_per_second for r in runs),
        "spread": [r.tokens_per_second for r in runs],
        "steps": last.steps,
        "tokens_a_row_step": last.block_efficiency,
        "drafted": int(last.drafted.sum()),
        "accepted": int(last.accepted.sum()),
        "draft_share": drafting / seconds,
        "verify_share": verifying / seconds,
        "rest_share": 1 - (drafting + verifying) / seconds,
        "step_us": 1e6 * seconds / last.steps,
    }


def costs_of_steps(here: Here) -> StepCosts | None:
    """Of the 0.5B shape; None where that stage did not come so far."""
    found = Found.read(here, "steps")
    return StepCosts.from_json(found["costs"]) if "costs" in found else None


def projected(work: Work, batch: int, rows: int, costs: StepCosts) -> float:
    """Plain over drafted seconds of the same answers, if each step had cost what these say."""
    return taken(work.run(False, batch, rows), costs) / taken(
        work.run(True, batch, rows, costs), costs
    )


def taken(ran: Ran, costs: StepCosts) -> float:
    seconds = 0.0
    for record in ran.records:
        rows = max(record.row_steps, 1)
        tokens = record.row_steps + int(record.drafted.sum()) + record.prompt_tokens
        context = record.cached_tokens / rows
        step = costs.seconds(rows, np.array([tokens], np.float64), context)
        seconds += float(step[0]) + record.draft_seconds
    return seconds
