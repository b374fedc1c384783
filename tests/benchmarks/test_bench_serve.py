"""The benchmarks of the service as a user runs them, for a short time."""

import asyncio
import json
import threading
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from scripts import record, run

from benchmarks.serve.crowd import crowd

TOKENS = 7
CHOICE = {"index": 0, "finish_reason": "length", "message": {"role": "assistant", "content": "a"}}
USAGE = {"prompt_tokens": 1, "completion_tokens": TOKENS, "total_tokens": 1 + TOKENS}
ANSWER = {"id": "a", "object": "chat.completion", "created": 0, "model": "m"}


CLIENTS = 5


class Full(BaseHTTPRequestHandler):
    """A service that refuses the first request of each client because it is full."""

    def do_POST(self) -> None:
        first = self.headers["x-stainless-retry-count"] == "0"
        self.answer(503 if first else 200)

    def answer(self, status: int) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        whole = ANSWER | {"choices": [CHOICE], "usage": USAGE}
        body = json.dumps(whole if status == 200 else {"error": {"message": "full"}})
        self.send_response(status)
        for name, value in (("Retry-After", "0.01"), ("Content-Length", str(len(body)))):
            self.send_header(name, value)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, format: str, *args: object) -> None: ...


@contextmanager
def service(handler: type[Full] = Full) -> Iterator[str]:
    """Runs a service with this handler; yields its URL."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def found(base: str, **options: object) -> dict[str, Any]:
    """Returns the figures of a crowd of clients."""
    usual = {"task": "m", "clients": CLIENTS, "tokens": TOKENS, "retries": 1, "key": "none"}
    return asyncio.run(crowd(Namespace(base=base, **usual | options)))


@pytest.mark.parametrize(("retries", "errors"), [(1, 0), (0, CLIENTS)])
def test_errors_that_reach_callers_and_refusals_that_do_not_are_counted(
    retries: int, errors: int
) -> None:
    with service() as base:
        figures = found(base, retries=retries)
    assert (figures["errors"], figures["refusals"]) == (errors, {"503": CLIENTS})
    assert (figures["seconds_to_last_answer"] > 0) == (errors == 0)


@pytest.mark.slow("benchmark smoke")
@pytest.mark.ray
@pytest.mark.redis
def test_the_way_in_is_measured_beside_the_engine_alone() -> None:
    few = ["--rounds", "1", "--seconds", "1", "--connections", "1,4", "--requests", "4"]
    figures = record(run("serve/way_in.py", *few, "--only", "engine,service"))
    assert figures["errors"] == 0
    assert figures["http_over_engine"]["4"] > 0
    assert figures["streaming_over_whole"] > 0
    assert figures["cpu_ms_per_request"]["gateway"] > 0
    assert figures["cpu_ms_per_request"]["replica_beside_engine"] > 0
