"""Tests that generation and classification in one batch change none of each other's results.

Results are compared with those of each request alone, without drafts and without a prefix cache.
"""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from lossless_cases import CAPACITY, PAPER, Case, by, neural
from lossless_cases import make_engine as make_engine_of_case
from msgspec import structs

from support import index_of, load_target, lying, make_engine, make_proposer, ruled
from tasc_draft import DraftIndex
from tasc_engine import (
    Engine,
    EngineConfig,
    GenerationResult,
    GuideSpec,
    QueueFull,
    Request,
    Sampling,
    StepRecord,
)
from tasc_engine.kernels.cpu.products import multiplies
from tasc_engine.step import verify
from tasc_engine.step.cost import Cost, StepCosts
from tasc_engine.step.draft_budget import DraftBudget
from tasc_protocol import LabelScores, Scoring

LABELS = ("alarm", "alarm set", "alarm set for nine", "weather", "play music", "play the beatles")
SETS = (
    GuideSpec("labels", LABELS),
    GuideSpec("labels", LABELS, end=""),
    GuideSpec("labels", tuple(f"intent: {'play_' * (i % 4)}{i}" for i in range(40)), end=","),
    GuideSpec("labels", tuple(f"{i} {i}" for i in range(40))),
)
# Whether drafts are allowed, and how labels are scored. Unless all are, drafts say where it begins.
WAYS = {
    "exact": (True, Scoring(exact=True)),
    "some": (False, Scoring(tolerance=0.2)),
    "few": (False, Scoring(tolerance=0.0, max_steps=2)),
    "drafted": (True, Scoring(tolerance=0.2)),
}
# How the target is loaded. A token has the same bits in all compiled steps, but not every processor
# compiles float32.
KINDS: dict[str, dict[str, Any]] = {
    "float64": {"dtype": "float64"},
    "int8": {"dtype": "float32", "quantization": "int8-dynamic"},
    **({"float32": {"dtype": "float32"}} if multiplies(4) else {}),
}
CLOSE = 1e-11  # of log-probabilities in float64, which go down to -600
CONFIG = EngineConfig(
    rows=6, max_model_len=CAPACITY, prefill_chunk=16, max_draft_tokens=12, max_waiting=6,
    prefix_cache_bytes=1 << 20,
)  # fmt: skip
ALONE = replace(CONFIG, rows=1, prefix_cache_bytes=0)
SLOTS = 300  # of the cache; so few that requests wait for each other, and are moved together
# Drafts pay off only sometimes, so that steps with and without drafts alternate.
COSTS = StepCosts("m", "d", "f", (Cost(6, 6, 64, 1.0), Cost(6, 40, 64, 2.5)))


def generations(case: Case) -> list[Request]:
    """Returns greedy, sampled and guided requests; some also ask for log-probabilities."""
    sampled = [
        structs.replace(r, id=f"sampled {r.id}", **ruled(Sampling(temperature=0.8, seed=i)))
        for i, r in enumerate(case.requests())
    ]
    guide = GuideSpec("choice", LABELS)
    guided = [
        Request(f"guided {i}", prompt, 24, guide=guide, logprobs=None if i % 3 else 2)
        for i, prompt in enumerate(case.prompts)
    ]
    return [*case.requests(), *sampled, *guided]


def classifications(case: Case, engine: Engine) -> list[Request]:
    return [
        Request(
            f"scored {i} {at} {way}", prompt, engine.scoring_tokens(labels), guide=labels,
            scoring=scoring, draft=draft,
        )
        for i, prompt in enumerate(case.prompts[1::2])
        for at, labels in enumerate(SETS)
        for way, (draft, scoring) in WAYS.items()
    ]  # fmt: skip


@dataclass(frozen=True)
class Asked:
    """Requests of both kinds to one model, and the results of each one alone.

    Attributes:
        index: Two thirds of the answers, for drafts.
    """

    case: Case
    kind: str
    requests: Sequence[Request]
    alone: dict[str, GenerationResult]
    index: DraftIndex

    def engine(self, config: EngineConfig = CONFIG, **how: Any) -> Engine:
        target = load_target(self.case.folder, config, **KINDS[self.kind])
        how |= {"target": target, "settings": PAPER, "index": self.index}
        return make_engine(self.case.folder, config, **how)

    def mixed(self, seed: int) -> list[Request]:
        return random.Random(seed).sample(self.requests, len(self.requests))

    def only(self, *, scoring: bool) -> list[Request]:
        return [r for r in self.requests if (r.scoring is not None) == scoring]

    def assert_alike(self, results: Iterable[GenerationResult]) -> None:
        """Asserts that results equal those of each request alone; ids may begin with a number/."""
        for result in results:
            name = result.id.rpartition("/")[2]
            expected = self.alone[name]
            assert (result.error, result.tokens) == (None, expected.tokens)
            assert (result.scores is None) == (expected.scores is None) == bool(result.tokens)
            if result.scores and expected.scores:
                self._assert_alike(name, result.scores, expected.scores)

    def _assert_alike(self, name: str, found: LabelScores, expected: LabelScores) -> None:
        place, _, way = name.rpartition(" ")
        if way == "drafted":
            true = self.alone[f"{place} exact"].scores
            assert true
            shares = dict(zip(found.labels, found.probabilities, strict=True))
            assert shares.keys() <= {*true.labels}
            for label, share in zip(true.labels, true.probabilities, strict=True):
                assert abs(shares.get(label, 0.0) - share) <= found.unseen + 1e-6
        elif self.kind == "float64":
            own, numbers = (dict(zip(s.labels, s.logprobs, strict=True)) for s in (found, expected))
            assert own == pytest.approx(numbers, rel=0, abs=CLOSE)
            assert found.unseen == pytest.approx(expected.unseen, rel=0, abs=CLOSE)
        else:
            assert found == expected


@pytest.fixture(scope="module")
def asked_of(case_of: Callable[..., Case]) -> Callable[..., Asked]:
    """Returns the requests to a kind of model, by default with a sliding window; made once."""

    @cache
    def of(kind: str, architecture: str = "mistral") -> Asked:
        case = case_of(architecture)
        none = Asked(case, kind, [], {}, index_of(case.tokenizer, []))
        engine = none.engine(ALONE)
        requests = [*generations(case), *classifications(case, engine)]
        plain = (structs.replace(request, draft=False) for request in requests)
        alone = {result.id: result for result in engine.generate(plain)}
        if kind == "float64":
            answers = [list(alone[request.id].tokens) for request in case.requests()]
            assert answers == case.answers  # those of transformers
        ends = case.tokenizer.eos_ids
        generated = [[t for t in r.tokens if t not in ends] for r in alone.values()]
        outputs = [tokens for i, tokens in enumerate(generated) if tokens and i % 3]
        index = index_of(case.tokenizer, outputs)
        return replace(none, requests=requests, alone=alone, index=index)

    return of


@pytest.fixture(params=KINDS)
def asked(request: pytest.FixtureRequest, asked_of: Callable[..., Asked]) -> Asked:
    return asked_of(request.param)


def total(records: Iterable[StepRecord], name: str) -> int:
    return sum(int(np.sum(getattr(record, name))) for record in records)


def shared_steps(records: Iterable[StepRecord]) -> int:
    """Returns the number of steps that emitted tokens beside nodes of label trees.

    Steps with guided answers do not count, since these carry forced tokens, too.
    """
    return sum(
        {name.partition(" ")[0] == "scored" for name in record.emitted} == {True, False}
        and not any(name.startswith("guided") for name in record.emitted)
        and record.carried_tokens > 0
        for record in records
    )


@pytest.mark.parametrize("prefix_cache_bytes", [1 << 20, 0])
def test_results_in_a_mixed_batch_are_those_of_each_request_alone(
    asked: Asked, prefix_cache_bytes: int
) -> None:
    steps = list[StepRecord]()
    config = replace(CONFIG, prefix_cache_bytes=prefix_cache_bytes)
    engine = asked.engine(config, on_step=steps.append)
    found = list(engine.generate(asked.mixed(0)))
    engine.check_integrity()
    accepted, drafted = (total(steps, name) for name in ("accepted", "drafted"))
    assert min(accepted, drafted - accepted) > 50
    assert shared_steps(steps) > 20
    assert (total(steps, "shared_tokens") > 0) == (prefix_cache_bytes > 0)
    assert len(found) == len(asked.requests)
    asked.assert_alike(found)


def test_results_without_the_other_kind_of_request_are_the_same(asked: Asked) -> None:
    for scoring in (False, True):
        steps = list[StepRecord]()
        engine = asked.engine(on_step=steps.append)
        asked.assert_alike(engine.generate(asked.only(scoring=scoring)))
        assert (total(steps, "accepted") == 0) == scoring
        assert shared_steps(steps) == 0


def test_labels_have_trees_where_no_draft_pays(asked_of, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DraftBudget, "min_probs", lambda *_: np.zeros(0, np.float32))
    asked, steps = asked_of("int8"), list[StepRecord]()
    asked.assert_alike(asked.engine(on_step=steps.append).generate(asked.mixed(2)))
    assert total(steps, "drafted") == 0
    assert shared_steps(steps) > 20


def test_wrong_results_are_noticed(asked_of, monkeypatch: pytest.MonkeyPatch) -> None:
    """Positive control of the tests above."""
    asked, honest = asked_of("int8"), verify.continuation_logprobs

    def nearly(*args: Any) -> Any:
        found = honest(*args)
        found[-1] -= 1e-12  # one label of the last row
        return found

    monkeypatch.setattr(verify, "continuation_logprobs", nearly)
    with pytest.raises(AssertionError):
        asked.assert_alike(asked.engine().generate(asked.only(scoring=True)))
    lying(monkeypatch, asked.case.tokenizer.vocab_size)
    with pytest.raises(AssertionError):
        asked.assert_alike(asked.engine().generate(asked.only(scoring=False)))


@pytest.mark.parametrize("overlaps", [False, True])
def test_arrivals_and_cancellations_amid_scoring_change_no_result(
    asked: Asked, overlaps: bool, everything: bool, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ``overlaps``, the engine works ahead as it does while a GPU runs the forward."""
    monkeypatch.setattr(Engine, "overlaps", overlaps)
    target = load_target(asked.case.folder, ALONE, **KINDS[asked.kind])
    config = replace(CONFIG, kv_cache_bytes=(SLOTS + 1) * target.cache.copied(0, 1).nbytes)
    engine, rng, held = asked.engine(config, costs=COSTS), random.Random(seed), list[str]()
    ended = cancelled = 0
    for n in range(5_000 if everything else 700):
        chance = rng.random()
        if chance < 0.3:
            request = rng.choice(asked.requests)
            try:
                engine.submit(structs.replace(request, id=f"{n}/{request.id}"))
            except QueueFull:
                continue
            held.append(f"{n}/{request.id}")
        elif chance < 0.32:
            engine.draft_by(make_proposer(asked.case.tokenizer, PAPER, CONFIG, index=asked.index))
        elif chance < 0.38 and held:
            name = rng.choice(held)
            sequence = engine.scheduler.find(name)
            scorer = sequence.scorer if sequence else None
            if engine.cancel(name):
                held.remove(name)
                cancelled += scorer is not None and scorer.steps > 0
        else:
            rng.choice((engine.launch, engine.collect, engine.collect))()
            results = [output.result for output in engine.outputs() if output.result]
            asked.assert_alike(results)
            for result in results:
                held.remove(result.id)
            ended += sum(result.scores is not None for result in results)
        engine.check_integrity()
    assert min(ended, cancelled) > 3
    engine.cancel_all()
    engine.check_integrity()
    assert not engine.running + engine.waiting
    assert engine.kv_usage == 0


@pytest.mark.parametrize("drafter", ["noisy", "eagle"])
def test_drafts_by_a_model_beside_classification_change_no_result(
    case_of, asked_of, drafter: str
) -> None:
    """The drafter ``eagle`` reads the target's hidden states of each row."""
    case, asked = case_of("qwen2"), asked_of("float64", "qwen2")
    proposer = neural(case, drafter, rows=CONFIG.rows)
    engine, totals = make_engine_of_case(case, CONFIG, wrap=by(proposer))
    asked.assert_alike(engine.generate(asked.mixed(1)))
    engine.check_integrity()
    accepted, drafted = int(totals.accepted.sum()), int(totals.drafted.sum())
    assert min(accepted, drafted - accepted) > 50
