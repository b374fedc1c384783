"""Processes that benchmarks of the service start and end, and the processor time they take."""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.serve.service import marked, marking, processes

_END_S = 60.0
_TICKS_S = os.sysconf("SC_CLK_TCK")
_ENGINE = "engine"  # the name of the thread that steps an engine
# The kernel does not know the names of Python's threads. Every process that a child starts imports
# this first; the threads that a named one starts have its name.
_NAMED_THREADS = """
import threading

_run = threading.Thread.run


def run(self):
    with open(f"/proc/self/task/{threading.get_native_id()}/comm", "w") as comm:
        comm.write(self.name[:15])
    _run(self)


threading.Thread.run = run
"""


@dataclass(frozen=True)
class Child:
    """A process of this benchmark, with all that it has started."""

    process: "subprocess.Popen[str]"
    mark: str
    log: Path

    def until(self, ready: Callable[[], bool], seconds: float = 300.0) -> None:
        """Wait until it is ready.

        Raises:
            RuntimeError: It has ended, or takes longer.
        """
        deadline = time.monotonic() + seconds
        while not ready():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{self.process.args} did not start:\n{self.log.read_text()}")
            time.sleep(0.2)

    def ask(self, **question: Any) -> Any:
        """Write a line of JSON to its stdin; the answer is the next line of its stdout."""
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError(f"{self.process.args} has ended:\n{self.log.read_text()}")
        return json.loads(answer)

    def processor_ms(self) -> dict[str, float]:
        """Processor time so far by role; that of replicas is without their engines' threads."""
        found: dict[str, float] = defaultdict(float)
        for process in processes(self.mark).values():
            folder = Path(f"/proc/{process.pid}")
            taken = _milliseconds(folder / "stat")
            if process.role.startswith("replica"):
                threads = (folder / "task").iterdir()
                own = sum(_milliseconds(each / "stat", named=_ENGINE) for each in threads)
                found[_ENGINE] += own
                found["replica"] += taken - own
            else:
                found[process.role] += taken
        found["command"] = _milliseconds(Path(f"/proc/{self.process.pid}/stat"))
        return found


@contextmanager
def started(
    arguments: Sequence[str | Path],
    root: Path,
    folder: Path,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Child]:
    """Run Python with the packages of a checkout; ended with all that it started.

    Args:
        folder: Where it works and logs.
    """
    mark = uuid.uuid4().hex
    (folder / "sitecustomize.py").write_text(_NAMED_THREADS)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    paths = (folder, root / "services", root / "pipelines", root)
    log = folder / f"{mark}.log"
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, *map(str, arguments)],
            cwd=folder,
            env={
                **inherited,
                **(environment or {}),
                **marking(mark),
                "PYTHONPATH": os.pathsep.join(map(str, paths)),
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
            start_new_session=True,  # Ctrl-C is for this process, which ends the others
        )
    try:
        yield Child(process, mark, log)
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=_END_S)
        for pid in marked(mark):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def _milliseconds(stat: Path, named: str | None = None) -> float:
    """Processor time of a process or a thread; 0 for a thread of another name."""
    try:
        before, _, after = stat.read_text().rpartition(")")
    except OSError:
        return 0.0  # it has ended
    if named is not None and before.partition("(")[2] != named:
        return 0.0
    user, system = after.split()[11:13]
    return (int(user) + int(system)) / _TICKS_S * 1e3
