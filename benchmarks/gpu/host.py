"""Measure how long a GPU waits for the host between two drafted steps, without a GPU.

    python benchmarks/gpu/host.py
    python benchmarks/gpu/host.py --batches 8 --requests 400

A stub device takes a fixed time for each forward, and gives the known answers of unseen test rows,
so that drafts are accepted as if a model gave these answers. Everything on the host is real: the
engine, the proposer with the index of the shipped task, the layout of a step, and the buffers that
a graph reads. Only CUDA's own calls are missing, about 20 microseconds a step.

The wait of a step is the time from the end of a forward until the next forward begins; it is
measured without timers. A second run times the parts of the host's work, each without the parts
that it calls. Tables go to stdout, progress to stderr; the last line of stdout is one JSON object.
"""

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from pathlib import Path
from statistics import mean, median
from typing import Any

if __name__ == "__main__":  # modules are found from the repository's root, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import numba
import numpy as np
import torch
from torch import Tensor

from benchmarks.common import (
    about,
    at_least,
    digits,
    finish,
    listed,
    parser_of,
    show_table,
    to_stderr,
)
from benchmarks.gpu.work import BASE, TEMPLATE, rows, task_index
from tasc_draft import SOURCES, DraftIndex, DraftSettings, NgramProposer
from tasc_engine import Engine, EngineConfig, EngineTotals, ModelSource, Request, Target
from tasc_engine import engine as engine_module
from tasc_engine.drafting import safe_proposer
from tasc_engine.layout import Int32, Int64, StepLayout
from tasc_engine.model import cuda_graphs
from tasc_engine.model import target as target_module
from tasc_engine.sampling.sampler import Sampler
from tasc_engine.stats import StepRecord
from tasc_engine.step import draft_budget, scheduler, verify
from tasc_engine.step.cost import Cost, StepCosts
from tasc_engine.step.plan import Plan
from tasc_text import PromptTemplate, TaskTokenizer

LENGTH, ANSWER = 512, 128
TOKEN_US = 0.8  # a token's share of a step, in the costs that limit drafts
WARM_UP = 64  # requests before anything is measured

# Parts of the host's work: an owner, a method or function of it, and the part's name.
PARTS: tuple[tuple[Any, str, str], ...] = (
    (scheduler.Scheduler, "plan", "plan"),
    (Engine, "submit", "submit"),
    (draft_budget.DraftBudget, "min_probs", "draft budget"),
    (safe_proposer.SafeProposer, "propose", "propose"),
    (Plan, "guided", "guides"),
    (Plan, "limits", "accept"),
    (verify, "accept", "accept"),
    (target_module, "lay_out", "layout"),
    (cuda_graphs, "fill", "layout"),
    (cuda_graphs.GraphedForward, "start_tokens", "launch"),
    (engine_module, "count", "counts of drafts"),
    (scheduler, "moves", "moves in the cache"),
    (scheduler.Scheduler, "_emit", "new tokens"),
    (scheduler.Committed, "outputs", "outputs"),
    (scheduler.Scheduler, "release", "end of requests"),
    (safe_proposer.SafeProposer, "start", "proposer: new rows"),
    (safe_proposer.SafeProposer, "observe_rows", "proposer: new tokens"),
    (safe_proposer.SafeProposer, "prepare", "proposer: work ahead"),
    (safe_proposer.SafeProposer, "finish", "proposer: ended rows"),
    (Sampler, "start", "sampler"),
    (Sampler, "observe", "sampler"),
    (Sampler, "finish", "sampler"),
    (Engine, "_record", "record and costs"),
)


def main() -> None:
    options = arguments()
    torch.set_num_threads(1)
    tokenizer = TaskTokenizer.from_folder(BASE)
    index = task_index(tokenizer, rows("train"))
    found = about() | {"forward_us": options.forward_us, "batches": {}}
    for batch in options.batches:
        to_stderr(f"b = {batch}")
        bench = Bench(batch, tokenizer, index, options)
        bench.run(WARM_UP)
        waits = bench.run(options.requests)
        result = figures(waits, bench.totals, options.forward_us)
        with timed() as parts:
            bench.run(options.requests)
        ordered = sorted(parts.items(), key=lambda each: -each[1])
        result["parts_us"] = {part: 1e6 * s / bench.totals.steps for part, s in ordered}
        found["batches"][batch] = result
        show(batch, result)
    finish(found)


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--batches", type=numbers, default=(8, 32), help="numbers of rows (8,32)")
    add("--requests", type=at_least(64), default=1400, help="requests of each run (1400)")
    add("--forward-us", type=at_least(1), default=300, help="microseconds of a forward (300)")
    return parser.parse_args()


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(each) for each in listed(text))


class Device:
    """A device with one stream, which is given a forward and takes a fixed time for it.

    Attributes:
        waits: Seconds from the end of each forward to the beginning of the next forward.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.waits = list[float]()
        self._ends = self._own = 0.0

    def begin(self) -> None:
        now = time.perf_counter()
        if self._ends:
            self.waits.append(now - self._ends - self._own)
        self._ends = now + self._seconds

    def wait(self, work: Callable[[], None]) -> None:
        """Wait until the forward has ended; the stub's own ``work`` is done while it waits."""
        entered = time.perf_counter()
        work()
        worked = time.perf_counter()
        self._own = max(worked - max(self._ends, entered), 0.0)
        while time.perf_counter() < self._ends:
            pass

    def is_busy(self) -> bool:
        return time.perf_counter() < self._ends

    def rest(self) -> None:
        """Forget the last forward, so that the time until the next one is no wait."""
        self._ends = 0.0


class StubTarget:
    """Puts a stub device under a target: graphs that compute nothing, and known answers.

    Args:
        answers: By id of a request, the length of its prompt and its answer's tokens.
    """

    def __init__(
        self, target: Target, device: Device, answers: dict[str, tuple[int, Int32]]
    ) -> None:
        rows, drafts = target.config.rows, target.config.max_draft_tokens
        limits = cuda_graphs.Limits(rows, rows * (1 + drafts), rows * drafts, target.cache.slots)
        self._device, self._answers, self._target = device, answers, target
        self._graphs = cuda_graphs.GraphedForward(
            lambda ids, indices, cache, out: out.zero_(),
            target.cache, limits, torch.empty(limits.tokens, 1), self,
        )  # fmt: skip
        self._step: StepLayout[Int64] | None = None
        self.engine: Engine | None = None
        target._graphs = self._graphs
        target.cache.move = self._move  # type: ignore[method-assign]
        self._by_graph = target._tokens_of
        target._tokens_of = self._tokens_of  # type: ignore[method-assign]
        target.is_busy = device.is_busy  # type: ignore[method-assign]
        target.device = torch.device("meta")  # a device that works while the host does

    def record(self, run: cuda_graphs.Work) -> cuda_graphs.Work:
        found = run()

        def replay() -> tuple[Tensor, Tensor]:
            self._device.begin()
            return found

        return replay

    def wait(self) -> None:
        self._device.wait(self._answer)

    def _move(self, moves: Tensor) -> None:
        self._target.cache.pending_moves = np.zeros((2, 0), np.int64)

    def _tokens_of(self, step: StepLayout[Int64]) -> Callable[[], Int64]:
        self._step = step
        if self._graphs.size_of(step) is not None:
            return self._by_graph(step)
        self._device.begin()  # a step with many prompt tokens, which no graph runs

        def tokens() -> Int64:
            self._device.wait(lambda: None)
            return self._known(step)[step.logits_indices]

        return tokens

    def _answer(self) -> None:
        assert self._step is not None, "a step begins before it ends"
        size = self._graphs.size_of(self._step)
        assert size is not None, "only graphs wait"
        bucket = self._graphs._buckets[size, False]
        assert bucket is not None, "a stub's graphs need no memory"
        bucket.chosen.numpy()[: len(self._step.ids)] = self._known(self._step)

    def _known(self, step: StepLayout[Int64]) -> Int64:
        """The token of the known answer after each token of a step; 0 beside the answer."""
        if self.engine is None:  # a target warms up before it has an engine
            return np.zeros(len(step.ids), np.int64)
        by_slot = {s.kv_start: self._answers[s.request.id] for s in self.engine.scheduler.active}
        own = [by_slot[int(start)] for start in step.kv_starts]
        answers = np.zeros((len(own), max(len(answer) for _, answer in own) + 1), np.int64)
        for line, (_, answer) in zip(answers, own, strict=True):
            line[: len(answer)] = answer
        tokens = np.zeros(len(step.ids), np.int64)
        prompts = np.array([length for length, _ in own])
        follow(
            step.ids, step.positions, step.tree, step.query_offsets, step.nodes, prompts, answers,
            tokens,
        )  # fmt: skip
        return tokens


@numba.njit(cache=True)
def follow(
    ids: Any, positions: Any, tree: Any, offsets: Any, nodes: Any, prompts: Any, answers: Any,
    tokens: Any,
) -> None:  # fmt: skip
    """Write the token after each current token, and after each node on the answer's own path."""
    for i in range(len(nodes)):
        root = offsets[i + 1] - nodes[i] - 1
        at = positions[root] + 1 - prompts[i]
        if at < 0 or at >= answers.shape[1]:
            continue  # the prompt is not read yet
        tokens[root] = answers[i, at]
        right = np.int64(0)  # bit b: node b is on the answer's path
        for b in range(nodes[i]):
            x = root + 1 + b
            depth = positions[x] - positions[root]
            above = tree[x] ^ (np.int64(1) << b)
            place = at + depth
            if above & right == above and ids[x] == answers[i, place - 1]:
                right |= np.int64(1) << b
                if place < answers.shape[1]:
                    tokens[x] = answers[i, place]


class Bench:
    """An engine of some rows on a stub device, and requests with known answers."""

    def __init__(
        self, batch: int, tokenizer: TaskTokenizer, index: DraftIndex, options: argparse.Namespace
    ) -> None:
        config = EngineConfig(rows=batch, max_model_len=LENGTH)
        self._device = Device(options.forward_us / 1e6)
        template = PromptTemplate(TEMPLATE)
        self._tokenizer, self._test = tokenizer, rows("test")
        self._prompts = [tokenizer.encode_prompt(template.render(r["input"])) for r in self._test]
        outputs = tokenizer.encode_outputs([r["output"] for r in self._test])
        self._outputs = [[*output, tokenizer.eos_id] for output in outputs]
        self._answers: dict[str, tuple[int, Int32]] = {}
        target = Target.load(ModelSource(BASE), config)
        stub = StubTarget(target, self._device, self._answers)
        proposer = NgramProposer(
            DraftSettings(),
            rows=batch,
            capacity=LENGTH,
            vocab_size=target.vocab_size,
            eos_ids=tokenizer.eos_ids,
            index=index,
            spare=NgramProposer.spare_lanes(batch),
        )
        self.totals = EngineTotals(len(SOURCES), proposer.max_depth)
        self.engine = stub.engine = Engine(
            target, tokenizer, proposer, config, self._on_step, costs_of(batch, options.forward_us)
        )

    def _on_step(self, record: StepRecord) -> None:
        self.totals.add(record)

    def run(self, requests: int) -> list[float]:
        """Answer requests; returns the seconds that the device waited after each forward."""
        self._device.rest()
        self._device.waits.clear()
        self.totals = EngineTotals(len(SOURCES), self.totals.accepted.shape[1])
        begin = len(self._answers)  # rows go on from run to run, as an answered row is known
        rows = range(begin, begin + requests)
        results = list(self.engine.generate(map(self._request, rows)))
        assert len(results) == requests
        assert all(list(r.tokens) == self._answers[r.id][1].tolist() for r in results)
        return list(self._device.waits)

    def _request(self, i: int) -> Request:
        id, i = str(i), i % len(self._prompts)
        self._answers[id] = len(self._prompts[i]), np.array(self._outputs[i], np.int32)
        return Request(id, tuple(self._prompts[i]), ANSWER)


def costs_of(batch: int, forward_us: float) -> StepCosts:
    """The costs of a GPU: the time of a forward, and a little for each token."""
    costs = [
        Cost(n, n * (1 + d), context, (forward_us + TOKEN_US * n * (1 + d)) / 1e6)
        for n in sorted({1, 2, 4, 8, 16, batch})
        for d in (0, 1, 3, 7, 15, 31)
        for context in (64, 384)
        if n <= batch
    ]
    return StepCosts("stub", "stub", "bfloat16", tuple(costs))


# Parts of the host's work


@contextmanager
def timed() -> Iterator[dict[str, float]]:
    """Time the parts while active; yields their seconds, without the parts inside them."""
    seconds: dict[str, float] = defaultdict(float)
    inner = [0.0]  # of each part that runs now: the seconds of the parts inside it
    with ExitStack() as restored:
        for owner, name, part in PARTS:
            if (function := getattr(owner, name, None)) is not None:
                restored.callback(setattr, owner, name, function)
                setattr(owner, name, timer(function, part, seconds, inner))
        yield seconds


def timer(
    function: Callable[..., Any], part: str, seconds: dict[str, float], inner: list[float]
) -> Callable[..., Any]:
    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        inner.append(0.0)
        began = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            whole = time.perf_counter() - began
            seconds[part] += whole - inner.pop()
            inner[-1] += whole

    return run


# Figures


def figures(waits: list[float], totals: EngineTotals, forward_us: float) -> dict[str, Any]:
    us = sorted(1e6 * wait for wait in waits)
    return {
        "steps": totals.steps,
        "wait_us": mean(us),
        "wait_p50_us": median(us),
        "wait_p95_us": us[int(0.95 * len(us))],
        "busy": forward_us / (forward_us + mean(us)),
        "tokens_per_step": totals.emitted_tokens / totals.steps,
        "accepted_per_row": float(totals.accepted.sum()) / totals.row_steps,
    }


def show(batch: int, found: dict[str, Any]) -> None:
    names = {
        "wait_us": "the device waits, us a step",
        "wait_p50_us": "the same, median",
        "wait_p95_us": "the same, 95th percentile",
        "busy": "share of time that it works",
        "tokens_per_step": "tokens a step",
        "accepted_per_row": "draft tokens accepted, a row and step",
    }
    table = [[words, digits(found[name])] for name, words in names.items()]
    show_table(f"b = {batch}, {found['steps']} steps", ["", ""], table)
    parts = [[part, digits(us)] for part, us in found["parts_us"].items()]
    show_table("parts of the host's work", ["part", "us a step"], parts)


if __name__ == "__main__":
    main()
