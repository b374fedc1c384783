"""The benchmarks of the service as a user runs them, for a short time."""

import asyncio
import json
import threading
from argparse import Namespace
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from scripts import record, run

from benchmarks.serve.crowd import crowd

TOKENS = 7
CHOICE = {"index": 0, "finish_reason": "length", "message": {"role": "assistant", "content": "a"}}
USAGE = {"prompt_tokens": 1, "completion_tokens": TOKENS, "total_tokens": 1 + TOKENS}
ANSWER = {"id": "a", "object": "chat.completion", "created": 0, "model": "m"}


class Full(BaseHTTPRequestHandler):
    """A service that is full for whoever comes for the first time."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        first = self.headers["x-stainless-retry-count"] == "0"
        answer = {"error": {"message": "full"}} if first else ANSWER
        body = json.dumps(answer if first else answer | {"choices": [CHOICE], "usage": USAGE})
        self.send_response(503 if first else 200)
        for name, value in (("Retry-After", "0.01"), ("Content-Length", str(len(body)))):
            self.send_header(name, value)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture
def full() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Full) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(("retries", "errors"), [(1, 0), (0, 5)])
def test_errors_that_reach_callers_and_refusals_that_do_not_are_counted(
    full: str, retries: int, errors: int
) -> None:
    options = Namespace(base=full, task="m", clients=5, tokens=TOKENS, retries=retries)
    found = asyncio.run(crowd(options))
    assert (found["errors"], found["refusals"]) == (errors, {"503": 5})
    assert (found["seconds_to_last_answer"] > 0) == (errors == 0)


@pytest.mark.slow("benchmark smoke")
@pytest.mark.ray
@pytest.mark.redis
def test_the_way_in_is_measured_beside_the_engine_alone() -> None:
    few = ["--rounds", "1", "--seconds", "1", "--connections", "1,4", "--requests", "4"]
    found = record(run("serve/way_in.py", *few, "--only", "engine,service"))
    assert found["errors"] == 0
    assert found["http_over_engine"]["4"] > 0
    assert found["streaming_over_whole"] > 0
    assert found["cpu_ms_per_request"]["gateway"] > 0
    assert found["cpu_ms_per_request"]["replica_beside_engine"] > 0
