"""Asks the store, beside the requests, whether it answers and how many batches wait.

Batches that no worker took in time are ended by this question, whoever asks it.
"""

import asyncio
import logging
import threading
from concurrent.futures import ThreadPoolExecutor

import redis

from tasc_serve.metrics.gateway_metrics import GatewayMetrics
from tasc_store import translated
from tasc_store.batches.leases import BatchQueue
from tasc_store.client import url_of

log = logging.getLogger(__name__)


class QueueWatch:
    """A thread that asks until ``close()``. While the store is away, the series stay as they were.

    Args:
        every_s: Pause between two questions, in seconds.
    """

    def __init__(self, queue: BatchQueue, metrics: GatewayMetrics, every_s: float = 5.0) -> None:
        self._queue, self._metrics, self._every_s = queue, metrics, every_s
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="batch-queue", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ask no more; one question that is on its way may still be answered."""
        self._closing.set()

    def _run(self) -> None:
        failing = False
        while not self._closing.is_set():
            try:
                self._metrics.set_batches(self._queue.waiting())
                failing = False
            except Exception as error:  # whatever it is, it is asked again
                if not failing:
                    log.warning("how many batches wait is not known, will retry: %s", error)
                failing = True
            self._closing.wait(self._every_s)


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
