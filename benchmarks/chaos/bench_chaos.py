"""Kill replicas, a node, the store and a gateway in turn while clients ask; judge every answer.

    python benchmarks/chaos/bench_chaos.py
    python benchmarks/chaos/bench_chaos.py --requests 2000 --faults replica,hang
    python benchmarks/chaos/bench_chaos.py --hosts --requests 6000

A service of two Ray nodes runs on this machine: two gateways, two replicas of a tiny model in
float32, each on a node of its own, and Redis. Half of the requests stream, half are sampled. Each
is sent again with its Idempotency-Key until it is answered. Every answer is compared with the
answer of the model alone, which is decoded token by token without drafts. The faults come at even
distances: a replica is killed, a replica hangs (SIGSTOP), a gateway is killed, Redis is killed and
started again, a node is removed and another one added. With --hosts each node has a network
namespace of its own, like a separate host, behind the shipped HAProxy file; its processes are
killed, or its cable is pulled for a while. Tables go to stdout, progress to stderr; the last line
of stdout is one JSON object. The exit code is 1 if an answer was wrong, lost or duplicated.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # modules are found from the repository's root, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from benchmarks.chaos import hosts, service
from benchmarks.chaos.clients import Tally, crowd, wait_until
from benchmarks.common import (
    finish,
    git_revision,
    listed,
    parser_of,
    show_table,
    to_stderr,
    use_one_thread,
    use_test_helpers,
)


@dataclass(frozen=True)
class Hit:
    """A fault and its effect on clients.

    Attributes:
        failed: Tries that failed.
        pause_s: The longest time without an answer until the service had recovered.
        recovery_s: The time until the service had recovered; None if it did not.
    """

    fault: str
    failed: int
    failovers: float
    pause_s: float
    recovery_s: float | None


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--requests", type=int, default=20_000, help="number of requests (20000)")
    add("--clients", type=int, default=16, help="number of clients at the same time (16)")
    add("--seed", type=int, default=1, help="seed of the requests (1)")
    add("--faults", help="faults in this order, with commas between (all)")
    add("--hosts", action="store_true", help="use two hosts behind HAProxy; needs root")
    add("--check", action="store_true", help="only check whether this machine can have such hosts")
    add("--cut", type=float, default=25.0, help="seconds that a host is cut off (25)")
    add("--redis-down", type=float, default=5.0, help="seconds without Redis (5)")
    add("--whole-within", type=float, default=120.0, help="seconds to recover from a fault (120)")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    if options.check:
        if why := hosts.why_not():
            to_stderr(why)
        return int(why is not None)
    use_one_thread()
    use_test_helpers("serving", "haproxy_process")
    from benchmarks.chaos.questions import questions_of

    tally, began = Tally(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tasc-chaos-") as folder:
        to_stderr("starting two nodes, two gateways and two replicas ...")
        with started(Path(folder), options) as (chaos, task):
            to_stderr("asking the model itself ...")
            questions = questions_of(task, chaos.store.url)
            begun = time.monotonic()
            threads = crowd(
                chaos.base, questions, options.requests, options.clients, options.seed, tally
            )
            hits = harm_in_turn(chaos, tally, options)
            for thread in threads:
                thread.join()
            asking_s = time.monotonic() - begun
    return report(tally, hits, asking_s, time.monotonic() - began)


def started(folder: Path, options: argparse.Namespace) -> Any:
    """The service on this machine, or on two hosts behind a load balancer."""
    if options.hosts:
        return hosts.running(folder, options.cut)
    return service.running(folder, options.redis_down)


def harm_in_turn(chaos: Any, tally: Tally, options: argparse.Namespace) -> list[Hit]:
    """Cause each fault once its share of the requests is answered, and observe the recovery."""
    faults, hits = faults_of(options), list[Hit]()
    if not wait_until(chaos.whole, options.whole_within):
        raise TimeoutError("the service did not become whole before the first fault")
    for number, fault in enumerate(faults, start=1):
        due = options.requests * number // (len(faults) + 1)
        wait_until(partial(_answered, tally, due), float("inf"))
        to_stderr(f"{tally.requests} answered; now: {fault}")
        failed, begin = tally.tries_failed, time.monotonic()
        chaos.harm(fault)
        failing_over = time.monotonic()
        wait_until(partial(_answered, tally, due + 2 * options.clients), options.whole_within)
        chaos.mend()
        whole = wait_until(chaos.whole, options.whole_within)
        end = time.monotonic()
        hits.append(
            Hit(
                fault,
                tally.tries_failed - failed,
                chaos.metric("tasc_failovers_total"),
                round(tally.longest_pause(begin, max(end, failing_over)), 2),
                round(end - begin, 2) if whole else None,
            )
        )
    return hits


def faults_of(options: argparse.Namespace) -> Sequence[str]:
    if options.faults is not None:
        return listed(options.faults)
    return hosts.FAULTS if options.hosts else service.FAULTS


def _answered(tally: Tally, count: int) -> bool:
    return tally.requests >= count


def report(tally: Tally, hits: list[Hit], asking_s: float, seconds: float) -> int:
    rows = []
    for hit in hits:
        recovery = "never" if hit.recovery_s is None else f"{hit.recovery_s:.1f}"
        rows.append(
            [hit.fault, str(hit.failed), f"{hit.failovers:.0f}", f"{hit.pause_s:.2f}", recovery]
        )
    headings = ["fault", "tries failed", "failovers", "pause s", "recovered after s"]
    show_table(f"{tally.requests:,} requests", headings, rows)
    for example in tally.examples[:5]:
        print("wrong:", example)
    bad = tally.wrong + tally.lost + tally.duplicated
    found = {
        "requests": tally.requests,
        "failed": tally.tries_failed,
        "failed_by": dict(tally.failed),
        "unclean": tally.unclean,
        "wrong": tally.wrong,
        "lost": tally.lost,
        "duplicated": tally.duplicated,
        "recovery_seconds": {hit.fault: hit.recovery_s for hit in hits},
        "pause_seconds": {hit.fault: hit.pause_s for hit in hits},
        "faults": [asdict(hit) for hit in hits],
        "requests_per_second": round(tally.requests / asking_s, 1),
        "seconds": round(seconds, 1),
        "git": git_revision(),
    }
    finish(found)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
