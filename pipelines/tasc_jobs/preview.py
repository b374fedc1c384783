"""Answers a few requests with and without drafts, in turn, on one engine."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from msgspec import structs

from tasc_protocol import Request

if TYPE_CHECKING:  # a job's own process needs no torch
    from tasc_engine.batch_engine import BatchEngine

_MIN_REQUESTS = 32  # minimum number of requests in a part
_WARM_UP_TOKENS = 2  # tokens of the warm-up answer, so that drafting can occur
_TIMES = 4  # requests of a part per row of the engine, so that most steps have full batches


@dataclass(frozen=True)
class PreviewSide:
    """Figures of the requests with drafts, or of the requests without drafts.

    Attributes:
        tokens: Number of tokens of all answers, end-of-sequence included.
        steps: Number of forward passes, summed over the rows.
    """

    seconds: float
    tokens: int
    steps: int


@dataclass(frozen=True)
class Preview:
    """A few requests, answered with drafts and without.

    Attributes:
        rows: Number of answered rows.
        refused: Number of rows that cannot be answered.
        identical: Number of rows with the same answers with and without drafts.
        first_error: Reason why the first refused row cannot be answered.
    """

    rows: int
    refused: int
    identical: int
    plain: PreviewSide
    drafted: PreviewSide
    first_error: str | None = None

    @property
    def speed_up(self) -> float:
        return self.plain.seconds / self.drafted.seconds if self.drafted.seconds else 0.0

    def forwards(self, draft: bool) -> float:
        """Mean number of forward passes of an answer."""
        return (self.drafted if draft else self.plain).steps / self.rows if self.rows else 0.0


def preview(engine: "BatchEngine", requests: Sequence[Request], refused: int = 0) -> Preview:
    """Answer requests with and without drafts, in parts, and measure the time of both.

    Each part fills the engine's batch, and is answered with drafts first. As in a service, the
    engine's proposer does not learn from answers without drafts.

    Args:
        refused: Number of rows without a request, because they cannot be answered.
    """
    for draft in (False, True):  # warm-up: compiles and loads everything that a first request needs
        _timed(engine, [_beginning(request) for request in requests[:1]], draft)
    count = max(len(requests) // max(_MIN_REQUESTS, _TIMES * engine.config.rows), 1)
    bounds = [len(requests) * i // count for i in range(count + 1)]
    parts = [requests[begin:end] for begin, end in pairwise(bounds)]
    sides = {True: np.zeros(3), False: np.zeros(3)}
    identical = 0
    for part in parts:
        found = {}
        for draft in (True, False):
            side, found[draft] = _timed(engine, part, draft)
            sides[draft] += side
        identical += sum(found[True][i] == tokens for i, tokens in found[False].items())
    plain, drafted = (PreviewSide(s, int(t), int(n)) for s, t, n in (sides[False], sides[True]))
    return Preview(len(requests), refused, identical, plain, drafted)


def _beginning(request: Request) -> Request:
    """Returns a request for the first tokens only.

    A whole answer would be a source of drafts for the measured requests.
    """
    most = min(request.answer_limit, _WARM_UP_TOKENS)
    return structs.replace(request, id="0", max_tokens=most)


def _timed(
    engine: "BatchEngine", requests: Sequence[Request], draft: bool
) -> tuple[tuple[float, int, int], dict[str, tuple[int, ...]]]:
    """Returns seconds, tokens and steps of the requests, and the tokens of each answer."""
    began = time.perf_counter()
    found = list(engine.generate(structs.replace(r, draft=draft) for r in requests))
    seconds = time.perf_counter() - began
    tokens = sum(len(result.tokens) for result in found)
    steps = sum(result.acceptance.steps for result in found)
    return (seconds, tokens, steps), {result.id: result.tokens for result in found}
