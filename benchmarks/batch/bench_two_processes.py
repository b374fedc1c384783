"""Time the statistics job and the index build on a large corpus with one and two worker processes.

    python benchmarks/batch/bench_two_processes.py
    python benchmarks/batch/bench_two_processes.py --rows 200000 --repeats 3
    python benchmarks/batch/bench_two_processes.py --rows 1000000 --parts stats --before CHECKOUT

The rows are the shipped MASSIVE rows over and over, each with its number as the last word of its
input, so all inputs differ. They are written to a folder of Parquet files, and `tasc ingest` puts
them into a Redis server of its own: a corpus in Redis is what both jobs read.

stats is the statistics job with its usual options, index is the index build until the version is
current. The sides differ in the number of logical CPUs of their Ray, which limits its worker
processes. Each run is a process with a Ray of its own, the sides take turns, and the workers are
started by a job on a small corpus before the clock. All runs must give the same bytes.

The ceiling is the throughput of two processes that count in a loop, against one alone: two CPUs
may be two threads of one core, and Redis and the driver, which sends work to the workers, run
beside them. CPU seconds are those of the driver, the workers and Redis; memory is the greatest
resident memory of one process, without what it shares with others. --before names a git worktree
of another commit. The last line of stdout is one JSON object. The exit code is 1 if the sides
differ or the bar is missed.
"""

import argparse
import hashlib
import json
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, redirect_stdout, suppress
from dataclasses import replace
from functools import partial
from itertools import cycle, islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

if __name__ == "__main__":  # modules are found from the repository's root, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from benchmarks.batch.bench_counting import SHIPPED, Run, timed
from benchmarks.common import (
    ROOT,
    Figure,
    about,
    add_json,
    add_parts,
    add_repeats,
    at_least,
    finish,
    folder,
    in_turn,
    parser_of,
    read_rows,
    rounded,
    show_figures,
    to_stderr,
    use_one_thread,
    use_test_helpers,
    versions,
)

BAR: Final = 1.7  # times the seconds of two processes
TASK: Final = "massive_en"
_FEW, _FEW_ROWS = "few", 2000
_FILE_ROWS, _GROUP_ROWS = 250_000, 50_000
_SAMPLE_S = 0.25
_CEILING_S = 2.0
_TICKS: Final = os.sysconf("SC_CLK_TCK")


# The sides, each in a process of its own


class Watched(threading.Thread):
    """CPU seconds and memory of this process, its workers and Redis, by kind of process."""

    def __init__(self, redis: int) -> None:
        super().__init__(daemon=True)
        self._redis, self._ended = redis, threading.Event()
        self._first: dict[int, float] = {}
        self._cpu: dict[int, float] = {}
        self._kinds: dict[int, str] = {}
        self.peak_mb: dict[str, float] = {}

    def run(self) -> None:
        while not self._ended.wait(_SAMPLE_S):
            self._look()

    def end(self) -> dict[str, dict[str, float]]:
        self._ended.set()
        self.join()
        self._look()
        cpu: dict[str, float] = {}
        for pid, seconds in self._cpu.items():
            kind = self._kinds[pid]
            cpu[kind] = cpu.get(kind, 0.0) + seconds - self._first[pid]
        return {"cpu": cpu, "peak_mb": self.peak_mb}

    def start(self) -> None:
        self._look()
        super().start()

    def _look(self) -> None:
        began = not self._first
        found = {os.getpid(): "driver", self._redis: "redis"}
        for pid in below(os.getpid()):
            try:
                command = Path(f"/proc/{pid}/cmdline").read_text()
            except OSError:
                continue
            found[pid] = (
                "worker" if command.startswith("ray::") and "Agent" not in command else "ray"
            )
        for pid, kind in found.items():
            try:
                ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
                status = Path(f"/proc/{pid}/status").read_text()
            except OSError:
                continue  # it ended while we looked
            seconds = sum(map(int, ticks)) / _TICKS
            self._first.setdefault(pid, seconds if began else 0.0)
            self._kinds[pid] = kind if kind != "ray" else self._kinds.get(pid, kind)
            self._cpu[pid] = seconds
            own = sum(map(int, re.findall(r"(?m)^Rss(?:Anon|File):\s+(\d+) kB", status))) / 1024
            self.peak_mb[kind] = max(self.peak_mb.get(kind, 0.0), own)


def below(pid: int) -> Iterator[int]:
    """Ids of the descendants of a process; `killable` would bring torch into the driver."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it ended while we looked
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    new = children.get(pid, [])
    while new:
        yield from new
        new = [child for each in new for child in children.get(each, [])]


@contextmanager
def clocked(redis: int, found: dict[str, Any]) -> Iterator[None]:
    watched = Watched(redis)
    watched.start()
    began = time.perf_counter()
    yield
    found["seconds"] = time.perf_counter() - began
    found |= watched.end()


class Stages:
    """A progress function that keeps the seconds of each stage; ``before`` is until the first."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._stage, self._began = "before", time.perf_counter()

    def __call__(self, stage: str, done: int, total: int | None) -> None:
        now = time.perf_counter()
        self.seconds[self._stage] = self.seconds.get(self._stage, 0.0) + now - self._began
        self._stage, self._began = stage, now


def stats(url: str, redis: int, processes: int) -> dict[str, Any]:
    from tasc_jobs.ray_local import local_ray
    from tasc_jobs.statistics.task_statistics import corpus_statistics

    found = dict[str, Any]()
    with local_ray(num_cpus=processes):
        corpus_statistics(url, _FEW, parallelism=2)
        with clocked(redis, found):
            stages = Stages()
            figures = corpus_statistics(url, TASK, progress=stages)
    text = json.dumps(figures.as_json)
    return {
        **found,
        "stages": stages.seconds,
        "digest": hashlib.sha256(text.encode()).hexdigest(),
        "rows": figures.input.rows,
    }


def index(url: str, redis: int, processes: int) -> dict[str, Any]:
    from tasc_jobs.demo.tasks import demo_record
    from tasc_jobs.index.build import build_and_publish
    from tasc_jobs.ray_local import local_ray

    record, found = demo_record(TASK), dict[str, Any]()
    with local_ray(num_cpus=processes):
        build_and_publish(url, replace(record, name=_FEW), parallelism=2)
        with clocked(redis, found):
            stages = Stages()
            artifact, _ = build_and_publish(url, record, progress=stages)
    return {
        **found,
        "stages": stages.seconds,
        "digest": artifact.sha256,
        "rows": artifact.corpus_rows,
    }


SIDES: Final[dict[str, Callable[[str, int, int], dict[str, Any]]]] = {
    "stats": stats,
    "index": index,
}


# The comparison


def write_folder(to: Path, rows: int) -> list[Path]:
    """Write Parquet files of rows whose inputs all differ, and return their paths in order."""
    import pyarrow as pa
    from pyarrow import parquet

    to.mkdir()
    shipped, files = cycle(read_rows(SHIPPED)), list[Path]()
    for first in range(0, rows, _FILE_ROWS):
        numbers = range(first, min(first + _FILE_ROWS, rows))
        some = list(islice(shipped, len(numbers)))
        columns = {
            "id": [str(n) for n in numbers],
            "input": [f"{row['input']} {n}" for n, row in zip(numbers, some, strict=True)],
            "output": [row["output"] for row in some],
        }
        files.append(to / f"{len(files):04}.parquet")
        parquet.write_table(pa.table(columns), files[-1], row_group_size=_GROUP_ROWS)
    return files


def ceiling() -> float:
    """How much more two processes count than one in the same time."""
    spawn = get_context("spawn")
    with spawn.Pool(2) as pool:
        pool.map(_count, [0.1, 0.1], 1)
        one = pool.apply(_count, (_CEILING_S,))
        two = pool.map(_count, [_CEILING_S, _CEILING_S], 1)
    return sum(two) / one


def _count(seconds: float) -> float:
    """Rounds of a loop in numpy in each second of the clock."""
    import numpy as np

    numbers, rounds = np.arange(20_000, dtype=np.int64), 0
    began = time.perf_counter()
    while (spent := time.perf_counter() - began) < seconds:
        np.sort((numbers * 2_654_435_761) % 1_000_003)
        rounds += 1
    return rounds / spent


def compared(
    part: str, url: str, redis: int, options: argparse.Namespace
) -> tuple[list[Figure], dict[str, Any]]:
    checkouts = {"now": ROOT} | ({"before": options.before} if options.before else {})
    runs: dict[str, Callable[[], Run]] = {}
    for name, checkout in checkouts.items():
        for processes in (1, 2):
            side = [str(Path(__file__).resolve()), "--side", part, url, str(redis), str(processes)]
            runs[f"{name}, {processes}"] = partial(timed, checkout, side)
    done = in_turn({name: partial(told, name, run) for name, run in runs.items()}, options.repeats)
    found = {name: [run.found for run in own] for name, own in done.items()}
    figures = list[Figure]()
    for name in checkouts:
        one, two = found[f"{name}, 1"], found[f"{name}, 2"]
        ratios = [a["seconds"] / b["seconds"] for a, b in zip(one, two, strict=True)]
        bar = BAR if name == "now" else None
        figures.append(Figure.of_runs(f"{part}, {name}: two / one", ratios, "x", bar))
        first = {"stats": "count", "index": "tokenise"}[part]  # Ray Data has workers do it
        ratios = [a["stages"][first] / b["stages"][first] for a, b in zip(one, two, strict=True)]
        figures.append(Figure.of_runs(f"  {first}: two / one", ratios, "x"))
        for processes, side in ((1, one), (2, two)):
            title = f"  {processes} processes" if processes > 1 else "  1 process"
            seconds = [run["seconds"] for run in side]
            figures.append(Figure.of_runs(title, seconds, "s"))
            for kind in ("driver", "worker", "redis"):
                used = [run["cpu"].get(kind, 0.0) for run in side]
                figures.append(Figure.of_runs(f"    {kind}", used, "CPU s"))
            for kind in ("driver", "worker"):
                peaks = [run["peak_mb"].get(kind, 0.0) for run in side]
                figures.append(Figure.of_runs(f"    {kind}", peaks, "MB"))
    every = [run for side in found.values() for run in side]
    same = len({run["digest"] for run in every}) == 1
    whole = all(run["rows"] == options.rows for run in every)
    return figures, {"equal": same and whole, "runs": found}


def told(name: str, run: Callable[[], Run]) -> Run:
    """Do a run and tell its figures, since the next may take long."""
    done = run()
    to_stderr(f"  {name}: {json.dumps(rounded(done.found))}")
    return done


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--rows", type=at_least(2), default=5_000_000, help="rows of the corpus (5000000)")
    add_parts(parser, tuple(SIDES))
    add_repeats(parser, 1)
    add("--before", type=folder, help="checkout of an older commit to measure, too")
    add_json(parser)
    return parser.parse_args()


def main() -> int:
    options = arguments()
    use_one_thread()
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    use_test_helpers()
    from killable import RedisServer
    from tasc_jobs.index.ingest import ingest
    from tasc_store import connect

    figures, parts = list[Figure](), dict[str, Any]()
    with ExitStack() as stack:
        here = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-processes-")))
        files = write_folder(here / "corpus", options.rows)
        few = write_folder(here / "few", min(_FEW_ROWS, options.rows))
        server = RedisServer(here / "redis")
        stack.callback(server.kill)
        began = time.perf_counter()
        with closing(connect(server.url)) as client:
            for name, some in ((TASK, files), (_FEW, few)):
                ingest(client, name, some, reject=here / "rejects")
            memory = client.info("memory")["used_memory"] / 2**20
        spent = time.perf_counter() - began
        to_stderr(f"{options.rows} rows ingested in {spent:.0f} s; Redis holds {memory:.0f} MB")
        figures.append(Figure("ingest", options.rows / spent, "rows/s"))
        figures.append(Figure("Redis", memory, "MB"))
        figures.append(Figure("ceiling: two processes / one", ceiling(), "x"))
        for part in options.parts:
            to_stderr(f"{part} ...")
            own, parts[part] = compared(part, server.url, server.process.pid, options)
            figures += own
    show_figures(figures)
    equal = all(found["equal"] for found in parts.values())
    print("all sides have the same bytes" if equal else "the sides DIFFER")
    records = [figure.record for figure in figures]
    made_with = versions("pyarrow", "numpy", "ray", "tokenizers")
    finish(
        {
            "benchmark": "two_processes",
            "rows": options.rows,
            "figures": records,
            **parts,
            "versions": made_with,
            **about(),
        },
        options.json,
    )
    missed = [figure for figure in figures if figure.passed is False]
    return 1 if missed or not equal else 0


def side(part: str, url: str, redis: str, processes: str) -> None:
    """Run one side, and print its record."""
    with redirect_stdout(sys.stderr):
        found = SIDES[part](url, int(redis), int(processes))
    print(json.dumps(found))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--side"]:
        side(*sys.argv[2:])
        sys.exit(0)
    sys.exit(main())
