"""Batch jobs that are killed: their input, and the driver process of a job.

A job is `tasc generate` in a process of its own. Its rows have ids of their own, and its progress
is read from its output parts and from Redis.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import ray

from benchmarks.common import to_stderr
from killable import RedisServer, pids
from tasc_jobs.demo.tasks import data_file, demo_record, read_split
from tasc_jobs.index.build import build_and_publish
from tasc_jobs.index.ingest import ingest
from tasc_jobs.ray_local import local_ray
from tasc_store import TaskRecord, TaskStore, connect
from tasc_text import TaskTokenizer

TASK = "massive_en"
TINY_TOKENS = 48
_COMMAND = "from tasc_jobs.cli.main import main; main()"
# The command would measure the step costs of a new model, which takes longer than the tiny job.
_TINY_COMMAND = """
import sys
from pathlib import Path
from tasc_jobs.batch.generate import generate
from tasc_jobs.batch.inputs import Source
from tasc_jobs.ray_local import local_ray
from tasc_runtime.engine_settings import EngineSettings
_, task, _, source, _, output, _, url, *_ = sys.argv[1:]
engine = EngineSettings(max_model_len=256, cost_aware=False)
with local_ray():
    generate(url, task, Source.of(source), Path(output), engine=engine, window_rows=200)
"""
_POLL_S = 0.02
_DEADLINE_S = 3 * 3600.0
_MORE = 100  # rows; an engine whose driver was killed saves some rows before it ends
_LOST_S = 1.0  # seconds of writes that Redis loses
Kind: TypeAlias = Literal["driver", "engine", "redis"]
# Shares of the rows; after a later kill the job could end before the kill is noticed.
_FROM, _TO = 0.05, 0.85


@dataclass(frozen=True)
class Fault:
    """The process to kill once so many rows are done."""

    kind: Kind
    at_row: int


@dataclass(frozen=True)
class Hit:
    """A fault and its effect.

    Attributes:
        done: Rows that were finished at the kill.
        left: Those of them that were still finished at the first look afterwards.
        recovery_seconds: The time until a hundred more rows were finished than at the kill.
    """

    kind: Kind
    done: int
    left: int
    recovery_seconds: float

    @property
    def redone(self) -> int:
        return max(0, self.done - self.left)


# The input


@dataclass(frozen=True)
class Work:
    """A task, its input, and the program that answers the input."""

    task: str
    source: Path
    rows: int
    code: str

    def command(self, output: Path, url: str) -> list[str]:
        """The command line of `tasc generate`."""
        files = ["--input", str(self.source), "--output", str(output)]
        options = ["--redis-url", url, "--max-model-len", "256", "--json"]
        return [sys.executable, "-c", self.code, "generate", self.task, *files, *options]


def prepare(url: str, folder: Path, rows: int, *, tiny: bool) -> Work:
    """Register the task and write its input; build an index unless the model is tiny."""
    record = _tiny(folder / "model") if tiny else demo_record(TASK)
    with closing(connect(url)) as client:
        TaskStore(client).put(record)
        if not tiny:
            to_stderr("draft index ...")
            ingest(client, TASK, [data_file(TASK, "train")], reject=folder / "rejects")
    if not tiny:
        with local_ray():
            build_and_publish(url, record)
    inputs = [row["input"] for row in read_split(TASK, "test")]
    source = folder / "in.jsonl"
    with source.open("w", encoding="utf-8") as file:
        for number, text in enumerate(islice(cycle(inputs), rows)):
            file.write(json.dumps({"id": f"{number:06}", "input": text}) + "\n")
    return Work(record.name, source, rows, _TINY_COMMAND if tiny else _COMMAND)


def _tiny(folder: Path) -> TaskRecord:
    import torch

    from tiny import make_model, make_tokenizer

    make_tokenizer(folder)
    make_model(folder, dtype=torch.float32)
    return TaskRecord(
        name=TASK,
        model=str(folder),
        fingerprint=TaskTokenizer.from_folder(folder).fingerprint,
        template="say {input}\n",
        max_tokens=TINY_TOKENS,
    )


# The job


@dataclass
class Run:
    """A finished job.

    Attributes:
        starts: The number of starts of its driver.
    """

    output: Path
    seconds: float
    starts: int
    hits: list[Hit] = field(default_factory=list)


class Driver:
    """The driver process of a job, with its own Ray or with that of this process."""

    def __init__(self, server: RedisServer, work: Work, folder: Path, *, own_ray: bool) -> None:
        self._server, self._work, self._folder = server, work, folder
        self._own_ray = own_ray
        self._sizes: deque[tuple[float, int]] = deque()
        self._process: subprocess.Popen[bytes] | None = None
        self.starts = 0

    def end(self) -> None:
        """Kill the driver if it is still running."""
        if self._process and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def run(self, output: Path, faults: Sequence[Fault]) -> Run:
        """Run the job, with these faults."""
        began, self.starts, hits = time.monotonic(), 0, list[Hit]()
        to_stderr(f"{output.stem}: {self._work.rows} rows ...")
        self._start(output)
        for fault in faults:
            if not self._wait_for(output, fault.at_row):
                break
            hits.append(self._hit(output, fault))
            to_stderr(f"  {hits[-1]}")
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
        """Wait until so many rows are done or the driver has ended; whether it is still running."""
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
        """The size of the log of Redis so many seconds ago."""
        then = time.monotonic() - seconds
        return max((size for at, size in self._sizes if at <= then), default=1 << 62)

    def _done(self, output: Path) -> int:
        """The number of finished rows: lines of the job's records."""
        with suppress(OSError):
            records = output.with_name(output.name + ".job") / "records.jsonl"
            return records.read_bytes().count(b"\n")
        return 0


def planned(kills: int, seed: int, rows: int) -> list[Fault]:
    """Faults in the order of their moments; all kinds occur before one occurs again."""
    chance = random.Random(seed)
    kinds: list[Kind] = []
    while len(kinds) < kills:
        more = list(get_args(Kind))
        chance.shuffle(more)
        kinds += more
    moments = sorted(chance.uniform(_FROM, _TO) for _ in range(kills))
    return [Fault(kind, round(at * rows)) for kind, at in zip(kinds, moments, strict=False)]


def compared(alone: Run, killed: Run, rows: int) -> dict[str, Any]:
    """The outputs of both jobs compared by bytes and ids, their speed, and the repeated work."""
    with killed.output.open(encoding="utf-8") as file:
        counts = Counter(json.loads(line)["id"] for line in file)
    wanted = {f"{number:06}" for number in range(rows)}
    return {
        "rows": rows,
        "kills": len(killed.hits),
        "identical": alone.output.read_bytes() == killed.output.read_bytes(),
        "missing": len(wanted - counts.keys()),
        "doubled": sum(count > 1 for count in counts.values()),
        "redone": sum(hit.redone for hit in killed.hits),
        "starts": killed.starts,
        "undisturbed": {"seconds": alone.seconds, "rows_per_second": rows / alone.seconds},
        "disturbed": {"seconds": killed.seconds, "rows_per_second": rows / killed.seconds},
        "faults": [{**asdict(hit), "redone": hit.redone} for hit in killed.hits],
    }
