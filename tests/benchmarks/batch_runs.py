"""Runs `tasc generate` in a process of its own, looks at how far it is, and kills parts of it."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import ray
import redis
from batch_faults import Fault, Hit
from batch_work import Work

from killable import RedisServer, pids

_PART = re.compile(r"part-\d+-(\d+)\.jsonl")
_POLL_S = 0.02
_DEADLINE_S = 3 * 3600.0
_MORE = 100  # rows; an engine whose driver was killed saves some before it ends
_LOST_S = 1.0  # of what Redis wrote last


@dataclass
class Run:
    """A finished job.

    Attributes:
        starts: How often its driver was started.
    """

    output: Path
    seconds: float
    starts: int
    hits: list[Hit] = field(default_factory=list)


class Driver:
    """The job's driver process, on a Ray of its own or on this process's."""

    def __init__(self, server: RedisServer, work: Work, folder: Path, *, own_ray: bool) -> None:
        self._server, self._work, self._folder = server, work, folder
        self._own_ray = own_ray
        self._client = redis.Redis.from_url(server.url, socket_timeout=5)
        self._sizes: deque[tuple[float, int]] = deque()
        self._process: subprocess.Popen[bytes] | None = None
        self.starts = 0

    def undisturbed(self, output: Path) -> Run:
        return self._run(output, ())

    def disturbed(self, output: Path, faults: Sequence[Fault]) -> Run:
        return self._run(output, faults)

    def end(self) -> None:
        """Kill the driver if it runs, as when the benchmark itself is ended."""
        if self._process and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def _run(self, output: Path, faults: Sequence[Fault]) -> Run:
        began, self.starts, hits = time.monotonic(), 0, list[Hit]()
        print(f"{output.stem}: {self._work.rows} rows ...", file=sys.stderr)
        self._start(output)
        for fault in faults:
            if not self._wait_for(output, fault.at_row):
                break
            hits.append(self._hit(output, fault))
            print(f"  {hits[-1]}", file=sys.stderr)
        self._wait_for(output, None)
        assert self._process is not None
        if self._process.returncode:
            log = (self._folder / "driver.log").read_text(errors="replace")
            raise RuntimeError(f"tasc generate failed: {log[-2000:]}")
        return Run(output, time.monotonic() - began, self.starts, hits)

    def _start(self, output: Path) -> None:
        env = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
        if not self._own_ray:
            env["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
        command = self._work.command(output, self._server.url)
        with (self._folder / "driver.log").open("ab") as log:
            self._process = subprocess.Popen(
                command, env=env, stdout=log, stderr=log, start_new_session=True
            )
        self.starts += 1

    def _hit(self, output: Path, fault: Fault) -> Hit:
        done, began = self._done(output), time.monotonic()
        assert self._process is not None
        if fault.kind == "driver":
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._start(output)
        elif fault.kind == "engine":
            below = os.getpid() if not self._own_ray else self._process.pid
            for pid in pids("ray::EngineActor", below):
                os.kill(pid, signal.SIGKILL)
        else:
            self._server.kill()
            self._server.cut(self._size_before(_LOST_S))
            self._server.start()
        left = self._done(output)
        self._wait_for(output, done + _MORE)
        return Hit(fault.kind, done, left, time.monotonic() - began)

    def _wait_for(self, output: Path, least: int | None) -> bool:
        """Until so many rows are done, or the driver has ended; whether it goes on."""
        deadline = time.monotonic() + _DEADLINE_S
        assert self._process is not None
        while self._process.poll() is None:
            if least is not None and self._done(output) >= least:
                return True
            assert time.monotonic() < deadline, "the job does not end"
            self._sizes.append((time.monotonic(), self._server.log.stat().st_size))
            while self._sizes[0][0] < time.monotonic() - 2 * _LOST_S:
                self._sizes.popleft()
            time.sleep(_POLL_S)
        return False

    def _size_before(self, seconds: float) -> int:
        """Of what Redis had written so long ago."""
        then = time.monotonic() - seconds
        return max((size for at, size in self._sizes if at <= then), default=1 << 62)

    def _done(self, output: Path) -> int:
        """Rows in parts and in Redis."""
        folder, rows = output.with_name(output.name + ".job"), 0
        with suppress(OSError, ValueError, redis.RedisError):
            stops = (_PART.fullmatch(path.name) for path in folder.iterdir())
            rows = max((int(match[1]) for match in stops if match), default=0)
            job = json.loads((folder / "job.json").read_text())["id"]
            key = f"tasc:{{{self._work.task}}}:job:{job}:results"
            rows += sum(int(row) >= rows for row in self._client.hkeys(key))
        return rows
