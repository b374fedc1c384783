"""A few rows of a job, decoded with drafts and without, and timed: what the whole job will take.

It saves nothing.
"""

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass

from tasc_engine import GenerationRequest, GenerationResult
from tasc_jobs.batch.work import Row, Strategy, named
from tasc_runtime.engine.builder import EngineBuilder


@dataclass(frozen=True)
class PreviewSide:
    """The rows, decoded one way.

    Attributes:
        tokens: Of all answers, end-of-sequence included.
        steps: Decoding steps of all rows together.
    """

    seconds: float
    tokens: int
    steps: int

    @property
    def block_efficiency(self) -> float:
        return self.tokens / self.steps if self.steps else 0.0


@dataclass(frozen=True)
class Preview:
    """What a few rows told.

    Attributes:
        rows: That were answered.
        refused: Rows that cannot be answered.
        identical: Rows whose answers are the same with drafts and without.
    """

    rows: int
    refused: int
    identical: int
    plain: PreviewSide
    drafted: PreviewSide

    @property
    def speed_up(self) -> float:
        return self.plain.seconds / self.drafted.seconds if self.drafted.seconds else 0.0

    def seconds_of(self, total: int, engines: int, draft: bool) -> float | None:
        """Of a job of so many rows on so many engines that do not share a processor."""
        side = self.drafted if draft else self.plain
        return total * side.seconds / self.rows / engines if self.rows else None


def measure(worker: EngineBuilder, strategy: Strategy, rows: Sequence[Row]) -> Preview:
    """Answer the rows both ways with a worker's engine."""
    requests: list[GenerationRequest] = []
    refused = 0
    for row in rows:
        try:
            calls = named(row, strategy.calls(row, worker))
            requests += [worker.request(call) for call in calls]
        except ValueError:
            refused += 1
    _timed(worker, requests[:1], draft=False)  # what is compiled is compiled now
    # With drafts first: answers of before would be drafted from.
    drafted, said = _timed(worker, requests, draft=True)
    plain, alone = _timed(worker, requests, draft=False)
    identical = sum(alone[i].tokens == result.tokens for i, result in said.items())
    return Preview(len(rows) - refused, refused, identical, plain, drafted)


def _timed(
    worker: EngineBuilder, requests: Sequence[GenerationRequest], draft: bool
) -> tuple[PreviewSide, dict[str, GenerationResult]]:
    began = time.perf_counter()
    asked = (dataclasses.replace(request, draft=draft) for request in requests)
    found = {result.id: result for result in worker.engine.generate(asked)}
    seconds = time.perf_counter() - began
    tokens = sum(len(r.tokens) for r in found.values())
    return PreviewSide(seconds, tokens, sum(r.acceptance.steps for r in found.values())), found
