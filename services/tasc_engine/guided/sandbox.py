"""Checks new grammars by compiling them in a separate process first."""

import json
import signal
import subprocess
import sys
import threading
import weakref
from dataclasses import asdict, dataclass
from pathlib import Path

from tasc_engine.errors import GuideError

_PROGRAM = Path(__file__).with_name("trial.py")
_START_SECONDS = 60.0  # the machine may be busy loading a model
_WALL_SECONDS = 5  # per second of processor time; the machine may be busy with answers
MAX_ASKED = 256  # maximum number of grammars per process, since they fragment its memory


class Unsettled(GuideError):
    """It could not be determined whether a grammar compiles; a later attempt may succeed."""


@dataclass(frozen=True)
class Effort:
    """Limits of compiling one grammar.

    Attributes:
        seconds: Processor time.
        bytes: Memory, if the system can limit it.
    """

    seconds: float
    bytes: int


class Sandbox:
    """Checks whether a grammar compiles in time. Used by one thread at a time.

    The process starts with the first grammar. It is restarted after a grammar has ended it, after
    it was killed from outside, and after `MAX_ASKED` grammars.

    Args:
        tokenizer: Text of a ``tokenizer.json``.
    """

    def __init__(self, tokenizer: str, vocab_size: int, eos_id: int, effort: Effort) -> None:
        about = {"tokenizer": tokenizer, "vocab_size": vocab_size, "eos_id": eos_id}
        self._about = {**about, **asdict(effort)}
        self._effort = effort
        self._process: subprocess.Popen[str] | None = None
        self._asked = 0

    def refusal(self, grammar: str) -> str:
        """Returns the reason why the grammar cannot be used; empty if it can.

        Raises:
            Unsettled: The process did not start, took too long, or was killed from outside twice.
        """
        for _ in range(2):
            process = self._ready()
            self._asked += 1
            outcome = _ask(process, grammar, _WALL_SECONDS * self._effort.seconds)
            if outcome is not None:
                return outcome
            self._stop()
            code = process.returncode
            # Fragmented memory of earlier grammars must not count against this one.
            if code == -signal.SIGPROF or (code == -signal.SIGABRT and self._asked == 1):
                limits = f"{self._effort.seconds:g} s or {self._effort.bytes / 2**20:g} MiB"
                return f"it takes more than {limits} to compile"
        raise Unsettled(
            f"the process that compiles guides was ended twice (exit code {process.returncode}; "
            "a negative code is a signal); find out what ends it, then send the request again"
        )

    def _ready(self) -> "subprocess.Popen[str]":
        process = self._process
        if process and process.poll() is None and self._asked < MAX_ASKED:
            return process
        self._stop()
        return self._start()

    def _stop(self) -> None:
        if self._process:
            self._process = None
            self._end()

    def _start(self) -> "subprocess.Popen[str]":
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", str(_PROGRAM)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        except OSError as error:
            raise Unsettled(f"the process that compiles guides does not start: {error}") from error
        self._process, self._asked = process, 0
        self._end = weakref.finalize(self, _end, process)
        if _ask(process, self._about, _START_SECONDS) is None:
            self._stop()
            raise Unsettled(
                f"the process that compiles guides ended at once (exit code {process.returncode}); "
                f"run {_PROGRAM} to see why"
            )
        return process


def _ask(process: "subprocess.Popen[str]", question: object, seconds: float) -> str | None:
    """Returns the process's answer; None if the process has ended.

    Raises:
        Unsettled: The process took more than ``seconds`` of wall-clock time, and was killed.
    """
    assert process.stdin
    assert process.stdout
    over = threading.Event()

    def end() -> None:
        over.set()
        process.kill()

    timer = threading.Timer(seconds, end)
    timer.start()
    try:
        process.stdin.write(json.dumps(question) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
    except OSError:  # the process has closed the pipe
        line = ""
    finally:
        timer.cancel()
    if line.endswith("\n"):
        return str(json.loads(line))
    if over.is_set():
        process.wait()
        raise Unsettled(
            f"compiling the guide took too long: more than {seconds:g} s of wall-clock time; send "
            "the request again when the machine is less busy"
        )
    return None


def _end(process: "subprocess.Popen[str]") -> None:
    process.kill()
    process.communicate()
