"""Renders chat templates with transformers' sandbox in a separate process, within limits.

The sandbox denies a template access to files and to Python's internals, but does not stop endless
loops or huge texts, and a single call into C code cannot be interrupted by a thread. So templates
are rendered in a process that can be killed; the next prompt starts another one.
"""

import atexit
import importlib
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from io import BytesIO
from typing import Any, Final, cast

from tasc_text.errors import TextError

LIMIT_S: Final = 1.0  # processor time of one prompt; most take under a millisecond
MOST_CHARACTERS: Final = 4_000_000  # characters of one prompt
MEMORY: Final = 512 << 20  # bytes in addition to those that the process has at its start
_KILL_S: Final = 2 * LIMIT_S  # kills the process if C code cannot be interrupted at LIMIT_S
_TICK_S: Final = 0.1
_SHOWN: Final = 500  # maximum characters of an error
_PROGRAM: Final = "from tasc_text.renderer import serve; serve()"
_TOO_LONG = f"does not end within {LIMIT_S:g} s; correct its loops"
_TOO_LARGE = f"needs more than {MEMORY >> 20} MiB of memory; shorten what it writes"


class Renderer:
    """The rendering process. The first call starts it. Calls of several threads run one by one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0
        atexit.register(self.close)

    def ask(self, wanted: dict[str, Any]) -> dict[str, str]:
        """Returns the ``text`` of a prompt, or the ``error`` of its template.

        Args:
            wanted: ``source``, ``messages``, ``add_generation_prompt`` and ``variables``.

        Raises:
            RuntimeError: The process cannot run.
            TextError: A library that it needs is not installed.
        """
        line = json.dumps(wanted).encode() + b"\n"
        with self._lock:
            answer, code = self._exchange(line)
        if answer.endswith(b"\n"):
            found: dict[str, str] = json.loads(answer)
            return found
        if code == -signal.SIGPROF:
            return {"error": _TOO_LONG}
        raise RuntimeError(
            f"the process that renders chat templates ended with {code}; its stderr says why"
        )

    def close(self) -> None:
        """Ends the process; the next call starts another."""
        process, self._process = self._process, None
        if process and self._owner == os.getpid():
            process.kill()
            process.communicate()

    def _exchange(self, line: bytes) -> tuple[bytes, int | None]:
        """Returns the answer's line; if the process ended, a part of the line and the exit code."""
        try:
            process = self._running()
            requests, answers = cast("BytesIO", process.stdin), cast("BytesIO", process.stdout)
            answer = b""
            with suppress(BrokenPipeError):
                requests.write(line)
                requests.flush()
                answer = answers.readline()
            if answer.endswith(b"\n"):
                return answer, None
            code = process.wait()
        except BaseException:  # a late answer would be read as the next prompt's answer
            self.close()
            raise
        self.close()
        return answer, code

    def _running(self) -> subprocess.Popen[bytes]:
        there = self._process
        if there is None or self._owner != os.getpid() or there.poll() is not None:
            _require_libraries()
            # A new session, so that Ctrl-C reaches only the parent process.
            there = self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
            self._owner = os.getpid()
        return there


@cache
def shared_renderer() -> Renderer:
    """The renderer of this process."""
    return Renderer()


def _require_libraries() -> None:
    """Without jinja2, a template would fail like one with a mistake, and name no end."""
    missing = [name for name in ("transformers", "jinja2") if find_spec(name) is None]
    if missing:
        raise TextError(
            f"chat templates need {' and '.join(missing)}, which is not installed; "
            "pip install 'tasc-draft[chat]'"
        )


class _Late(BaseException):
    """Raised at the time limit. Jinja does not catch a BaseException."""


def serve() -> None:
    """Renders the prompts on stdin until stdin ends."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # printed text must not be read as an answer
    # Imported here by name, so that no other process of this package imports the library.
    render = importlib.import_module("transformers.utils.chat_template_utils").render_jinja_template
    with open("/proc/self/statm", encoding="ascii") as file:
        most = int(file.read().split()[0]) * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    signal.signal(signal.SIGVTALRM, _late)
    for line in sys.stdin.buffer:
        answers.write(json.dumps(_answer(render, json.loads(line))).encode() + b"\n")
        answers.flush()


def _late(number: int, frame: object) -> None:
    raise _Late


def _answer(render: Any, wanted: dict[str, Any]) -> dict[str, str]:
    from jinja2 import TemplateError, TemplateSyntaxError

    try:
        try:
            signal.setitimer(signal.ITIMER_PROF, _KILL_S)
            signal.setitimer(signal.ITIMER_VIRTUAL, LIMIT_S, _TICK_S)
            (text,), _ = render(
                conversations=[wanted["messages"]],
                chat_template=wanted["source"],
                add_generation_prompt=wanted["add_generation_prompt"],
                **wanted["variables"],
            )
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.setitimer(signal.ITIMER_PROF, 0)
    except _Late:
        return {"error": _TOO_LONG}
    except MemoryError:
        return {"error": _TOO_LARGE}
    except TemplateSyntaxError as error:
        return {"error": f"is not valid Jinja in line {error.lineno}: {error.message}"[:_SHOWN]}
    except Exception as error:
        refused = type(error) is TemplateError  # by the template's own raise_exception
        said = f"refuses the messages: {error}" if refused else f"fails on the messages: {error!r}"
        return {"error": said[:_SHOWN]}
    if len(text) > MOST_CHARACTERS:
        return {"error": f"writes {len(text)} characters; at most {MOST_CHARACTERS} are taken"}
    return {"text": text}
