"""How many batches wait for a worker, and since when. It takes none."""

import time
from dataclasses import dataclass

import redis

from tasc_store import batch_scripts, keys
from tasc_store.client import as_text, translated, url_of


@dataclass(frozen=True)
class Waiting:
    """Batches of a task that no worker holds, those among them that one had begun.

    Attributes:
        oldest_s: How long the first of them has been asked for, or not held any more, in seconds.
    """

    batches: int
    oldest_s: float


class BatchQueue:
    """The batches that wait. Any thread."""

    def __init__(self, client: redis.Redis) -> None:
        self._client, self._url = client, url_of(client)
        self._waiting = client.register_script(batch_scripts.WAITING)

    def waiting(self) -> dict[str, Waiting]:
        """By task; those that nobody took in time have ended and are none of them.

        Raises:
            StoreError: See `translated`.
        """
        now = int(time.time())
        with translated(self._url):
            found = [as_text(part) for part in self._waiting([keys.SHARED], [now])]
        parts = zip(found[::3], found[1::3], found[2::3], strict=True)
        return {
            task: Waiting(int(count), max(0.0, float(now - int(since))))
            for task, count, since in parts
        }
