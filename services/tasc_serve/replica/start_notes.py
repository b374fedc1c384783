"""Notes of starting replicas, published in Redis for the process that starts the service.

Notes are not stored: a note without a listener, or sent while Redis is unavailable, is lost.
"""

import json
import logging
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, Final

import redis

from tasc_store import StoreError, connect, translated

_CHANNEL: Final = "tasc:start-notes"
_POLL_S: Final = 0.1
_log = logging.getLogger(__name__)


def publish_note(client: redis.Redis, task: str, text: str) -> None:
    """Publishes a note about slow work for waiting users; never raises if Redis fails."""
    try:
        client.publish(_CHANNEL, json.dumps([task, text]))
    except StoreError as error:
        _log.warning("note %r was not sent: %s", text, error)


@contextmanager
def start_notes(
    url: str, tasks: Collection[str], on_note: Callable[[str, str], None]
) -> Iterator[None]:
    """Within the block, ``on_note`` is called on a separate thread with notes of replicas.

    Args:
        url: The store that the replicas use.
        tasks: Tasks of this service; a store may be shared with other services.
        on_note: Called with a task's name and a note, which is one line.

    Raises:
        StoreError: Redis cannot be reached when the block begins.
    """

    def handle(message: dict[str, Any]) -> None:
        task, text = json.loads(message["data"])
        if task in tasks:
            on_note(task, text)

    # Redis may recover; if not, the service itself reports that Redis is unavailable.
    def lost(error: BaseException, notes: Any, thread: Any) -> None:
        time.sleep(_POLL_S)

    with connect(url) as client:
        notes = client.pubsub()
        with translated(url):
            notes.subscribe(**{_CHANNEL: handle})
        thread = notes.run_in_thread(_POLL_S, daemon=True, exception_handler=lost)
        try:
            yield
        finally:
            thread.stop()
            thread.join()
