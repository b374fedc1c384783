"""Turns a call into a request for the engine, or into a refusal with its reason.

New guides are compiled on separate threads, so that answers are still sent meanwhile, and calls
with a known guide, or none, do not wait. The rate at which requests end determines when a call that
finds the queue full should retry.
"""

import asyncio
import heapq
import math
import random
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from tasc_engine.errors import GuideError
from tasc_engine.guided import Guide
from tasc_protocol import FieldError, GuideSpec, Request
from tasc_runtime.engine.builder import EngineBuilder
from tasc_runtime.protocol import Refusal
from tasc_serve.settings import LimitSettings

_KEPT = 64  # number of endings that the rate is measured over
_LONGEST_S = 60  # older OpenAI clients ignore a longer Retry-After
_LATEST_S = 5  # the last part of it, for all calls that must wait longer
_UNKNOWN_S = 1.0  # assumed for an answer before any has ended
_SLACK = 4  # a quarter of the queue should be empty at the first retries


class DrainRate:
    """The rate at which places become free, and the retry times of refused calls.

    Args:
        rows: Number of calls that are answered at the same time.
    """

    def __init__(self, rows: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._rows, self._clock = rows, clock
        self._marks: deque[float] = deque(maxlen=_KEPT + 1)  # times of the start and the endings
        self._known = rows / _UNKNOWN_S
        self._expected: dict[str, float] = {}  # retry times of refused calls
        self._times: list[tuple[float, str]] = []  # a heap of these and of calls accepted since

    def began(self, call_id: str) -> None:
        """Notes an accepted call, whose retry is no longer expected."""
        self._expected.pop(call_id, None)
        if not self._marks:
            self._marks.append(self._clock())

    def ended(self) -> None:
        """Notes that a place has become free."""
        self._marks.append(self._clock())

    def idle(self) -> None:
        """Notes that all calls have ended, as idle time must not affect the rate."""
        if len(self._marks) > self._rows:  # with fewer endings, some rows were free
            self._known = self.per_second()
        self._marks.clear()

    def per_second(self) -> float:
        """Places that become free per second; before the first, the rate before `idle`.

        The rate falls while no call ends.
        """
        spent = self._clock() - self._marks[0] if self._marks else 0.0
        if len(self._marks) < 2:
            return min(self._known, self._rows / spent if spent > 0 else math.inf)
        return (len(self._marks) - 1) / spent if spent > 0 else math.inf

    def retry_after_s(self, call_id: str, waiting: int) -> float:
        """Seconds until a call that is refused now should retry, at most 60.

        Each call gets its own time, after those refused before it, at the rate at which places
        become free. A call that retries too early keeps its time. If the time would exceed 60 s,
        the call retries within the last 5 of them, since an earlier try would waste one of the
        client's retries.

        Args:
            waiting: Number of calls in the queue.
        """
        now = self._clock()
        while self._times and self._times[0][0] <= now:
            at, expected = heapq.heappop(self._times)
            if self._expected.get(expected) == at:
                del self._expected[expected]
        if call_id in self._expected:
            return self._expected[call_id] - now
        wait_s = (1 + waiting / _SLACK + len(self._expected)) / self.per_second()
        if wait_s > _LONGEST_S:
            return random.uniform(_LONGEST_S - _LATEST_S, _LONGEST_S)  # noqa: S311 (no secret)
        self._expected[call_id] = now + wait_s
        heapq.heappush(self._times, (now + wait_s, call_id))
        return wait_s


_COMPILERS = 2  # guides of choices and of grammars do not wait for each other


class Admission:
    """Reads the requests of one replica, on one event loop."""

    def __init__(self, builder: EngineBuilder, limits: LimitSettings) -> None:
        self._builder, self._limits = builder, limits
        self._threads = ThreadPoolExecutor(_COMPILERS, "guides")
        # The task's own guide does not wait for others, if it was dropped in favour of them.
        self._own = ThreadPoolExecutor(1, "own-guide")
        # One thread, since prompts are rendered one by one anyway.
        self._renders = ThreadPoolExecutor(1, "prompts")
        self._compiling: dict[GuideSpec, asyncio.Future[GuideError | None]] = {}
        self._rules = asyncio.Lock()

    async def request(self, asked: Request, id: str) -> tuple[Request, Guide | None] | Refusal:
        """Returns the request for the engine and its compiled guide; raises unexpected errors only.

        Args:
            id: Id of the request in the engine.
        """
        # One version from here on, as a newer one may arrive while a guide is compiled.
        version = asked.record_version or self._builder.record_version
        reader, engine = self._builder.reader, self._builder.engine
        read = partial(reader.read, asked, id, version)
        try:
            if reader.may_block(asked):
                request = await asyncio.get_running_loop().run_in_executor(self._renders, read)
            else:
                request = read()
            if asked.n * asked.prompts > 1:
                self._limits.require_total(request)
            if request.guide and (refusal := await self._known(request.guide)):
                return refusal
            guide = reader.guide(request.guide)
        except FieldError as error:
            return Refusal("invalid", str(error), error.field)
        except ValueError as error:
            return Refusal("invalid", f"{asked.prompt_field}: {error}", asked.prompt_field)
        if engine.waits_to_compile(request):
            async with self._rules:  # one thread at a time, as others would only wait
                if engine.waits_to_compile(request):
                    await asyncio.to_thread(engine.compile_rules)
        return request, guide

    async def _known(self, guide: GuideSpec) -> Refusal | None:
        """Waits until a guide is compiled, or returns the refusal."""
        if self._builder.engine.guides.known(guide):
            return None
        limit_s, most = self._limits.guide_timeout_s, self._limits.max_compiling_guides
        known = self._compiling.get(guide)
        if known is None:
            if not guide.is_tasks and len(self._compiling) >= most:
                message = f"{guide.name}: {most} other guides are being compiled; try again later"
                return Refusal("full", message, guide.field)
            known = self._compile(guide)
        try:
            async with asyncio.timeout(limit_s):
                failed = await asyncio.shield(known)
        except TimeoutError:  # compiling continues, for a retry
            message = f"{guide.name}: the guide was not ready within {limit_s:g} s"
            return Refusal("full", message, guide.field)
        if failed and not self._builder.engine.guides.known(guide):
            raise FieldError(guide.field, f"{guide.name}: {failed}")  # no retry here
        return None

    def _compile(self, guide: GuideSpec) -> asyncio.Future[GuideError | None]:
        """Compiles a guide once for all calls that wait for it."""
        guides = self._builder.engine.guides

        def compile_() -> GuideError | None:
            try:
                guides.of(guide)
            except GuideError as error:
                return error
            return None

        threads = self._own if guide.is_tasks else self._threads
        compiling = asyncio.wrap_future(threads.submit(compile_))
        self._compiling[guide] = compiling
        compiling.add_done_callback(lambda done: self._forget(guide))
        return compiling

    def _forget(self, spec: GuideSpec) -> None:
        del self._compiling[spec]

    def close(self) -> None:
        for threads in (self._threads, self._own, self._renders):
            threads.shutdown(wait=False, cancel_futures=True)
