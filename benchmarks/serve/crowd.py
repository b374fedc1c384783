"""A crowd that comes at once, with the retries of OpenAI's client: how many errors reach callers.

    make serve                                                       # in another terminal
    python benchmarks/serve/crowd.py
    python benchmarks/serve/crowd.py --clients 2000 --tokens 20 --retries 5

All clients send one request at the same moment, each over a connection of its own, and repeat it as
OpenAI's client does by default. `ulimit -n` must be above the number of clients. All answers must
have the same number of tokens, whatever they say; an answer of another length counts as an error. A
table goes to stdout, and its last line is one JSON object.
"""

import argparse
import asyncio
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # modules are found from the repository's root, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from benchmarks.common import at_least, finish, parser_of, show_table


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--base", default="http://127.0.0.1:8000", help="URL of the service (port 8000 here)")
    add("--key", default="none", help="API key, if the service requires one")
    add("--task", default="massive_en", help="task that all clients ask (massive_en)")
    add("--clients", type=at_least(1), default=800, help="number of clients (800)")
    add("--tokens", type=at_least(1), default=200, help="number of tokens per answer (200)")
    add("--retries", type=at_least(0), default=2, help="largest number of retries per client (2)")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    found = asyncio.run(crowd(options))
    show_table("a crowd that comes at once", ["", ""], [[k, str(v)] for k, v in found.items()])
    finish(found)
    return 0


async def crowd(options: argparse.Namespace) -> dict[str, Any]:
    """Ask once with each client; returns figures by their name."""
    from openai import DEFAULT_CONNECTION_LIMITS as USUAL
    from openai import APIError, AsyncOpenAI, DefaultAsyncHttpxClient

    refused, waits = Counter[str](), list[float]()

    async def saw(response: Any) -> None:
        if response.status_code != 200:
            refused[str(response.status_code)] += 1
            waits.append(float(response.headers.get("retry-after", 0)))

    count = options.clients
    limits = type(USUAL)(max_connections=count, max_keepalive_connections=count)
    http = DefaultAsyncHttpxClient(event_hooks={"response": [saw]}, limits=limits)
    client = AsyncOpenAI(
        base_url=f"{options.base}/v1",
        api_key=options.key,
        max_retries=options.retries,
        http_client=http,
    )
    body: dict[str, Any] = {"model": options.task, "max_tokens": options.tokens, "temperature": 0}
    more = {"ignore_eos": True}
    began, last = time.monotonic(), 0.0
    errors = Counter[str]()

    async def ask(number: int) -> None:
        nonlocal last
        message = {"role": "user", "content": f"wake me up at {number}"}
        try:
            answer = await client.chat.completions.create(
                **body, messages=[message], extra_body=more
            )
        except APIError as error:
            errors[f"{type(error).__name__}: {error}"[:90]] += 1
        else:
            tokens = answer.usage.completion_tokens if answer.usage else 0
            if tokens == options.tokens:
                last = time.monotonic() - began
            else:
                errors[f"{tokens} tokens instead of {options.tokens}"] += 1

    async with client:
        await asyncio.gather(*(ask(number) for number in range(count)))
    return {
        "clients": count,
        "errors": errors.total(),
        "seconds_to_last_answer": round(last, 3),
        "seconds": round(time.monotonic() - began, 1),
        "refusals": dict(refused),
        "longest_retry_after": max(waits, default=0),
        "kinds_of_errors": dict(errors),
    }


if __name__ == "__main__":
    sys.exit(main())
