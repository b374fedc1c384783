"""Decodes some answers again without drafts, in idle rows, and compares token ids.

Only greedy answers from unchanged logits are compared. If tokens are sampled or logits are changed,
near ties between two tokens cannot be detected.
"""

import dataclasses
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from msgspec import structs

from tasc_engine import (
    GenerationResult,
    Output,
    StepRecord,
    TokenLogprob,
)
from tasc_engine.batch_engine import BatchEngine
from tasc_engine.guided import Guidance
from tasc_protocol import Request
from tasc_protocol.request import MOST_LOGPROBS
from tasc_runtime.errors import ServiceError
from tasc_runtime.protocol import Refusal
from tasc_serve.metrics.replica_metrics import Mismatch, NotChecked, ReplicaMetrics
from tasc_serve.settings import ShadowSettings

log = logging.getLogger(__name__)
SubmitIdle: TypeAlias = Callable[
    [Request, Callable[[Output | Refusal | Exception], None], Guidance | None, float], None
]

# Maximum difference of log-probabilities at which another batch shape may swap two tokens: a few
# rounding errors of a logit between 10 and 100.
MARGINS = {"float64": 1e-9, "float32": 1e-3, "float16": 0.05, "bfloat16": 0.25}
_PREFIX = "shadow:"


@dataclass(frozen=True)
class Difference:
    """The position at which two answers diverge.

    Attributes:
        place: Position of the first token that differs, from 0.
        gap: Difference of the log-probabilities (natural) of the shadow's and the answer's token
            at this position; infinite if the answer's token is not among the likeliest, or if one
            of the two has ended.
    """

    place: int
    gap: float
    kind: Mismatch


def difference(
    answer: tuple[int, ...], shadow: tuple[TokenLogprob, ...], margin: float
) -> Difference | None:
    """The first difference between an answer and the shadow's tokens; None if they are equal."""
    for place, (token, shadow_token) in enumerate(zip(answer, shadow, strict=False)):
        if token != shadow_token.token:
            gap = abs(shadow_token.logprob - dict(shadow_token.top).get(token, float("-inf")))
            return Difference(place, gap, "near_tie" if gap < margin else "real")
    if len(answer) == len(shadow):
        return None
    return Difference(min(len(answer), len(shadow)), float("inf"), "real")


@dataclass(frozen=True)
class _Candidate:
    request: Request
    result: GenerationResult
    until: float

    @property
    def shadow(self) -> Request:
        """The request of the check: decodes the answer again from its prompt, without drafts."""
        return structs.replace(
            self.request,
            id=_PREFIX + self.request.id,
            draft=False,
            stream=False,
            logprobs=MOST_LOGPROBS,
            echo=False,
            committed_ids=(),
        )


def without_checks(record: StepRecord) -> StepRecord | None:
    """Returns a step's record without the tokens of checks; None if the step had checks only.

    The prompt tokens of checks stay counted. Checks have no drafts. They have no forced tokens
    either, since they request log-probabilities.
    """
    checks = [id_ for id_ in record.requests if id_.startswith(_PREFIX)]
    if not checks:
        return record
    if len(checks) == len(record.requests):
        return None
    emitted = [record.emitted[id_] for id_ in checks if id_ in record.emitted]
    return dataclasses.replace(
        record,
        row_steps=record.row_steps - len(emitted),
        bonus_tokens=record.bonus_tokens - sum(emitted),
    )


class ShadowCheck:
    """Checks a share of one engine's drafted answers.

    A check is an idle request of the step loop, so it never delays a user's request. All methods
    are called on one thread, which receives the loop's outputs.

    Args:
        submit_idle: See `EngineLoop.submit_idle`.
        dtype: Data type of the target, which defines the size of a near tie.

    Attributes:
        pending: Number of answers that wait for their check, or are being decoded again.
    """

    def __init__(
        self,
        engine: BatchEngine,
        submit_idle: SubmitIdle,
        settings: ShadowSettings,
        dtype: str,
        metrics: ReplicaMetrics,
    ) -> None:
        self._guides, self._submit_idle = engine.guides, submit_idle
        self._settings, self._metrics = settings, metrics
        self._margin = MARGINS[dtype]
        self._due, self._real, self.pending = 0.0, 0, 0
        if settings.sample_rate:
            engine.compile_rules()  # checks need log-probabilities

    def finished(self, asked: Request, request: Request, result: GenerationResult) -> None:
        """Notes the end of a user's answer; selects every n-th comparable one."""
        drafted = request.draft and any(result.acceptance.drafted)
        if not (drafted and request.sampling.plain) or result.finish_reason == "error":
            return
        self._due += self._settings.sample_rate
        if self._due < 1:
            return
        self._due -= 1
        if self.pending >= self._settings.max_waiting:
            self._metrics.not_checked["full"].inc()
            return
        self.pending += 1
        candidate = _Candidate(request, result, time.monotonic() + self._settings.max_age_s)
        with self._dropped_on_error():
            self._begin(candidate)

    def _begin(self, candidate: _Candidate) -> None:
        shadow, guide = candidate.shadow, None
        if shadow.guide:
            if not self._guides.known(shadow.guide):  # compiling it again would delay users
                self._drop("failed")
                return
            guide = self._guides.of(shadow.guide)
        self._submit_idle(shadow, partial(self._on_item, candidate), guide, candidate.until)

    @contextmanager
    def _dropped_on_error(self) -> Iterator[None]:
        """Drops the check if the block raises, so that users' answers continue."""
        try:
            yield
        except Exception:
            log.exception("an answer could not be checked")
            self._drop("failed")

    def _on_item(self, candidate: _Candidate, item: Output | Refusal | Exception) -> None:
        """Compares the whole answer, or begins the check again if a user's request took its row."""
        with self._dropped_on_error():
            match item:
                case Refusal(kind="full"):
                    self._begin(candidate)
                case Refusal(kind="late"):
                    self._drop("old")
                case Output(result=GenerationResult(error=None) as result):
                    self._compare(candidate, result)
                    self.pending -= 1
                case Output():
                    self._drop("failed")
                case _:
                    raise ServiceError(str(item))

    def _drop(self, reason: NotChecked) -> None:
        self.pending -= 1
        self._metrics.not_checked[reason].inc()

    def _compare(self, candidate: _Candidate, shadow: GenerationResult) -> None:
        found = difference(candidate.result.tokens, shadow.logprobs, self._margin)
        self._metrics.observe_check(found.kind if found else None)
        if found and found.kind == "real":
            self._log(candidate, shadow, found)

    def _log(self, candidate: _Candidate, shadow: GenerationResult, found: Difference) -> None:
        """Logs a mismatch without any text of a user."""
        self._real += 1
        if self._real & (self._real - 1):
            return  # logs only the 1st, 2nd, 4th, 8th ...
        request, result = candidate.request, candidate.result
        facts = {
            "token": found.place,
            "tokens": len(result.tokens),
            "tokens without drafts": len(shadow.tokens),
            "log-probabilities apart": f"{found.gap:.3g}",
            "prompt tokens": result.prompt_tokens,
            "guide": request.guide.kind if request.guide else None,
            "adapter": request.adapter,
            "tokens of another replica": result.committed,
            "index version": result.index_version,
        }
        log.error(
            "an answer differs from the same answer without drafts (%d such answers so far): %s",
            self._real,
            facts,
        )
