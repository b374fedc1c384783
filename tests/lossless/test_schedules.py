"""Tests that answers do not depend on the order of arrivals, steps and cancellations.

Neighbouring rows, earlier content of a row, copied prefixes and moved draft tokens have no effect:
the cache of each row equals the result of a forward pass of its tokens alone.
"""

import gc
import os
import random
import resource
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from lossless_cases import LONGEST, Case, make_engine
from msgspec import structs

from tasc_draft import DraftSettings
from tasc_engine import (
    Engine,
    EngineConfig,
    EngineTotals,
    ModelSource,
    QueueFull,
    Request,
    Target,
)
from tasc_engine.kv.cache import RowCache
from tasc_engine.layout import plain_batch
from tasc_engine.step.cost import Cost, StepCosts

SOAK = int(os.environ.get("TASC_SOAK_REQUESTS", "2000"))
MOST_GROWTH_MB = 48
ROWS, LENGTH = 4, 160
SCARCE = 170  # slots of the cache; so few that requests wait for each other, and are moved together
# Drafts pay off only sometimes, so that steps with and without drafts alternate.
COSTS = StepCosts("m", "d", "f", (Cost(ROWS, ROWS, 64, 1.0), Cost(ROWS, 40, 64, 2.5)))


CONFIG = EngineConfig(
    rows=ROWS, max_model_len=LENGTH, prefill_chunk=16, max_waiting=6, max_draft_tokens=12,
    prefix_cache_bytes=1 << 16,
)  # fmt: skip


def scheduled(
    case: Case, config: EngineConfig, target: Target, spare: int = 0
) -> tuple[Engine, EngineTotals]:
    settings = DraftSettings(min_prob=0.0, num_speculative_tokens=12, recent_tokens=256)
    return make_engine(case, config, settings, target=target, costs=COSTS, spare=spare)


class Schedule:
    """Random operations on an engine, and its expected answers."""

    def __init__(self, case: Case, engine: Engine, seed: int = 0) -> None:
        self._case, self._engine, self._rng = case, engine, random.Random(seed)
        self._expected: dict[str, tuple[list[int], bool]] = {}
        self._needs: dict[str, int] = {}
        self.begun = self.ended = self.cancelled = self.refused = 0

    def operate(self) -> None:
        chance = self._rng.random()
        if chance < 0.01:
            for _ in range(16):  # more than may wait
                self._arrive()
        elif chance < 0.35:
            self._arrive()
        elif chance < 0.39 and self._expected:
            self._cancel(self._rng.choice(sorted(self._expected)))
        else:  # whole steps, and parts of steps with other operations between them
            engine = self._engine
            self._rng.choice((self.step, engine.launch, engine.collect, self.take))()

    def step(self) -> None:
        self._engine.launch()
        self._engine.collect()
        self.take()

    def take(self) -> None:
        for delta in self._engine.outputs():
            if delta.result:
                answer, draft = self._expected.pop(delta.id)
                assert list(delta.result.tokens) == answer
                assert draft or not any(delta.result.acceptance.drafted)
                self.ended += 1

    def _arrive(self) -> None:
        i = self._rng.randrange(len(self._case.prompts))
        most = self._rng.randint(1, self._case.max_tokens[i])
        request = Request(
            str(self.begun), self._case.prompts[i], most, draft=self._rng.random() < 0.9
        )
        try:
            self._engine.submit(request)
        except QueueFull:
            self.refused += 1
            return
        self._expected[request.id] = self._case.answers[i][:most], request.draft
        self._needs[request.id] = len(request.prompt) + most - 1
        self.begun += 1

    def waits_for_slots(self, slots: int) -> bool:
        """Whether a request waits for free slots of the cache although a row is free."""
        engine, scheduler = self._engine, self._engine.scheduler
        free = round((1 - engine.kv_usage) * slots)
        waiting = self._expected.keys() - {s.request.id for s in scheduler.active}
        return scheduler.free_rows > 0 and any(self._needs[name] > free for name in waiting)

    def _cancel(self, name: str) -> None:
        if self._engine.cancel(name):  # else it has just ended, and its result comes
            del self._expected[name]
            self.cancelled += 1


def assert_cache_holds(engine: Engine, cache: RowCache, alone: Target, exact: bool = False) -> int:
    """Asserts that each row's keys and values are those of its tokens; returns the rows checked.

    Args:
        exact: Whether they must have the same bits.
    """
    pool = cache.copied(0, cache.slots)
    source, target = torch.from_numpy(cache.pending_moves)
    pool[:, target] = pool[:, source]
    rows = 0
    for sequence in engine.scheduler.active:
        tokens = np.concatenate([sequence.prompt, sequence.answer.tokens])[: sequence.cached]
        if len(tokens):
            alone.next_tokens(plain_batch([0], 0, tokens.astype(np.int32)))
            found = pool[:, sequence.kv_start : sequence.kv_start + len(tokens)]
            own, limit = alone.cache.copied(0, len(tokens)), 0.0 if exact else None
            torch.testing.assert_close(found, own, rtol=limit, atol=limit)
            rows += 1
    return rows


@pytest.mark.parametrize(
    ("places", "overlaps"), [(ROWS * LENGTH, False), (ROWS * LENGTH, True), (SCARCE, True)]
)
def test_random_schedules_keep_engine_and_cache_consistent(
    case, places, overlaps, everything, seed, monkeypatch
) -> None:
    """With ``overlaps``, the engine works ahead as it does while a GPU runs the forward."""
    monkeypatch.setattr(Engine, "overlaps", overlaps)
    operations = 10_000 if everything else 1_500
    source = ModelSource(case.folder, dtype=case.dtype)
    alone = Target.load(source, EngineConfig(rows=1, max_model_len=LENGTH))
    config = replace(CONFIG, kv_cache_bytes=(places + 1) * alone.cache.copied(0, 1).nbytes)
    target = Target.load(source, config)
    engine, totals = scheduled(case, config, target, spare=ROWS if overlaps else 0)
    assert target.cache.slots == places
    schedule, checked, waited = Schedule(case, engine, seed), 0, 0
    with torch.inference_mode():
        for i in range(operations):
            schedule.operate()
            engine.check_integrity()
            waited += schedule.waits_for_slots(places)
            if i % 20 == 0:
                checked += assert_cache_holds(engine, target.cache, alone)
    many, some = (500, 50) if everything else (0, 0)
    assert schedule.ended > many
    assert min(schedule.cancelled, schedule.refused, checked) > some
    assert (waited > many) == (places == SCARCE)
    assert totals.shared_tokens > 0
    assert totals.drafted.sum() > totals.accepted.sum() > 0


def int8_case(case: Case, alone: Target) -> Case:
    """The case of the int8 model, by its answers to single requests without drafts."""
    config = EngineConfig(rows=1, max_model_len=LENGTH, prefix_cache_bytes=0)
    engine, _ = make_engine(case, config, target=alone)
    whole = [structs.replace(request, max_tokens=LONGEST) for request in case.requests(draft=False)]
    results = {each.id: list(each.tokens) for each in engine.generate(whole)}
    found = [results[request.id] for request in whole]
    answers = [answer[:most] for answer, most in zip(found, case.max_tokens, strict=True)]
    ends = case.tokenizer.eos_ids
    corpus = [[token for token in answer if token not in ends] for answer in found[:8]]
    return replace(case, answers=answers, corpus=corpus, dtype="float32")


@pytest.mark.parametrize("architecture", ["qwen2", "mistral"])
def test_int8_rows_have_the_same_bits_in_any_schedule(
    case_of, architecture, everything, seed
) -> None:
    """Answers and cache equal those of each row alone, with no margin for rounding."""
    folder = case_of(architecture, "float32").folder
    source = ModelSource(folder, quantization="int8-dynamic")
    alone = Target.load(source, EngineConfig(rows=1, max_model_len=LENGTH))
    case = int8_case(case_of(architecture, "float32"), alone)
    target = Target.load(source, CONFIG)
    engine, totals = scheduled(case, CONFIG, target)
    schedule, checked = Schedule(case, engine, seed), 0
    with torch.inference_mode():
        for i in range(4_000 if everything else 600):
            schedule.operate()
            if i % 20 == 0:
                checked += assert_cache_holds(engine, target.cache, alone, exact=True)
    assert min(checked, schedule.ended, schedule.cancelled) > 5
    assert totals.shared_tokens > 0
    assert totals.drafted.sum() > totals.accepted.sum() > 0


def resident_mb() -> float:
    """Returns the resident memory of this process in MB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


@pytest.mark.slow("a soak: a few hundred requests show no growth")
def test_memory_does_not_grow_with_requests(case, capsys) -> None:
    """The test runs for minutes with TASC_SOAK_REQUESTS=20000."""
    target = Target.load(ModelSource(case.folder, dtype=case.dtype), CONFIG)
    engine, _ = scheduled(case, CONFIG, target)
    schedule = Schedule(case, engine, seed=1)
    while schedule.begun < SOAK // 10:
        schedule.operate()
    gc.collect()
    before = resident_mb()
    while schedule.begun < SOAK:
        schedule.operate()
    grown = resident_mb() - before
    with capsys.disabled():
        print(f"{schedule.begun} requests, {schedule.cancelled} cancelled: {grown:.1f} MB more")
    assert grown < MOST_GROWTH_MB
