"""Random requests over all options of a request, and the ways in which they are answered.

Drafts of sampled answers come from an index of the same answers, so drafts are often right.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from lossless_cases import Case, make_engine

from support import index_of, replace, ruled
from tasc_draft import DraftSettings
from tasc_engine import (
    Engine,
    EngineConfig,
    EngineTotals,
    GenerationResult,
    GuideSpec,
    Request,
    Sampling,
)

SETTINGS = DraftSettings(min_prob=0.0)
LENGTH = 160
_STOPS = ("e", " a", "th", "on", "}", "0")
GUIDES = (
    GuideSpec("choice", ("alarm", "alarm set", "weather", "play music", "play the beatles")),
    GuideSpec("choice", tuple(f"label {i}" for i in range(40))),
    GuideSpec("regex", text="[a-f]{2,6}(, [0-9]{1,4})*"),
    GuideSpec(
        "json_schema",
        text='{"type":"object","properties":{"name":{"enum":["alarm_set","play_music"]},'
        '"n":{"type":"integer","minimum":0,"maximum":99}},"required":["name","n"],'
        '"additionalProperties":false}',
    ),
    GuideSpec("grammar", text='start: "a" ("b" | "c")+ "."'),
    GuideSpec(
        "json_schema",
        text='{"type":"array","items":{"enum":["alarm","alarm set","a"]},"uniqueItems":true,'
        '"minItems":2}',
    ),
)


def random_requests(case: Case, n: int, seed: int = 0) -> list[Request]:
    """Returns random requests; about every third is guided and every fourth greedy."""
    rng = random.Random(seed)
    return [_request(case, rng, str(i)) for i in range(n)]


def _request(case: Case, rng: random.Random, name: str) -> Request:
    guide = rng.choice(GUIDES) if rng.random() < 0.35 else None
    return Request(
        name,
        rng.choice(case.prompts),
        rng.choice([1, 2, 7, 16, 30]) if guide is None else 64,
        stop=tuple(rng.sample(_STOPS, rng.choice([0, 0, 0, 1, 2]))),
        **ruled(_sampling(case, rng)),
        guide=guide,
        logprobs=rng.choice([None, None, None, 0, 3]),
        ignore_eos=guide is None and rng.random() < 0.3,
    )


def _sampling(case: Case, rng: random.Random) -> Sampling:
    size = case.tokenizer.vocab_size
    biased = rng.sample(range(size), rng.choice([0, 0, 0, 1, 5]))
    return Sampling(
        temperature=rng.choice([0.0, 0.3, 0.7, 1.0, 5.0]),
        top_p=rng.choice([1.0, 1.0, 0.9, 0.5]),
        top_k=rng.choice([0, 0, 1, 5, 50, 1000]),
        min_p=rng.choice([0.0, 0.0, 0.05, 0.5]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.0, 1.3, 0.8]),
        presence_penalty=rng.choice([0.0, 0.0, 0.0, 1.5, -1.0]),
        frequency_penalty=rng.choice([0.0, 0.0, 0.0, 0.7, -0.4]),
        logit_bias=tuple((i, rng.choice([-100.0, -3.0, 5.0, 100.0])) for i in biased),
        seed=rng.randrange(2**64),
        choice=rng.randrange(4),
    )


@dataclass(frozen=True)
class Way:
    """A way to answer requests: how many together, with or without drafts."""

    rows: int
    draft: bool

    def __str__(self) -> str:
        return f"{'drafted' if self.draft else 'plain'}, {self.rows} together"


WAYS = (Way(1, False), Way(8, False), Way(1, True), Way(8, True))


@dataclass(frozen=True)
class Ways:
    """Answers by way, in the requests' order, and the totals of drafting."""

    answers: dict[Way, list[GenerationResult]]
    totals: dict[Way, EngineTotals]

    def equal(self) -> list[bool]:
        """Returns for each request whether all ways give the same tokens, text and end."""
        outcomes = [
            [(r.tokens, r.text, r.finish_reason, r.error) for r in answers]
            for answers in self.answers.values()
        ]
        return [len(set(each)) == 1 for each in zip(*outcomes, strict=True)]


def answer_all_ways(case: Case, requests: Sequence[Request]) -> Ways:
    """Answers first without drafts; drafts then come from an index of two thirds of the answers."""
    found, totals = {}, {}
    outputs: list[list[int]] = []
    for way in WAYS:
        engine, totals[way] = engine_of(case, way, outputs)
        results = {r.id: r for r in engine.generate(replace(r, draft=way.draft) for r in requests)}
        engine.check_integrity()
        found[way] = [results[r.id] for r in requests]
        ends = case.tokenizer.eos_ids
        plain = [[t for t in r.tokens if t not in ends] for r in found[WAYS[0]]]
        outputs = [tokens for i, tokens in enumerate(plain) if tokens and i % 3]
    return Ways(found, totals)


def engine_of(case: Case, way: Way, outputs: list[list[int]]) -> tuple[Engine, EngineTotals]:
    """Makes an engine that drafts from ``outputs``, if any, and the totals of its work."""
    # A forced stretch may be longer than a chunk.
    chunk = 2 if way.draft else 16
    config = EngineConfig(rows=way.rows, max_model_len=LENGTH, prefill_chunk=chunk)
    index = index_of(case.tokenizer, outputs or case.corpus)
    return make_engine(case, config, SETTINGS, index=index)
