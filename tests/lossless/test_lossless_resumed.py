"""Tests that an answer which another engine continues equals the answer of one engine alone."""

import random
from collections import defaultdict
from dataclasses import dataclass, field

import pytest
from lossless_cases import Case
from request_grid import Way, engine_of, random_requests

from support import replace
from tasc_engine import Engine, GenerationResult, Request, TokenLogprob


@dataclass
class Told:
    """The state of a streaming client after each delta."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    after: list[tuple[int, str]] = field(default_factory=list)
    result: GenerationResult | None = None


def follow(engine: Engine, requests: list[Request]) -> dict[str, Told]:
    told: defaultdict[str, Told] = defaultdict(Told)
    waiting = list(requests)
    while waiting or engine.running or engine.waiting:
        while waiting and engine.waiting < engine.config.rows:
            engine.submit(waiting.pop())
        for delta in engine.step():
            one = told[delta.id]
            one.tokens += delta.tokens
            one.text += delta.text
            one.logprobs += delta.logprobs
            one.after.append((len(one.tokens), one.text))
            one.result = delta.result
    engine.check_integrity()
    return told


@pytest.fixture(scope="module")
def requests(case: Case, everything: bool, seed: int) -> list[Request]:
    count = 120 if everything else 60
    return [replace(r, stream=True) for r in random_requests(case, count, seed)]


@pytest.fixture(scope="module")
def whole(case: Case, requests: list[Request]) -> dict[str, Told]:
    return follow(engine_of(case, Way(8, True), [])[0], requests)


def test_what_is_streamed_adds_up_to_the_whole(whole: dict[str, Told]) -> None:
    assert sum(len(one.after) > 2 for one in whole.values()) > 20
    for one in whole.values():
        assert one.result is not None
        assert (one.text, tuple(one.tokens)) == (one.result.text, one.result.tokens)
        assert tuple(one.logprobs) == one.result.logprobs


def test_what_is_left_of_an_answer_is_the_same_behind_every_beginning(
    case: Case, requests: list[Request], whole: dict[str, Told], everything: bool
) -> None:
    rng, cuts, begun = random.Random(1), {}, []
    for request in requests:
        told = whole[request.id]
        if len(told.after) > 1:
            cut, _ = cuts[request.id] = rng.choice(told.after[:-1])
            begun.append(replace(request, committed_ids=tuple(told.tokens[:cut])))
    assert len(begun) > (50 if everything else 0)
    assert {kind for r in begun for kind in _kinds(r)} == {"guide", "stop", "sampled", "penalised"}
    outputs = [list(t.tokens) for t in whole.values()]
    for way in (Way(8, True), Way(1, False)):
        engine, _ = engine_of(case, way, outputs)
        rest = follow(engine, [replace(r, draft=way.draft) for r in begun])
        for request in begun:
            one, other, (cut, sent) = rest[request.id], whole[request.id], cuts[request.id]
            assert one.tokens == other.tokens[cut:]
            assert sent + one.text == other.text
            assert [p.token for p in one.logprobs] == [p.token for p in other.logprobs[cut:]]
            assert one.result is not None
            assert one.result.committed == cut
            assert _end(one) == _end(other)


def _end(told: Told) -> tuple[tuple[int, ...], str, str]:
    assert told.result is not None
    return told.result.tokens, told.result.text, told.result.finish_reason


def _kinds(request: Request) -> set[str]:
    found = {
        "guide": request.guide is not None,
        "stop": bool(request.stop),
        "sampled": request.sampling.temperature > 0,
        "penalised": request.sampling.penalises,
    }
    return {name for name, holds in found.items() if holds}
