"""The process in which new grammars are compiled first. It knows no tokens and no answers."""

import json
import subprocess
import sys
import weakref
from dataclasses import asdict, dataclass
from pathlib import Path

from tasc_engine.errors import EngineError

_PROGRAM = Path(__file__).with_name("trial.py")


@dataclass(frozen=True)
class Effort:
    """What compiling one grammar may take.

    Attributes:
        seconds: Of processor time.
        bytes: Of memory, where the system can limit it.
    """

    seconds: float
    bytes: int


class Sandbox:
    """Says whether a grammar compiles in time. Used by one thread at a time.

    The process starts with the first grammar, and again after one that it died of.

    Args:
        tokenizer: Text of a ``tokenizer.json``.
    """

    def __init__(self, tokenizer: str, vocab_size: int, eos_id: int, effort: Effort) -> None:
        about = {"tokenizer": tokenizer, "vocab_size": vocab_size, "eos_id": eos_id}
        self._about = {**about, **asdict(effort)}
        self._effort = effort
        self._process: subprocess.Popen[str] | None = None

    def refusal(self, grammar: str) -> str:
        """Why the grammar cannot be used; empty where it can.

        Raises:
            EngineError: The process does not start.
        """
        process = self._process or self._start()
        told = _ask(process, grammar)
        if told is None:
            self._process = None
            self._end()
            most = f"{self._effort.seconds:g} s or {self._effort.bytes / 2**20:g} MiB"
            return f"it takes more than {most} to compile"
        return told

    def _start(self) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [sys.executable, "-P", str(_PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._end = weakref.finalize(self, _end, process)
        if _ask(process, self._about) is None:
            self._end()
            raise EngineError(
                f"the process that compiles guides ended at once ({process.returncode}); "
                f"run {_PROGRAM} to see why"
            )
        self._process = process
        return process


def _ask(process: "subprocess.Popen[str]", question: object) -> str | None:
    """The process's answer; None where it is gone."""
    assert process.stdin
    assert process.stdout
    try:
        process.stdin.write(json.dumps(question) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
    except OSError:  # its end of a pipe is closed
        return None
    return str(json.loads(line)) if line.endswith("\n") else None


def _end(process: "subprocess.Popen[str]") -> None:
    process.kill()
    process.communicate()
