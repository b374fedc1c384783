"""Whether the store answers, asked beside the requests: none of them waits for it."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import redis

from tasc_store import translated
from tasc_store.client import url_of

_EVERY_S = 1.0


class StoreHealth:
    """What a Redis said when it was last asked.

    Attributes:
        fault: Why it does not answer; None while it does.
    """

    def __init__(self, client: redis.Redis) -> None:
        self._client = client
        self.fault: str | None = None
        # Of its own: while a store is silent, threads that others need would wait for it.
        self._thread = ThreadPoolExecutor(1, "store-health")

    async def watch(self) -> None:
        """Ask again and again, until this is cancelled."""
        while True:
            here = asyncio.get_running_loop()
            self.fault = await here.run_in_executor(self._thread, self._ask)
            await asyncio.sleep(_EVERY_S)

    def _ask(self) -> str | None:
        try:
            with translated(url_of(self._client)):
                self._client.ping()
        except Exception as error:  # whatever it is, it is asked again
            return str(error)
        return None
