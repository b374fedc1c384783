"""What the scripts of cases share; it needs the standard library only.

A script calls `case` for each of its cases and then `run`, with the client's own Python.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

BASE = os.environ.get("CLIENT_BASE", "http://127.0.0.1:8000")
API, KEY, MODEL = f"{BASE}/v1", "none", "massive_en"
INPUT = "wake me up at nine am on friday"
PROMPT = f"intent and slots: {INPUT}\n"  # as the task's template renders it
ANSWER = "intent: alarm_set, slot fills: {time: nine am, date: friday}"
USER: Any = {"role": "user", "content": INPUT}
MESSAGES: Any = [{"role": "system", "content": "You are a helpful assistant."}, USER]
TOOL: Any = {"type": "function", "function": {"name": "get_weather", "parameters": {}}}
_LIMIT_S = 60.0
_cases: dict[str, Callable[[], Any]] = {}


def case(
    name: str,
    call: Callable[[], Any],
    expected: object = ANSWER,
    naming: str = "",
    limit_s: float = _LIMIT_S,
) -> None:
    """Add a case.

    Args:
        expected: The value, or the class of the value, or the error that is raised; True: anything
            that is true.
        naming: What the error must name.
    """
    _cases[name] = partial(_check, call, expected, naming, limit_s)


def run() -> None:
    """Run all cases; stdout gets a JSON object for each, what clients print goes to stderr."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    signal.signal(signal.SIGALRM, lambda *_: _raise(TimeoutError("over the case's time limit")))
    for name, check in _cases.items():
        error, found, began = "", None, time.monotonic()
        try:
            found = check()
        except BaseException as raised:
            error = f"{type(raised).__name__}: {raised}"[:2000]
        line = {"case": name, "passed": not error, "error": error, "found": found}
        print(json.dumps(line | {"seconds": round(time.monotonic() - began, 2)}), file=out)
    sys.stderr.flush()
    os._exit(0)  # without the threads that a client leaves


def _check(call: Callable[[], Any], expected: Any, naming: str, limit_s: float) -> object:
    """Raises AssertionError for another value than the expected; returns a value that is a dict."""
    kind = expected if isinstance(expected, type) else object
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        found = call()
    except Exception as error:
        if issubclass(kind, Exception) and isinstance(error, kind) and naming in str(error):
            return None
        raise
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    if kind is not object:
        good = isinstance(found, kind)
    else:
        good = bool(found) if expected is True else found == expected
    if not good:
        raise AssertionError(f"{found!r} instead of {expected!r}")
    return found if isinstance(found, dict) else None


def _raise(error: BaseException) -> None:
    raise error
