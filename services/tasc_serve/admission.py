"""From a call to a request that the engine will take, or to why not.

Guides are compiled on threads of their own: however long one takes, answers go on being sent.
"""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from tasc_engine import GenerationRequest
from tasc_serve.asked import FieldError
from tasc_serve.calls import Call, Refusal
from tasc_serve.settings import LimitSettings
from tasc_serve.worker import Worker

_COMPILERS = 8  # new guides wait for one another; known ones must get past them


@dataclass(frozen=True)
class Admission:
    """Reads the calls of one replica."""

    worker: Worker
    limits: LimitSettings
    _threads: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(_COMPILERS, "guides")
    )

    async def request(self, call: Call) -> GenerationRequest | Refusal:
        """Raises what nobody foresaw only."""
        try:
            guide = call.asked.guided(self.worker.record).guide
            request = await self._in_time(call, guide.field) if guide else self._fitting(call)
        except FieldError as error:
            return Refusal("invalid", str(error), error.field)
        except ValueError as error:
            return Refusal("invalid", str(error), call.prompt_field)
        if isinstance(request, Refusal):
            return request
        if self.worker.engine.waits_to_compile(request):
            await asyncio.to_thread(self.worker.engine.compile_rules)
        over = self.limits.over_total(call.n, request.max_tokens)
        return Refusal("invalid", over, "n") if over else request

    def _fitting(self, call: Call) -> GenerationRequest:
        request = self.worker.request(call)
        self.worker.engine.require_fit(request)
        return request

    async def _in_time(self, call: Call, field: str) -> GenerationRequest | Refusal:
        compiling = self._threads.submit(self._fitting, call)
        try:
            async with asyncio.timeout(self.limits.guide_timeout_s):
                return await asyncio.wrap_future(compiling)
        except TimeoutError:  # it goes on, and is there for who comes again
            limit_s = self.limits.guide_timeout_s
            return Refusal("full", f"{field}: the guide was not ready within {limit_s:g} s")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
