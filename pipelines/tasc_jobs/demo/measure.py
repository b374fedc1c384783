"""Measures the same rows with and without drafts, over HTTP and in the engine alone.

Both sides are warmed up. One half of the rows is answered plain, then drafted, and the other half
drafted, then plain, so that neither side gets the warmer machine.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING

import httpx
import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from tasc_jobs.errors import JobError

if TYPE_CHECKING:  # the module imports torch and transformers
    from tasc_runtime.llm import LLM

CONCURRENCY = 16


@dataclass(frozen=True)
class HttpRun:
    """One pass over some rows.

    Attributes:
        texts: The answers, in the rows' order.
        tokens: Emitted tokens of all answers.
        seconds: From the first request to the last answer.
        latencies: Duration of each request in seconds.
    """

    texts: list[str]
    tokens: int
    seconds: float
    latencies: list[float]


@dataclass(frozen=True)
class Counters:
    """Drafting counters of a service.

    Attributes:
        samples: Values by name, and by draft position or source if there is one.
    """

    samples: Mapping[tuple[str, str], float]

    def since(self, before: "Counters") -> "Counters":
        return Counters({k: v - before.samples.get(k, 0.0) for k, v in self.samples.items()})

    @property
    def generation_tokens(self) -> float:
        return sum(self._by_label("tasc_generation_tokens_total").values())

    @property
    def steps(self) -> float:
        """Number of forward passes that could emit a token, summed over rows."""
        return sum(self._by_label("tasc_row_steps_total").values())

    @property
    def block_efficiency(self) -> float:
        return self.generation_tokens / self.steps if self.steps else 0.0

    @property
    def by_source(self) -> dict[str, float]:
        """Accepted tokens by the source that drafted them."""
        return self._by_label("tasc_spec_decode_num_accepted_tokens_total")

    @property
    def acceptance_by_position(self) -> list[float]:
        reached = self._by_label("tasc_spec_decode_num_drafts_per_pos_total")
        accepted = self._by_label("tasc_spec_decode_num_accepted_tokens_per_pos_total")
        return [accepted.get(at, 0.0) / reached[at] for at in sorted(reached, key=int)]

    def _by_label(self, name: str) -> dict[str, float]:
        return {label: value for (of, label), value in self.samples.items() if of == name and value}


def send(
    base: str, task: str, inputs: Sequence[str], *, draft: bool, progress: Callable[[int], None]
) -> HttpRun:
    """Sends every input as a chat request, ``CONCURRENCY`` at a time."""
    return asyncio.run(_send(base, task, inputs, draft, progress))


def read_counters(base: str, task: str) -> Counters:
    """Returns the service's counters for one task, from ``/metrics``."""
    samples: dict[tuple[str, str], float] = defaultdict(float)
    for family in text_string_to_metric_families(httpx.get(f"{base}/metrics", timeout=10).text):
        for name, labels, value, *_ in family.samples:
            if labels.get("task") == task:
                samples[name, labels.get("position") or labels.get("source", "")] += value
    return Counters(samples)


async def _send(
    base: str, task: str, inputs: Sequence[str], draft: bool, progress: Callable[[int], None]
) -> HttpRun:
    places = asyncio.Semaphore(CONCURRENCY)
    async with httpx.AsyncClient(base_url=base, timeout=120) as client:

        async def one(text: str) -> tuple[str, int, float]:
            body = {"model": task, "messages": [{"role": "user", "content": text}], "draft": draft}
            async with places:
                began = time.perf_counter()
                response = await client.post("/v1/chat/completions", json=body)
                elapsed = time.perf_counter() - began
            if response.status_code != 200:
                raise JobError(f"the service answered {response.status_code}: {response.text}")
            answer = response.json()
            progress(1)
            content = answer["choices"][0]["message"]["content"]
            return content, answer["usage"]["completion_tokens"], elapsed

        began = time.perf_counter()
        answers = await asyncio.gather(*(one(text) for text in inputs))
        seconds = time.perf_counter() - began
    texts, tokens, latencies = zip(*answers, strict=True)
    return HttpRun(list(texts), sum(tokens), seconds, list(latencies))


WARM_UP_ROWS = 32

Runs = dict[bool, list[HttpRun]]
_Pass = tuple[bool, Sequence[str]]


def answers_of(runs: Sequence[HttpRun]) -> list[str]:
    """Returns the answers of one side, in the rows' order."""
    return [text for run in runs for text in run.texts]


def _passes(inputs: Sequence[str]) -> list[_Pass]:
    """Returns the passes in order: for each, whether drafts are on, and its rows."""
    first, second = inputs[: len(inputs) // 2], inputs[len(inputs) // 2 :]
    return [(False, first), (True, first), (True, second), (False, second)]


@dataclass(frozen=True)
class DemoFigures:
    """Runs with and without drafts, and the service's counters over the runs with drafts."""

    http: Runs
    engine: Runs
    counters: Counters


def over_http(
    base: str, task: str, inputs: Sequence[str], progress: Callable[[int], None]
) -> tuple[Runs, Counters]:
    """Returns the runs over HTTP, and the counters of the runs with drafts."""
    runs: Runs = {False: [], True: []}
    for draft in (False, True):
        send(base, task, inputs[:WARM_UP_ROWS], draft=draft, progress=lambda rows: None)
    for draft, passes in groupby(_passes(inputs), key=itemgetter(0)):
        before = read_counters(base, task)
        runs[draft] += [
            send(base, task, rows, draft=draft, progress=progress) for _, rows in passes
        ]
        if draft:
            counted = read_counters(base, task).since(before)
    return runs, counted


def engine_alone(llm: "LLM", inputs: Sequence[str], progress: Callable[[int], None]) -> Runs:
    """Returns the runs of an engine in this process; the rows of a pass are submitted at once."""
    runs: Runs = {False: [], True: []}
    for draft in (False, True):
        llm.generate(inputs[:WARM_UP_ROWS], draft=draft, progress=False)
    for draft, rows in _passes(inputs):
        began = time.perf_counter()
        answers = llm.generate(rows, draft=draft, progress=False)
        seconds = time.perf_counter() - began
        latencies = [a.seconds - a.queued for a in answers]
        tokens = sum(len(a.tokens) for a in answers)
        runs[draft].append(HttpRun([a.text for a in answers], tokens, seconds, latencies))
        progress(len(rows))
    return runs


def tokens_per_second(runs: Sequence[HttpRun]) -> float:
    return sum(r.tokens for r in runs) / sum(r.seconds for r in runs)


def latency_ms(runs: Sequence[HttpRun]) -> dict[str, float]:
    """Returns p50, p95 and p99 of all requests of the runs, in milliseconds."""
    all_ms = 1000 * np.concatenate([r.latencies for r in runs])
    return {f"p{p}": round(float(np.percentile(all_ms, p)), 2) for p in (50, 95, 99)}
