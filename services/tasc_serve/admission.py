"""From a call to a request that the engine will take, or to why not.

New guides are compiled on threads of their own: however long one takes, answers go on being sent,
and whoever brings a known guide, or none, does not wait for them. It decodes nothing.
"""

import asyncio
import dataclasses
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from tasc_engine import GenerationRequest, GuideSpec
from tasc_engine.errors import GuideError
from tasc_serve.asked import FieldError, Guide
from tasc_serve.calls import Call, Refusal
from tasc_serve.settings import LimitSettings
from tasc_serve.worker import Ready, Worker

_COMPILERS = 2  # guides by choices and by grammars need not wait for one another


@dataclass(frozen=True)
class Admission:
    """Reads the calls of one replica, on one event loop."""

    worker: Worker
    limits: LimitSettings
    _threads: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(_COMPILERS, "guides")
    )
    # The task's own guide, should it have been forgotten over others, does not queue behind them.
    _own: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "own-guide"))
    _compiling: dict[GuideSpec, asyncio.Future[GuideError | None]] = field(default_factory=dict)
    _rules: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def request(self, call: Call) -> Ready | Refusal:
        """Raises what nobody foresaw only."""
        # One version from here on: a newer one may come while a guide is waited for.
        version = call.record_version or self.worker.record_version
        call = dataclasses.replace(call, record_version=version)
        try:
            guide = call.asked.guided(self.worker.records.of(version)).guide
            request = self.worker.read(call)
            if over := self.limits.over_total(call.n, request.max_tokens):
                return Refusal("invalid", over, "n")
            if refusal := await self._known(guide):
                return refusal
            ready = Ready(request, version, self.worker.guide(call, request))
        except FieldError as error:
            return Refusal("invalid", str(error), error.field)
        except ValueError as error:
            return Refusal("invalid", str(error), call.prompt_field)
        await self._compile_rules(request)
        return ready

    async def _known(self, guide: Guide | None) -> Refusal | None:
        """Wait until a guide can be had at once, or say why not."""
        if guide is None or self.worker.engine.guides.known(guide.spec):
            return None
        limit_s, most = self.limits.guide_timeout_s, self.limits.max_guides_compiling
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
        if failed and not self.worker.engine.guides.known(guide.spec):
            raise FieldError(guide.field, f"{guide.name}: {failed}")  # not to be tried again here
        return None

    def _compile(self, guide: Guide) -> asyncio.Future[GuideError | None]:
        """Once for all who wait for it."""
        guides, longest = self.worker.engine.guides, self.worker.engine.longest

        def compile_() -> GuideError | None:
            try:
                guides.of(guide.spec, longest)
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
        if self.worker.engine.waits_to_compile(request):
            async with self._rules:  # one thread does it, the others would only wait
                if self.worker.engine.waits_to_compile(request):
                    await asyncio.to_thread(self.worker.engine.compile_rules)

    def close(self) -> None:
        for threads in (self._threads, self._own):
            threads.shutdown(wait=False, cancel_futures=True)
