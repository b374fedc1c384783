"""Processes with one engine each: where they are installed, how they are started and called.

`make bench-env` makes an environment for each peer below ``.bench``, and `make test-vllm` that of
vLLM; a peer without one is left out, and the reason is told. The exporter of OpenVINO needs an
older transformers than this project, so the peers do not use the project's environment. `loop` is
the other end of a side.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
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
# vLLM's own settings: one process, whose threads the side restricts, and a cache of 1 GB.
VLLM = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "PYTHONPATH": str(common.ROOT / "services"),  # has the drafter
}
_VERSION = "import importlib.metadata as m; print(m.version('{}'))"
PACKAGES = {
    "openvino": "openvino-genai",
    "ctranslate2": "ctranslate2",
    "vllm": "vllm-cpu",
    "llama-cpp": "llama-cpp-python",
    "onnx-genai": "onnxruntime-genai",
}


class SideFailed(Exception):
    """A side is not installed, or ended by itself; the message has the last line that it wrote."""


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
        kind = kind_of(name.split()[0])
        script = Path(__file__).with_name(f"side_{kind.replace('-', '_')}.py")
        own = VLLM if kind == "vllm" else {}
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [python or sys.executable, str(script), str(file)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
                env=os.environ | own,
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

    def run(self, setting: str, rows: range) -> tuple[Ran, float]:
        """A run over rows of the job, and the peak memory of the side until now in megabytes."""
        found = self.call(setting=setting, rows=[rows.start, rows.stop])
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
    kind = kind_of(peer)
    python = ENVIRONMENTS / kind / "bin" / "python"
    return str(python) if kind in PACKAGES and python.is_file() else None


def kind_of(peer: str) -> str:
    """A peer without its drafter or its weights: ``vllm`` of ``vllm-ngram``."""
    named = (kind for kind in PACKAGES if f"{peer}-".startswith(f"{kind}-"))
    return next(named, peer.partition("-")[0])


def variant_of(peer: str) -> str:
    """What `kind_of` leaves out: ``ngram`` of ``vllm-ngram``, nothing of ``llama-cpp``."""
    return peer.removeprefix(kind_of(peer)).removeprefix("-")


def version_of(peer: str) -> str | None:
    """The version of a peer's package; None where it is not installed."""
    python = python_of(peer)
    if python is None:
        return None
    done = subprocess.run(
        [python, "-c", _VERSION.format(PACKAGES[kind_of(peer)])], capture_output=True, text=True
    )
    return done.stdout.strip() or None


def start(job: Job, peers: Sequence[str], folder: Path, stack: ExitStack) -> list[Side]:
    """Start our side and the peers; ``stack`` closes them. A message names each that fails."""
    ours = stack.enter_context(closing(Side("ours", job, OURS, folder)))
    begin = {peer: partial(started, peer, job, SETTINGS[peer], folder, stack) for peer in peers}
    return [ours, *started_of(begin)[0]]


def started_of(begin: Mapping[str, Callable[[], Side]]) -> tuple[list[Side], dict[str, str]]:
    """The peers that start; why each of the others did not. A message says that, too."""
    sides, left_out = list[Side](), dict[str, str]()
    for peer, start_one in begin.items():
        try:
            sides.append(start_one())
        except SideFailed as error:
            left_out[peer] = str(error)
            note(f"left out: {error}")
    return sides, left_out


def started(peer: str, job: Job, settings: Sequence[str], folder: Path, stack: ExitStack) -> Side:
    """A peer that ``stack`` closes.

    Raises:
        SideFailed: It is not installed, or does not load.
    """
    kind = kind_of(peer)
    if kind in PACKAGES and version_of(peer) is None:
        raise SideFailed(f"{peer} {not_installed(ENVIRONMENTS / kind)}")
    return stack.enter_context(closing(Side(peer, job, settings, folder, python_of(peer))))


def not_installed(environment: Path) -> str:
    """Why an environment has no peer: the last error in the log of `make bench-env`, if it has one.

    The log is ``NAME.log`` beside the environment. It exists where the installation failed.
    """
    log = environment.with_name(f"{environment.name}.log")
    if not log.is_file():
        make = "test-vllm" if environment.name == "vllm" else "bench-env"
        return f"is not installed under {environment}; `make {make}`"
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    errors = [line for line in lines if line.lower().startswith("error:")]
    return f"did not install: {(errors or lines or ['no reason was given'])[-1]}"


def in_turn(
    sides: Sequence[Side], rows: int, repeats: int, tick: Callable[[], Any]
) -> list[Measured]:
    """Run every setting of every side in turn, after one run of each to warm up."""
    for side in sides:
        for setting in side.settings:
            side.run(setting, range(min(rows, WARM_UP_ROWS)))
    calls = {
        (s.name, setting): partial(s.run, setting, range(rows))
        for s in sides
        for setting in s.settings
    }
    return measured(common.in_turn(calls, repeats, tick))


def in_fresh_turn(
    sides: Sequence[Side], blocks: Mapping[int, Sequence[range]], tick: Callable[[], Any]
) -> list[Measured]:
    """Run every setting of every side in turn, each time over rows that it has not answered.

    Args:
        blocks: By the rows that a setting decodes together: the rows of each repeat.
    """
    calls, repeats = {}, 0
    for side in sides:
        for setting in side.settings:
            own = blocks[int(setting.split()[1])]
            calls[side.name, setting] = partial(_next, side, setting, iter(own))
            repeats = len(own)
    return measured(common.in_turn(calls, repeats, tick))


def _next(side: Side, setting: str, blocks: Iterator[range]) -> tuple[Ran, float]:
    return side.run(setting, next(blocks))


def measured(found: Mapping[tuple[str, str], Sequence[tuple[Ran, float]]]) -> list[Measured]:
    """The runs of each side and setting, with the memory after the last one."""
    return [Measured(*key, [ran for ran, _ in runs], runs[-1][1]) for key, runs in found.items()]
