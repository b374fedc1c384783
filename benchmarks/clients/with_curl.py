"""Cases of `curl`, as the OpenAI documentation and the READMEs of other servers show it."""

import gzip
import json
import subprocess
from typing import Any

from cases import API, BASE, INPUT, KEY, MESSAGES, MODEL, PROMPT, case, run

JSON = ("-H", "Content-Type: application/json")
GZIP = ("-H", "Content-Encoding: gzip", "--data-binary", "@-")
STATUS, HEADERS = ("-o", "/dev/null", "-w", "%{http_code}"), ("-o", "/dev/null", "-D", "-")
CHAT = {"model": MODEL, "messages": MESSAGES}
PATH, MODELS, MINE = "/chat/completions", f"{API}/models", ("-H", "X-Request-ID: mine")


def curl(*arguments: str, stdin: bytes = b"") -> str:
    command = ["curl", "-sS", "--max-time", "30", "-H", f"Authorization: Bearer {KEY}", *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, check=True).stdout.decode()


def post(path: str, body: Any, *more: str) -> str:
    body = body if isinstance(body, str) else json.dumps(body)
    return curl(f"{API}{path}", *JSON, *more, "-d", body)


def said(answer: str) -> Any:
    choice = json.loads(answer)["choices"][0]
    return choice["message"]["content"] if "message" in choice else choice["text"]


def streamed() -> str:
    events = post(PATH, CHAT | {"stream": True}, "-N").split("\n\n")[:-1]
    *lines, done = (event for event in events if not event.startswith(":"))  # comments
    assert done == "data: [DONE]"
    deltas = [json.loads(line.removeprefix("data: "))["choices"][0]["delta"] for line in lines]
    return "".join(delta.get("content") or "" for delta in deltas)


def response() -> str:
    found = json.loads(post("/responses", {"model": MODEL, "input": INPUT}))
    return str(found["output"][-1]["content"][0]["text"])


def error(body: Any) -> Any:
    return json.loads(post(PATH, body))["error"]["code"]


PACKED = gzip.compress(json.dumps(CHAT).encode())
STRICT = CHAT | {"strict_messages": True}
case("chat", lambda: said(post(PATH, CHAT)))
case("chat streamed", streamed)
case("completions", lambda: said(post("/completions", {"model": MODEL, "prompt": PROMPT})))
case("responses", response)
case("list of models", lambda: json.loads(curl(f"{API}/models"))["data"][0]["id"], MODEL)
case("one model", lambda: json.loads(curl(f"{API}/models/{MODEL}"))["id"], MODEL)
case("unknown model", lambda: error(CHAT | {"model": "none"}), "model_not_found")
case("broken json", lambda: post(PATH, "{", *STATUS), "400")
case("request id", lambda: "x-request-id: mine" in curl(MODELS, *HEADERS, *MINE).lower(), True)
case("gzip body", lambda: said(curl(f"{API}{PATH}", *JSON, *GZIP, stdin=PACKED)))
case("health", lambda: curl(f"{BASE}/healthz", *STATUS), "200")
case("health by HEAD", lambda: curl(f"{BASE}/healthz", "-I", *STATUS), "200")
case("options", lambda: curl("-X", "OPTIONS", f"{API}{PATH}", *STATUS)[0], "2")
case("ignored messages are named", lambda: "x-tasc-ignored" in post(PATH, CHAT, *HEADERS), True)
case("strict messages", lambda: post(PATH, STRICT, *STATUS), "400")

run()
