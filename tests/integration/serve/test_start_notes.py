"""Tests that messages of starting replicas are shown, and that a failed message is harmless."""

import threading

import pytest

from support import DEADLINE_S, eventually
from tasc_serve.replica.start_notes import publish_note, start_notes
from tasc_store import EmbeddedRedis, StoreClient, connect

pytestmark = pytest.mark.redis


def test_start_notes_of_served_tasks_arrive_in_order(redis_url: str) -> None:
    found: list[tuple[str, str]] = []
    last = threading.Event()

    def on_note(task: str, text: str) -> None:
        found.append((task, text))
        if text == "last":
            last.set()

    with connect(redis_url) as client:
        publish_note(client, "t", "before anybody listened")
        with start_notes(redis_url, {"t", "u"}, on_note):
            publish_note(client, "t", "measuring: 100 %, café")
            publish_note(client, "of another service", "nothing of ours")
            publish_note(client, "u", "last")
            assert last.wait(DEADLINE_S)
        publish_note(client, "t", "behind the end")
    assert found == [("t", "measuring: 100 %, café"), ("u", "last")]


def test_start_notes_leave_no_thread_and_no_connection() -> None:
    before = threading.active_count()
    with EmbeddedRedis.start() as server, connect(server.url) as client:
        redis_url = server.url
        listening = client.info("clients")["connected_clients"]
        with start_notes(redis_url, {"t"}, lambda task, text: None):
            assert client.pubsub_numsub("tasc:start-notes")[0][1] == 1
        # Redis notices the end of a connection at its next check.
        eventually(lambda: client.info("clients")["connected_clients"] <= listening)
    eventually(lambda: threading.active_count() <= before)


def test_unsent_start_note_is_only_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    publish_note(StoreClient(port=1, retry=None), "t", "measuring")
    assert "'measuring' was not sent" in caplog.text
