"""Measures the same rows with and without drafts, over HTTP and in the engine alone.

Both sides are warmed up and their order alternates (plain, drafted, drafted, plain), so that
neither gets the warmer machine.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tasc_engine import GenerationResult
from tasc_jobs.demo.client import Counters, Run, read_counters, send
from tasc_serve.calls import Call
from tasc_serve.worker import Worker

ORDER = (False, True, True, False)
WARM_UP_ROWS = 32

Runs = dict[bool, list[Run]]


@dataclass(frozen=True)
class Measured:
    """Runs by whether drafts were on, and the service's counters over its drafted runs."""

    http: Runs
    engine: Runs
    counters: Counters


def over_http(
    base: str, task: str, inputs: Sequence[str], progress: Callable[[int], None]
) -> tuple[Runs, Counters]:
    """Runs over HTTP and the counters of the drafted ones."""
    runs: Runs = {False: [], True: []}
    counted = Counters(0, 0, 0, 0, [], [])
    for draft in (False, True):
        send(base, task, inputs[:WARM_UP_ROWS], draft=draft, progress=lambda rows: None)
    for draft in ORDER:
        before = read_counters(base, task)
        runs[draft].append(send(base, task, inputs, draft=draft, progress=progress))
        if draft:
            counted = counted.plus(read_counters(base, task).since(before))
    return runs, counted


def engine_alone(worker: Worker, inputs: Sequence[str], progress: Callable[[int], None]) -> Runs:
    """Runs of an engine in this process, all rows handed over at once."""
    runs: Runs = {False: [], True: []}
    for draft in (False, True):
        _answer(worker, inputs[:WARM_UP_ROWS], draft, lambda rows: None)
    for draft in ORDER:
        runs[draft].append(_answer(worker, inputs, draft, progress))
    return runs


def tokens_per_second(runs: Sequence[Run]) -> float:
    return sum(r.tokens for r in runs) / sum(r.seconds for r in runs)


def latency_ms(runs: Sequence[Run]) -> dict[str, float]:
    """p50, p95 and p99 of all requests of the runs, milliseconds."""
    all_ms = 1000 * np.concatenate([r.latencies for r in runs])
    return {f"p{p}": round(float(np.percentile(all_ms, p)), 2) for p in (50, 95, 99)}


def _answer(
    worker: Worker, inputs: Sequence[str], draft: bool, progress: Callable[[int], None]
) -> Run:
    calls = (Call(str(i), text, templated=True, draft=draft) for i, text in enumerate(inputs))
    results: dict[int, GenerationResult] = {}
    began = time.perf_counter()
    for result in worker.engine.generate(worker.request(call) for call in calls):
        results[int(result.id)] = result
        progress(1)
    seconds = time.perf_counter() - began
    ordered = [results[i] for i in range(len(inputs))]
    return Run(
        [r.text for r in ordered],
        sum(len(r.tokens) for r in ordered),
        seconds,
        [r.timings.total - r.timings.queued for r in ordered],
    )
