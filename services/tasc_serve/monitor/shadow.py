"""Decodes some answers again without drafts, in idle rows, and compares token ids.

Only greedy answers by the target's own logits are compared: if tokens are drawn or logits are
changed, near ties between two tokens cannot be detected.
"""

import dataclasses
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from msgspec import structs

from tasc_engine import (
    Engine,
    GenerationResult,
    Output,
    StepRecord,
    TokenLogprob,
)
from tasc_protocol import Request
from tasc_protocol.request import MOST_LOGPROBS
from tasc_serve.metrics.replica_metrics import Mismatch, ReplicaMetrics
from tasc_serve.settings import ShadowSettings

log = logging.getLogger(__name__)

# Maximum difference of natural logarithms at which the batch's shape may swap two tokens: some
# rounding errors of logits of a few tens.
MARGINS = {"float64": 1e-9, "float32": 1e-3, "float16": 0.05, "bfloat16": 0.25}
_PREFIX = "shadow:"


@dataclass(frozen=True)
class Difference:
    """The position at which two answers diverge.

    Attributes:
        place: Position of the first token that differs, from 0.
        gap: Difference of the log-probabilities (natural) of the shadow's and the answer's token
            there; infinite if the answer's token is not among the likeliest.
    """

    place: int
    gap: float
    kind: Mismatch


def difference(
    answer: tuple[int, ...], shadow: tuple[TokenLogprob, ...], margin: float
) -> Difference | None:
    """The first difference between an answer and its shadow's tokens; None if they are equal."""
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
        """The same request from its prompt on, as a shadow."""
        return structs.replace(
            self.request,
            id=_PREFIX + self.request.id,
            draft=False,
            stream=False,
            logprobs=MOST_LOGPROBS,
            echo=False,
            committed_ids=(),
        )


class ShadowCheck:
    """Checks a share of one engine's drafted answers.

    `finished` may be called on any thread; all other methods on the engine's.

    Args:
        dtype: Data type of the target, which defines the size of a near tie.
        observe: Called with each step's record without the work of shadows, and not for steps of
            shadows only. Prompt tokens of shadows remain in it.
    """

    def __init__(
        self,
        engine: Engine,
        settings: ShadowSettings,
        dtype: str,
        metrics: ReplicaMetrics,
        observe: Callable[[StepRecord], None] = lambda record: None,
    ) -> None:
        self._engine, self._settings, self._metrics = engine, settings, metrics
        self._margin, self._observe = MARGINS[dtype], observe
        self._due, self._real = 0.0, 0
        self._chosen: deque[_Candidate] = deque()
        self._running: dict[str, _Candidate] = {}
        self._record: StepRecord | None = None
        self._warming = self._crowded = False

    @property
    def running(self) -> int:
        """Number of this check's requests in the engine."""
        return len(self._running)

    def finished(self, asked: Request, request: Request, result: GenerationResult) -> None:
        """Notes the end of a user's answer; selects every n-th that can be compared."""
        drafted = request.draft and any(result.acceptance.drafted)
        if not (drafted and request.sampling.plain) or result.finish_reason == "error":
            return
        self._due += self._settings.sample_rate
        if self._due < 1:
            return
        self._due -= 1
        if len(self._chosen) >= self._settings.max_waiting:
            self._metrics.not_checked["full"].inc()
            return
        until = time.monotonic() + self._settings.max_age_s
        self._chosen.append(_Candidate(request, result, until))

    def make_way(self) -> None:
        """Frees a row before a user's request is submitted, so that shadows do not delay it.

        If the cache is smaller than all rows need, its slots become free one step later.
        """
        engine = self._engine
        if self._running and engine.running + engine.waiting >= engine.config.rows:
            self._give_back(next(reversed(self._running)))

    def fill(self) -> None:
        """Before a step: frees rows if requests wait, or takes a free one."""
        engine = self._engine
        if self._crowded:
            for shadow_id in tuple(self._running):
                self._give_back(shadow_id)
        elif self._chosen and engine.running + engine.waiting < engine.config.rows:
            try:
                self._start()
            except Exception:
                self._failed()

    def hold(self, record: StepRecord) -> None:
        """Stores a step's record, which `own` passes on."""
        self._record = record

    def own(self, outputs: list[Output]) -> list[Output]:
        """After a step: keeps the outputs of shadows, and returns those of users."""
        self._crowded = self._engine.waiting > 0
        if not self._running:
            self._pass_on([])
            return outputs
        mine = [output for output in outputs if output.id in self._running]
        self._pass_on(mine)
        others = [output for output in outputs if output.id not in self._running]
        for output in mine:
            if output.result:
                try:
                    self._compare(self._running.pop(output.id), output.result)
                except Exception:
                    self._failed()
        return others

    def _pass_on(self, mine: list[Output]) -> None:
        record, self._record = self._record, None
        if record is None or (self._running and self._running.keys() >= set(record.requests)):
            return
        # Shadows have no drafts, and no tokens are forced if logprobs are requested.
        tokens = sum(len(output.tokens) for output in mine)
        self._observe(
            dataclasses.replace(
                record,
                row_steps=record.row_steps - len(mine),
                bonus_tokens=record.bonus_tokens - tokens,
            )
            if mine
            else record
        )

    def _start(self) -> None:
        while self._chosen:
            candidate = self._chosen[0]
            if time.monotonic() > candidate.until:
                self._chosen.popleft()
                self._metrics.not_checked["old"].inc()
                continue
            if self._engine.waits_to_compile(candidate.shadow):
                self._warm_up()
                return
            self._chosen.popleft()
            self._submit(candidate)
            return

    def _submit(self, candidate: _Candidate) -> None:
        shadow = candidate.shadow
        if shadow.guide and not self._engine.guides.known(shadow.guide):
            # Compiling it again would delay users.
            self._metrics.not_checked["failed"].inc()
            return
        self._engine.submit(shadow)
        self._running[shadow.id] = candidate

    def _failed(self) -> None:
        """Logs an error of the check, so that users' answers continue."""
        self._metrics.not_checked["failed"].inc()
        log.exception("an answer could not be checked")

    def _give_back(self, shadow_id: str) -> None:
        """Frees a shadow's row; its candidate is tried again from the beginning."""
        self._engine.cancel(shadow_id)
        self._chosen.appendleft(self._running.pop(shadow_id))

    def _warm_up(self) -> None:
        """Compiles rules for log-probabilities on another thread, since it takes seconds."""
        if not self._warming:
            self._warming = True
            threading.Thread(
                target=self._engine.compile_rules, name="shadow-rules", daemon=True
            ).start()

    def _compare(self, candidate: _Candidate, shadow: GenerationResult) -> None:
        if shadow.finish_reason == "error":
            self._metrics.not_checked["failed"].inc()
            return
        found = difference(candidate.result.tokens, shadow.logprobs, self._margin)
        self._metrics.observe_check(found.kind if found else None)
        if found and found.kind == "real":
            self._tell(candidate, shadow, found)

    def _tell(self, candidate: _Candidate, shadow: GenerationResult, found: Difference) -> None:
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
        log.error("an answer differs without drafts (%d so far): %s", self._real, facts)
