"""First tries of requests that clients may send again, and their answers, for a while.

It knows neither requests nor answers: both are bytes to it.
"""

import redis

from tasc_store import keys
from tasc_store.client import as_text, translated, url_of

# One script, so that of two tries at the same time one is the first.
_CLAIM = """
if redis.call('HSETNX', KEYS[1], 'note', ARGV[1]) == 1 then
  redis.call('EXPIRE', KEYS[1], ARGV[2])
end
return redis.call('HMGET', KEYS[1], 'note', 'answer')
"""

# An answer without its note, which has expired meanwhile, would stay for ever.
_KEEP = """
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
return redis.call('HSETNX', KEYS[1], 'answer', ARGV[1])
"""


class IdempotencyStore:
    """Notes of first tries, forgotten after ``ttl_s`` seconds.

    Every method raises `StoreError` (see `translated`) when Redis fails.
    """

    def __init__(self, client: redis.Redis, ttl_s: int) -> None:
        self._url = url_of(client)
        self._ttl_s = ttl_s
        self._claim = client.register_script(_CLAIM)
        self._keep = client.register_script(_KEEP)

    def claim(self, task: str, name: str, note: str) -> tuple[str, bytes | None]:
        """Note a first try of that name unless there is one; its note, and its answer if known."""
        with translated(self._url):
            found, answer = self._claim([_key(task, name)], [note, self._ttl_s])
        return as_text(found), answer

    def keep(self, task: str, name: str, answer: bytes) -> None:
        """Keep the answer of a first try; the first one, should there be several."""
        with translated(self._url):
            self._keep([_key(task, name)], [answer])


def _key(task: str, name: str) -> str:
    return keys.task_key(task, "first-try", name)
