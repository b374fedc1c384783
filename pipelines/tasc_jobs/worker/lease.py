"""Holds a batch while it is answered: renews its lease, hears when to stop. It answers nothing."""

import threading
import time
from types import TracebackType
from typing import Final, Literal, Self

from tasc_store import StoreError
from tasc_store.batches.batch_store import Status
from tasc_store.batches.leases import BatchLease, Counts
from tasc_store.errors import LeaseLost

Stop = Literal["cancelled", "expired", "lost"]
BEAT_S: Final = 1.0  # a cancelled batch is noticed within it
_BEATS: Final = 4  # in the time of a lease


class Hold:
    """A batch in this worker's hands for the time of a block, with a thread that renews its lease.

    While Redis is away the lease cannot be renewed; where it comes back, it is taken up again if
    nobody else took the batch.

    Attributes:
        stop: Why no more of it is to be answered; None while it is.
    """

    def __init__(self, lease: BatchLease) -> None:
        self.stop: Stop | None = None
        self.lease = lease
        self._beat_s = min(BEAT_S, lease.seconds / _BEATS)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="batch-lease", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join()

    @property
    def stopped(self) -> bool:
        return self.stop is not None

    def tell(self, counts: Counts, status: Status | None = None) -> None:
        """How far it is, unless Redis is away: it will be told again."""
        try:
            self._heard(self.lease.tell(counts, status))
        except LeaseLost:
            self.stop = "lost"
        except StoreError:
            return

    def _beat(self) -> None:
        while not self._over.wait(self._beat_s):
            try:
                self._heard(self.lease.renew())
            except LeaseLost:
                self.stop = "lost"
                return
            except StoreError:
                continue

    def _heard(self, status: str) -> None:
        if self.stop is None and status == "cancelling":
            self.stop = "cancelled"
        if self.stop is None and time.time() >= self.lease.batch.expires_at:
            self.stop = "expired"
