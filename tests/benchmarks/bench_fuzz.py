"""Malformed and hostile requests against the real service: it answers, and stays what it was.

    python tests/benchmarks/bench_fuzz.py
    python tests/benchmarks/bench_fuzz.py --requests 2000 --seed 7
    python tests/benchmarks/bench_fuzz.py --seconds 60 --base http://127.0.0.1:8000 --key tasc_...

Three of five requests are JSON bodies made by the service's own /openapi.json and then spoilt:
wrong types, numbers without end, half characters, deep nesting, floods of biases, guides that take
for ever. The others are forms, paths, headers, garbage on the socket, wrong lengths, chunks that
are none, pipelines, slow senders, clients that leave. Without --base a service with two tiny models
is started, which asks for an API key; with --haproxy in Ray Serve's HAProxy mode. It must give no
500, hang in no request (--deadline), lose no process, and say at the end what it said at the
beginning. The same --seed sends the same requests. Tables go to stdout, progress to stderr; the
last line of stdout is one JSON object. The exit code is 1 where the service failed.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench_command import parser_of, to_stderr

HERE = Path(__file__).parent


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--requests", type=int, default=20_000, help="how many (20000)")
    add("--seconds", type=float, help="stop after so many seconds, with fewer requests")
    add("--seed", type=int, default=1, help="of all random choices (1)")
    add("--at-once", type=int, default=16, help="requests at the same time (16)")
    add("--deadline", type=float, default=60.0, help="seconds after which a request hangs (60)")
    add("--base", help="a service that runs; else one is started")
    add("--key", help="an API key of that service")
    add("--haproxy", action="store_true", help="start it in Ray Serve's HAProxy mode")
    return parser.parse_args()


def main() -> int:
    asked = arguments()
    os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")  # before torch is imported
    tests = HERE.parent
    sys.path[:0] = [str(folder) for folder in (tests / "integration" / "serve", tests, HERE)]
    from fuzz_run import Plan, fuzz
    from fuzz_service import Target, running

    plan = Plan(asked.requests, asked.seconds, asked.seed, asked.at_once, asked.deadline)
    with ExitStack() as stack:
        if asked.base:
            target = Target(asked.base.rstrip("/"), asked.key)
        else:
            to_stderr("starting a service ...")
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="tasc-fuzz-"))
            target = stack.enter_context(running(Path(folder), asked.haproxy))
        found = fuzz(target, plan, to_stderr)
    for line in (*found.wrong, *(f"dead: {who}" for who in found.dead)):
        print(line)
    show("answers by status", found.as_json["by_status"])
    show("attacks by kind", found.as_json["by_kind"])
    show("grown since the first fifth", found.as_json["grown"])
    print(json.dumps({**found.as_json, "haproxy": asked.haproxy}))
    return 0 if found.passed else 1


def show(title: str, counts: Mapping[str, Any]) -> None:
    print(f"\n{title}")
    for name, count in counts.items():
        print(f"  {name:32} {count}")


if __name__ == "__main__":
    sys.exit(main())
