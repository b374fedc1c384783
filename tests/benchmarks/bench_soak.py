"""A steady load for long: memory, file handles and latency must not creep; Redis goes away once.

    python tests/benchmarks/bench_soak.py
    python tests/benchmarks/bench_soak.py --minutes 3 --redis-down 30

Clients ask a service of two replicas of a tiny model as fast as they are answered for some seconds,
then at four fifths of that rate for --minutes. Half of the way Redis is killed for --redis-down
seconds: answers must go on, with drafts, while /readyz says degraded, and then ready again. The
processes that requests pass through are looked at every few seconds; what they hold in the last
third of the time is compared with the second. Every answer is compared with the model's own. Tables
go to stdout, progress to stderr; the last line of stdout is one JSON object. The exit code is 1
where an answer was wrong or missing, a process ended, or grew beyond --most-growth or --most-files,
p99 rose from the second third to the last beyond --most-slower, or Redis was missed.
"""

import json
import os
import sys
import tempfile
import time
import uuid
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench_command import parser_of, to_stderr

HERE = Path(__file__).parent
_LOAD = 0.8  # of the full rate
_LOOK_S = 5.0
_SAY_S = 30.0
_WARM_ANSWERS, _WARM_S = 64, 120.0  # the first ones wait for what is compiled


@dataclass(frozen=True)
class Asked:
    """The command line."""

    minutes: float
    redis_down: float
    clients: int
    capacity_seconds: float
    most_growth: float
    most_files: float
    most_slower: float


def arguments() -> Asked:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--minutes", type=float, default=30.0, help="of steady load (30)")
    add("--redis-down", type=float, default=30.0, help="seconds that Redis is away; 0: never (30)")
    add("--clients", type=int, default=8, help="that ask at the same time (8)")
    add("--capacity-seconds", type=float, default=20.0, help="to find the full rate (20)")
    add("--most-growth", type=float, default=16.0, help="MiB that one process may grow by (16)")
    add("--most-files", type=float, default=8.0, help="file handles that it may grow by (8)")
    add("--most-slower", type=float, default=1.5, help="times that p99 may rise (1.5)")
    return Asked(**vars(parser.parse_args()))


def main() -> int:
    asked = arguments()
    os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")  # before torch is imported
    tests = HERE.parent
    sys.path[:0] = [str(folder) for folder in (tests / "integration" / "serve", tests, HERE)]
    from draft_report import git_revision
    from soak_load import Load

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tasc-soak-")))
        to_stderr("starting a service of two replicas ...")
        base, store, mark, questions = started(stack, folder)
        full = full_rate(Load(base, questions, asked.clients), asked.capacity_seconds)
        to_stderr(f"{full:.0f} requests/s at most; {_LOAD:.0%} of it, {asked.minutes:g} minutes")
        with Load(base, questions, asked.clients, _LOAD * full) as load:
            found = watched(load, store, mark, asked)
    found |= {
        "requests": len(load.answers) + load.failed.total(),
        "failed": load.failed.total(),
        "failed_by": dict(load.failed),
        "wrong": load.wrong,
        "full_rate": round(full, 1),
        "minutes": asked.minutes,
        "git": git_revision(),
    }
    show(found)
    bad = faults(found, asked)
    for fault in bad:
        print(f"NOT AS IT MUST BE: {fault}")
    print(json.dumps(found))
    return int(bool(bad))


def started(stack: ExitStack, folder: Path) -> tuple[str, Any, str, Any]:
    """Where it answers, its Redis, the mark of its processes, and questions with their answers."""
    from fuzz_service import MARK

    os.environ[MARK] = mark = uuid.uuid4().hex
    from chaos_questions import questions_of
    from ray import serve
    from serving import ALPHA, make_task

    from killable import RedisServer
    from tasc_jobs.index_job import build_and_publish
    from tasc_jobs.ray_local import local_ray
    from tasc_serve import app
    from tasc_serve.settings import ServeSettings
    from tasc_store import CorpusRow, CorpusStore, TaskStore, connect

    store = RedisServer(folder / "redis")
    stack.callback(store.kill)
    record = (task := make_task(folder / ALPHA, ALPHA)).record
    with connect(store.url) as client:
        TaskStore(client).put(record)
        questions = questions_of(task, store.url)
        rows = [CorpusRow(str(i), q.body["prompt"], q.text) for i, q in enumerate(questions)]
        CorpusStore(client, record.corpus_name).append(rows)
    stack.enter_context(local_ray(num_cpus=4, object_store_mb=100))
    build_and_publish(store.url, record)
    settings = {
        "tasks": [{"name": ALPHA, "replicas": 2, "num_cpus": 0.1}],
        "http": {"port": 0, "gateway_num_cpus": 0.1},
        "engine": {"rows": 8, "max_model_len": 256, "cost_aware": False},
        "cache_dir": str(folder / "cache"),
    }
    base = app.start(ServeSettings.model_validate(settings), store.url)
    stack.callback(serve.shutdown)
    return base, store, mark, questions


def full_rate(load: Any, seconds: float) -> float:
    from chaos_clients import wait_until

    with load:
        if not wait_until(lambda: len(load.answers) >= _WARM_ANSWERS, _WARM_S):
            raise TimeoutError(f"{len(load.answers)} answers in {_WARM_S:g} s: {load.failed}")
        begin = time.monotonic()
        time.sleep(seconds)
        return float(load.rate(begin, time.monotonic()))


def watched(load: Any, store: Any, mark: str, asked: Asked) -> dict[str, Any]:
    """Look on until the time is over, with Redis away in the middle."""
    from fuzz_service import Target, processes
    from soak_load import percentile
    from soak_watch import Looks

    begin, length = time.monotonic(), asked.minutes * 60
    looks, away, said_at = Looks(), None, 0.0
    while (at := time.monotonic() - begin) < length:
        looks.add(at, processes(Target(load.base, mark=mark)))
        if away is None and asked.redis_down and at >= length / 2:
            away = without_redis(load, store, asked.redis_down)
        if at >= said_at:
            failed = load.failed.total()
            to_stderr(f"{at:.0f} of {length:.0f} s, {len(load.answers)} answers, {failed} failed")
            said_at = at + _SAY_S
        time.sleep(min(_LOOK_S, length / 30))
    looks.add(length * (1 - 1e-9), processes(Target(load.base, mark=mark)))  # of the last third
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


def without_redis(load: Any, store: Any, seconds: float) -> dict[str, Any]:
    """Kill it, see what the service says and how it answers, and start it again."""
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


def faults(found: dict[str, Any], asked: Asked) -> list[str]:
    """What is not as it must be."""
    redis, growth = found["redis"], found["growth"].values()
    _, second, last = (p99 or float("inf") for p99 in found["p99_ms"])
    wrong = {
        "requests failed": found["failed"],
        "answers were wrong": found["wrong"],
        "no process was seen": not growth,
        "processes ended": found["ended"],
        "p99 rose": last > asked.most_slower * second,
        "memory grew": any(g["memory_mib"] > asked.most_growth for g in growth),
        "file handles grew": any(g["files"] > asked.most_files for g in growth),
    }
    if redis:
        wrong |= {
            "no drafts without Redis": not redis["accepted_draft_tokens"],
            "/readyz did not say degraded": "degraded" not in redis["said"],
            "/readyz did not say ready again": redis["ready_again_s"] is None,
        }
    return [what for what, so in wrong.items() if so]


def show(found: dict[str, Any]) -> None:
    print(f"{'process':28}{'memory, MiB':>14}{'file handles':>14}")
    for name, growth in found["growth"].items():
        print(f"{name:28}{growth['memory_mib']:>+14.2f}{growth['files']:>+14.0f}")
    print(f"p50 by thirds of the time: {found['p50_ms']} ms; p99: {found['p99_ms']} ms")
    if redis := found["redis"]:
        print(
            f"Redis away for {redis['seconds']:g} s: {redis['answers']} answers,"
            f" {redis['failed']} failed, /readyz said {', '.join(redis['said'])}; ready again after"
            f" {redis['ready_again_s']} s"
        )


if __name__ == "__main__":
    sys.exit(main())
