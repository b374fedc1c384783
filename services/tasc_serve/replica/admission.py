"""From a call to a request that the engine takes, or to the reason why it does not.

New guides are compiled on threads of their own, so that answers go on being sent meanwhile, and
calls with a known guide, or none, do not wait. How fast requests end here tells when a call that
finds the queue full should come again.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from tasc_engine import GenerationRequest, GuideSpec
from tasc_engine.errors import GuideError
from tasc_runtime.engine.builder import EngineBuilder, Ready
from tasc_runtime.protocol import Call, Refusal
from tasc_runtime.sampling_options import AnswerGuide, FieldError
from tasc_serve.settings import LimitSettings

_KEPT = 64  # endings that the rate is measured over
_LONGEST_S = 60


class DrainRate:
    """The rate at which places become free, over the last endings."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ends: deque[float] = deque(maxlen=_KEPT)

    def ended(self) -> None:
        """A place has become free."""
        self._ends.append(self._clock())

    def idle(self) -> None:
        """There is nothing left to end: time until more comes says nothing about the rate."""
        self._ends.clear()

    def per_second(self) -> float:
        """0 while nothing is known; it falls while nothing ends."""
        if len(self._ends) < 2:
            return 0.0
        spent = self._clock() - self._ends[0]
        return (len(self._ends) - 1) / spent if spent > 0 else math.inf

    def retry_after_s(self, ahead: int) -> int:
        """Whole seconds until as many as ``ahead`` have ended: at least 1, at most 60.

        1 where nothing has ended yet: nothing speaks for waiting longer.
        """
        rate = self.per_second()
        if rate == 0:
            return 1
        return max(1, min(math.ceil(ahead / rate), _LONGEST_S))


_COMPILERS = 2  # guides by choices and by grammars need not wait for one another


class Admission:
    """Reads the calls of one replica, on one event loop."""

    def __init__(self, builder: EngineBuilder, limits: LimitSettings) -> None:
        self._builder, self._limits = builder, limits
        self._threads = ThreadPoolExecutor(_COMPILERS, "guides")
        # The task's own guide, should it have been forgotten over others, does not wait for them.
        self._own = ThreadPoolExecutor(1, "own-guide")
        # One: prompts are rendered one by one in any case.
        self._renders = ThreadPoolExecutor(1, "prompts")
        self._compiling: dict[GuideSpec, asyncio.Future[GuideError | None]] = {}
        self._rules = asyncio.Lock()

    async def request(self, call: Call, id: str) -> Ready | Refusal:
        """Read a call. Raises what nobody foresaw only.

        Args:
            id: The request's in the engine.
        """
        # One version from here on: a newer one may come while a guide is waited for.
        version = call.record_version or self._builder.record_version
        try:
            request, guide = await self._read(call, version, id)
            self._limits.require_total(call, request)
            if refusal := await self._known(guide):
                return refusal
            made = self._builder.guide(guide)
        except FieldError as error:
            return Refusal("invalid", str(error), error.field)
        except ValueError as error:
            return Refusal("invalid", f"{call.prompt_field}: {error}", call.prompt_field)
        await self._compile_rules(request)
        return Ready(request, version, made)

    async def _read(
        self, call: Call, version: int, id: str
    ) -> tuple[GenerationRequest, AnswerGuide | None]:
        if not self._builder.waits_to_render(call):
            return self._builder.read(call, version, id)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._renders, self._builder.read, call, version, id)

    async def _known(self, guide: AnswerGuide | None) -> Refusal | None:
        """Wait until a guide can be had at once, or say why not."""
        if guide is None or self._builder.engine.guides.known(guide.spec):
            return None
        limit_s, most = self._limits.guide_timeout_s, self._limits.max_compiling_guides
        known = self._compiling.get(guide.spec)
        if known is None:
            if not guide.is_tasks and len(self._compiling) >= most:
                message = f"{guide.name}: {most} other guides are being compiled; try again later"
                return Refusal("full", message, guide.field)
            known = self._compile(guide)
        try:
            async with asyncio.timeout(limit_s):
                failed = await asyncio.shield(known)
        except TimeoutError:  # it goes on, and is there for who comes again
            message = f"{guide.name}: the guide was not ready within {limit_s:g} s"
            return Refusal("full", message, guide.field)
        if failed and not self._builder.engine.guides.known(guide.spec):
            raise FieldError(guide.field, f"{guide.name}: {failed}")  # not to be tried again here
        return None

    def _compile(self, guide: AnswerGuide) -> asyncio.Future[GuideError | None]:
        """Once for all who wait for it."""
        guides = self._builder.engine.guides

        def compile_() -> GuideError | None:
            try:
                guides.of(guide.spec)
            except GuideError as error:
                return error
            return None

        threads = self._own if guide.is_tasks else self._threads
        compiling = asyncio.wrap_future(threads.submit(compile_))
        self._compiling[guide.spec] = compiling
        compiling.add_done_callback(lambda done: self._forget(guide.spec))
        return compiling

    def _forget(self, spec: GuideSpec) -> None:
        del self._compiling[spec]

    async def _compile_rules(self, request: GenerationRequest) -> None:
        if self._builder.engine.waits_to_compile(request):
            async with self._rules:  # one thread does it, the others would only wait
                if self._builder.engine.waits_to_compile(request):
                    await asyncio.to_thread(self._builder.engine.compile_rules)

    def close(self) -> None:
        for threads in (self._threads, self._own, self._renders):
            threads.shutdown(wait=False, cancel_futures=True)
