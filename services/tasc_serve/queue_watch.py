"""Asks the store now and then how many batches wait, and tells the gateway's metrics.

Batches that nobody took in time end by it, be anybody looking at them or not. It takes none.
"""

import logging
import threading

from tasc_serve.queue_metrics import QueueMetrics
from tasc_store.batch_queue import BatchQueue

log = logging.getLogger(__name__)
EVERY_S = 5.0


class QueueWatch:
    """A thread that asks until ``close()``. While the store is away, the series stay as they were.

    Args:
        every_s: Pause between two questions, in seconds.
    """

    def __init__(self, queue: BatchQueue, metrics: QueueMetrics, every_s: float = EVERY_S) -> None:
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
                self._metrics.seen(self._queue.waiting())
                failing = False
            except Exception as error:  # whatever it is, it is asked again
                if not failing:
                    log.warning("how many batches wait is not known, will retry: %s", error)
                failing = True
            self._closing.wait(self._every_s)
