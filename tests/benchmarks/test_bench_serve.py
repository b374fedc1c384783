"""Tests how the benchmark with many clients counts errors and refusals."""

import asyncio
import json
from argparse import Namespace
from http.server import BaseHTTPRequestHandler

import pytest

from benchmarks.serve.crowd import crowd
from support import http_server

TOKENS = 7
CHOICE = {"index": 0, "finish_reason": "length", "message": {"role": "assistant", "content": "a"}}
USAGE = {"prompt_tokens": 1, "completion_tokens": TOKENS, "total_tokens": 1 + TOKENS}
ANSWER = {"id": "a", "object": "chat.completion", "created": 0, "model": "m"}
CLIENTS = 5


class Full(BaseHTTPRequestHandler):
    """A service that refuses the first request of each client because it is full."""

    def do_POST(self) -> None:
        status = 503 if self.headers["x-stainless-retry-count"] == "0" else 200
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


@pytest.mark.parametrize(("retries", "errors"), [(1, 0), (0, CLIENTS)])
def test_errors_of_callers_and_repeated_refusals_are_counted(retries: int, errors: int) -> None:
    own = {"task": "m", "clients": CLIENTS, "tokens": TOKENS, "retries": retries, "key": "none"}
    with http_server(Full) as base:
        figures = asyncio.run(crowd(Namespace(base=base, **own)))
    assert (figures["errors"], figures["refusals"]) == (errors, {"503": CLIENTS})
    assert (figures["seconds_to_last_answer"] > 0) == (errors == 0)
