"""Processes with one engine each: where they are installed, how they are started and called.

`make bench-env` makes an environment for each peer below ``.bench``; a peer without one is left
out. The exporter of OpenVINO needs an older transformers than this project, so the peers do not use
the project's environment. llama-cpp-python did not install within five minutes and is left out.
`loop` is the other end of a side.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.engine.loop import WARM_UP_ROWS, Job, Ran
from tasc_runtime.progress import note

ENVIRONMENTS = common.ROOT / ".bench"
OURS = ("plain 8", "drafted 8", "plain 1", "drafted 1", "random 8")
SETTINGS = {
    "transformers": ("plain 8", "lookup 1"),
    "openvino": ("plain 8", "lookup 8", "lookup 1"),
    "ctranslate2": ("plain 8",),
}
_VERSION = "import importlib.metadata as m; print(m.version('{}'))"
_PACKAGES = {"openvino": "openvino-genai", "ctranslate2": "ctranslate2"}


class SideFailed(Exception):
    """A side ended by itself; the message is the last line that it wrote."""


@dataclass
class Measured:
    """All timed runs of one setting of a side, in their order."""

    side: str
    setting: str
    runs: list[Ran]
    memory_mb: float

    @property
    def name(self) -> str:
        kind, batch = self.setting.split()
        return f"{self.side} {kind} b={batch}"


class Side:
    """A process with one engine; it waits between calls.

    Raises:
        SideFailed: The engine did not load, or fails in a call.
    """

    def __init__(
        self, name: str, job: Job, settings: Sequence[str], folder: Path, python: str | None = None
    ) -> None:
        self.name, self.settings = name, settings
        file, self._log = folder / f"{name}.json", folder / f"{name}.log"
        file.write_text(json.dumps(asdict(job)), encoding="utf-8")
        script = Path(__file__).with_name(f"side_{name.split()[0]}.py")
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [python or sys.executable, str(script), str(file)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
            )  # fmt: skip
        self._read()

    def close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def call(self, **call: Any) -> Any:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # the log has the last words of the process
            print(json.dumps(call), file=self._process.stdin, flush=True)
        return self._read()

    def run(self, setting: str, rows: int) -> tuple[Ran, float]:
        """A run, and the peak memory of the side until now in megabytes."""
        found = self.call(setting=setting, rows=rows)
        memory = found.pop("memory_mb")
        return Ran(**found), memory

    def _read(self) -> Any:
        assert self._process.stdout is not None
        if line := self._process.stdout.readline():
            return json.loads(line)
        self._process.wait()
        said = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        raise SideFailed(f"{self.name}: {said[-1] if said else 'it ended without a word'}")


def python_of(peer: str) -> str | None:
    """The interpreter of a peer; transformers runs in the project's own."""
    python = ENVIRONMENTS / peer / "bin" / "python"
    return str(python) if peer in _PACKAGES and python.is_file() else None


def version_of(peer: str) -> str | None:
    """The version of a peer's package; None where it is not installed."""
    python = python_of(peer)
    if python is None:
        return None
    done = subprocess.run(
        [python, "-c", _VERSION.format(_PACKAGES[peer])], capture_output=True, text=True
    )
    return done.stdout.strip() or None


def start(job: Job, peers: Sequence[str], folder: Path, stack: ExitStack) -> list[Side]:
    """Start our side and the peers; ``stack`` closes them. A message names each that fails."""
    sides = [stack.enter_context(closing(Side("ours", job, OURS, folder)))]
    for peer in peers:
        if peer != "transformers" and version_of(peer) is None:
            note(f"{peer} left out: not installed under {ENVIRONMENTS / peer}; `make bench-env`")
            continue
        try:
            side = Side(peer, job, SETTINGS[peer], folder, python_of(peer))
            sides.append(stack.enter_context(closing(side)))
        except SideFailed as error:
            note(f"{peer} left out: {error}")
    return sides


def in_turn(
    sides: Sequence[Side], rows: int, repeats: int, tick: Callable[[], Any]
) -> list[Measured]:
    """Run every setting of every side in turn, after one run of each to warm up."""
    calls = {(s.name, setting): partial(s.run, setting) for s in sides for setting in s.settings}
    for call in calls.values():
        call(min(rows, WARM_UP_ROWS))
    timed = {key: partial(call, rows) for key, call in calls.items()}
    found = common.in_turn(timed, repeats, tick)
    return [Measured(*key, [ran for ran, _ in runs], runs[-1][1]) for key, runs in found.items()]
