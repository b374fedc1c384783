"""Tests that messages of starting replicas are shown, and that a failed message is harmless."""

import threading

import pytest

from support import DEADLINE_S, eventually
from tasc_serve.replica.start_notes import start_notes, tell
from tasc_store import EmbeddedRedis, StoreClient, connect

pytestmark = pytest.mark.redis


def test_notes_of_the_tasks_served_are_heard_in_order(redis_url: str) -> None:
    found: list[tuple[str, str]] = []
    last = threading.Event()

    def on_note(task: str, text: str) -> None:
        found.append((task, text))
        if text == "last":
            last.set()

    with connect(redis_url) as client:
        tell(client, "t", "before anybody listened")
        with start_notes(redis_url, {"t", "u"}, on_note):
            tell(client, "t", "measuring: 100 %, café")
            tell(client, "of another service", "nothing of ours")
            tell(client, "u", "last")
            assert last.wait(DEADLINE_S)
        tell(client, "t", "behind the end")
    assert found == [("t", "measuring: 100 %, café"), ("u", "last")]


def test_who_starts_a_service_is_left_with_no_thread_and_no_connection() -> None:
    before = threading.active_count()
    with EmbeddedRedis.start() as server, connect(server.url) as client:
        redis_url = server.url
        listening = client.info("clients")["connected_clients"]
        with start_notes(redis_url, {"t"}, lambda task, text: None):
            assert client.pubsub_numsub("tasc:start-notes")[0][1] == 1
        # Redis notices the end of a connection at its next check.
        eventually(lambda: client.info("clients")["connected_clients"] <= listening)
    eventually(lambda: threading.active_count() <= before)


def test_a_note_that_redis_does_not_carry_stops_no_replica(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tell(StoreClient(port=1, retry=None), "t", "measuring")
    assert "'measuring' was not sent" in caplog.text
