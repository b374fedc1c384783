"""Run a steady load for long: memory, file handles and latency must not grow; Redis fails once.

    python benchmarks/chaos/bench_soak.py
    python benchmarks/chaos/bench_soak.py --minutes 3 --redis-down 30

Clients ask a service of two replicas of a tiny model as fast as they are answered for some seconds,
then at four fifths of that rate for --minutes. After half of the time Redis is killed for
--redis-down seconds: requests must still be answered with drafts, and /readyz must say degraded,
then ready again. The processes that requests pass through are observed every few seconds; their
memory and file handles in the last third of the time are compared with those in the second. Every
answer is compared with that of the model. Tables go to stdout, progress to stderr; the last line of
stdout is one JSON object. The exit code is 1 if an answer was wrong or missing, a process ended or
grew by more than --most-growth or --most-files, p99 rose from the second third to the last by more
than --most-slower, or the failure of Redis had another effect than described.
"""

import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # modules are found from the repository's root, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from benchmarks.chaos.clients import Load, Question, percentile, wait_until
from benchmarks.common import (
    finish,
    git_revision,
    parser_of,
    show_table,
    to_stderr,
    use_one_thread,
    use_test_helpers,
)
from benchmarks.serve.service import Process, mark_processes, processes, served, serving_ray

_LOAD = 0.8  # of the full rate
_LOOK_S = 5.0
_SAY_S = 30.0
_WARM_ANSWERS, _WARM_S = 64, 300.0  # code is compiled for the first answers
_MIB = 2**20


@dataclass(frozen=True)
class Options:
    """The command line."""

    minutes: float
    redis_down: float
    clients: int
    capacity_seconds: float
    most_growth: float
    most_files: float
    most_slower: float


def arguments() -> Options:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--minutes", type=float, default=30.0, help="minutes of steady load (30)")
    add("--redis-down", type=float, default=30.0, help="seconds without Redis; 0: never (30)")
    add("--clients", type=int, default=8, help="number of clients at the same time (8)")
    add("--capacity-seconds", type=float, default=20.0, help="seconds to find the full rate (20)")
    add("--most-growth", type=float, default=16.0, help="maximum growth of one process in MiB (16)")
    add(
        "--most-files",
        type=float,
        default=8.0,
        help="maximum number of further file handles (8)",
    )
    add("--most-slower", type=float, default=1.5, help="maximum factor by which p99 may rise (1.5)")
    return Options(**vars(parser.parse_args()))


def main() -> int:
    options = arguments()
    use_one_thread()
    use_test_helpers("serving")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tasc-soak-")))
        to_stderr("starting a service of two replicas ...")
        base, store, mark, questions = started(stack, folder)
        full = full_rate(Load(base, questions, options.clients), options.capacity_seconds)
        to_stderr(f"{full:.0f} requests/s at most; {_LOAD:.0%} of it, {options.minutes:g} minutes")
        with Load(base, questions, options.clients, _LOAD * full) as load:
            found = watched(load, store, mark, options)
    found |= {
        "requests": len(load.answers) + load.failed.total(),
        "failed": load.failed.total(),
        "failed_by": dict(load.failed),
        "wrong": load.wrong,
        "full_rate": round(full, 1),
        "minutes": options.minutes,
        "git": git_revision(),
    }
    show(found)
    bad = faults(found, options)
    for fault in bad:
        print(f"FAIL: {fault}")
    finish(found)
    return int(bool(bad))


def started(stack: ExitStack, folder: Path) -> tuple[str, Any, str, list[Question]]:
    """Start the service; its URL, its Redis, the mark of its processes, and questions."""
    mark = mark_processes()
    from serving import ALPHA, make_task

    from benchmarks.chaos.questions import questions_of
    from killable import RedisServer
    from tasc_jobs.index.build import build_and_publish
    from tasc_store import CorpusRow, CorpusStore, TaskStore, connect

    store = RedisServer(folder / "redis")
    stack.callback(store.kill)
    record = (task := make_task(folder / ALPHA, ALPHA)).record
    with connect(store.url) as client:
        TaskStore(client).put(record)
        questions = questions_of(task, store.url)
        rows = [CorpusRow(str(i), q.body["prompt"], q.text) for i, q in enumerate(questions)]
        CorpusStore(client, record.corpus_name).append(rows)
    stack.enter_context(serving_ray())
    build_and_publish(store.url, record)
    settings = {
        "tasks": [{"name": ALPHA, "replicas": 2, "num_cpus": 0.1}],
        "http": {"port": 0, "gateway_num_cpus": 0.1},
        "engine": {"rows": 8, "max_model_len": 256, "cost_aware": False},
        "cache_dir": str(folder / "cache"),
    }
    return stack.enter_context(served(settings, store.url)), store, mark, questions


@dataclass(frozen=True)
class Growth:
    """The growth of a process: its median in the last third of the time minus that in the second.

    The first third does not count: caches fill, and Python and the allocator reach their size.

    Attributes:
        memory_mib: Resident memory.
        files: Open file handles.
    """

    memory_mib: float
    files: float


@dataclass
class Looks:
    """Observations of processes over time."""

    _seen: list[tuple[float, dict[int, Process]]] = field(default_factory=list)

    def add(self, at: float, processes: dict[int, Process]) -> None:
        self._seen.append((at, processes))

    def growth(self, length: float) -> dict[str, Growth]:
        """The growth of each process that exists throughout the last two thirds."""
        names = {pid: f"{p.role} {pid}" for _, seen in self._seen for pid, p in seen.items()}
        found = {name: self._of(pid, length) for pid, name in sorted(names.items())}
        return {name: growth for name, growth in found.items() if growth}

    def ended(self, length: float) -> list[str]:
        """Processes of the first third that do not exist at the last look."""
        first = {pid: p for at, seen in self._seen if at < length / 3 for pid, p in seen.items()}
        last = self._seen[-1][1] if self._seen else {}
        return sorted(f"{p.role} {pid}" for pid, p in first.items() if pid not in last)

    def _of(self, pid: int, length: float) -> Growth | None:
        middle, last = (self._between(pid, length * i / 3, length * (i + 1) / 3) for i in (1, 2))
        if not (middle and last):
            return None
        memory, files = (
            statistics.median(getattr(p, what) for p in last)
            - statistics.median(getattr(p, what) for p in middle)
            for what in ("memory", "files")
        )
        return Growth(round(memory / _MIB, 2), files)

    def _between(self, pid: int, begin: float, end: float) -> list[Process]:
        return [seen[pid] for at, seen in self._seen if begin <= at < end and pid in seen]


def full_rate(load: Load, seconds: float) -> float:
    with load:
        if not wait_until(lambda: len(load.answers) >= _WARM_ANSWERS, _WARM_S):
            raise TimeoutError(f"{len(load.answers)} answers in {_WARM_S:g} s: {load.failed}")
        begin = time.monotonic()
        time.sleep(seconds)
        return load.rate(begin, time.monotonic())


def watched(load: Load, store: Any, mark: str, options: Options) -> dict[str, Any]:
    """Observe the service until the time is over; Redis fails in the middle."""
    begin, length = time.monotonic(), options.minutes * 60
    looks, away, said_at = Looks(), None, 0.0
    while (at := time.monotonic() - begin) < length:
        looks.add(at, processes(mark))
        if away is None and options.redis_down and at >= length / 2:
            away = without_redis(load, store, options.redis_down)
        if at >= said_at:
            failed = load.failed.total()
            to_stderr(f"{at:.0f} of {length:.0f} s, {len(load.answers)} answers, {failed} failed")
            said_at = at + _SAY_S
        time.sleep(min(_LOOK_S, length / 30))
    looks.add(length * (1 - 1e-9), processes(mark))  # of the last third
    edges = [begin + length * i / 3 for i in range(4)]
    thirds = [load.between(*pair) for pair in pairwise(edges)]
    return {
        "requests_per_second": round(load.rate(begin, begin + length), 1),
        "p50_ms": [percentile(third, 50) for third in thirds],
        "p99_ms": [percentile(third, 99) for third in thirds],
        "redis": away,
        "ended": looks.ended(length),
        "growth": {name: asdict(growth) for name, growth in looks.growth(length).items()},
    }


def without_redis(load: Load, store: Any, seconds: float) -> dict[str, Any]:
    """Kill Redis, observe the answers of the service, and start Redis again."""
    import httpx

    to_stderr(f"Redis is away for {seconds:g} s")
    failed, begin, said, accepted = load.failed.total(), time.monotonic(), set[str](), 0
    question = max(load.questions, key=lambda q: "seed" not in q.body and q.tokens)
    store.kill()
    with httpx.Client(base_url=load.base, timeout=30) as client:
        while time.monotonic() - begin < seconds:
            said.add(client.get("/readyz").json()["status"])
            metrics = client.post("/v1/completions", json=question.body).json()["metrics"]
            accepted += metrics["speculative_decoding"]["num_accepted_draft_tokens"]
            time.sleep(0.5)
        store.start()
        back = time.monotonic()
        while client.get("/readyz").json()["status"] != "ready":
            if time.monotonic() - back > 60:
                break
            time.sleep(0.1)
    ready_s = time.monotonic() - back
    return {
        "seconds": seconds,
        "answers": len(load.between(begin, back)),
        "failed": load.failed.total() - failed,
        "accepted_draft_tokens": accepted,
        "said": sorted(said),
        "ready_again_s": round(ready_s, 2) if ready_s < 60 else None,
    }


def faults(found: dict[str, Any], options: Options) -> list[str]:
    """The requirements that are not met."""
    redis, growth = found["redis"], found["growth"].values()
    _, second, last = (p99 or float("inf") for p99 in found["p99_ms"])
    wrong = {
        "requests failed": found["failed"],
        "answers were wrong": found["wrong"],
        "no process was seen": not growth,
        "processes ended": found["ended"],
        "p99 rose": last > options.most_slower * second,
        "memory grew": any(g["memory_mib"] > options.most_growth for g in growth),
        "file handles grew": any(g["files"] > options.most_files for g in growth),
    }
    if redis:
        wrong |= {
            "no drafts without Redis": not redis["accepted_draft_tokens"],
            "/readyz did not say degraded": "degraded" not in redis["said"],
            "/readyz did not say ready again": redis["ready_again_s"] is None,
        }
    return [what for what, so in wrong.items() if so]


def show(found: dict[str, Any]) -> None:
    show_table(
        "growth from the second third of the time to the last",
        ["process", "memory, MiB", "file handles"],
        [[n, f"{g['memory_mib']:+.2f}", f"{g['files']:+.0f}"] for n, g in found["growth"].items()],
    )
    print(f"p50 by thirds of the time: {found['p50_ms']} ms; p99: {found['p99_ms']} ms")
    if redis := found["redis"]:
        print(
            f"Redis away for {redis['seconds']:g} s: {redis['answers']} answers,"
            f" {redis['failed']} failed, /readyz said {', '.join(redis['said'])}; ready again after"
            f" {redis['ready_again_s']} s"
        )


if __name__ == "__main__":
    sys.exit(main())
