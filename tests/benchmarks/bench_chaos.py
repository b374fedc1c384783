"""Replicas, a node, the store and a gateway are killed in turn while clients go on asking.

    python tests/benchmarks/bench_chaos.py
    python tests/benchmarks/bench_chaos.py --requests 2000 --faults replica,hang
    python tests/benchmarks/bench_chaos.py --hosts --requests 6000

A service of two Ray nodes runs on this machine: two gateways, two replicas of a tiny model in
float32, each on a node of its own, and Redis. Half of the requests stream, half are sampled; each
is sent again with its Idempotency-Key until it is answered. Every answer is compared with what the
model says alone, one token after the other, without drafts. At even distances one fault after
another is made: a replica killed, a replica that hangs (SIGSTOP), a gateway killed, Redis killed
and started again, a node removed and another added. With --hosts each node is in a network
namespace of its own, as if on a host of its own, behind the shipped HAProxy file; its processes are
killed, or its cable is pulled for a while. Tables go to stdout, progress to stderr; the last line
of stdout is one JSON object. The exit code is 1 where an answer was wrong, lost or duplicated.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench_command import parser_of, to_stderr

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Hit:
    """One fault and what clients saw of it.

    Attributes:
        pause_s: Longest time without any answer until the service was whole again.
        recovery_s: Until it was whole again; unset: it did not become so.
    """

    fault: str
    failed: int
    failovers: float
    pause_s: float
    recovery_s: float | None


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--requests", type=int, default=20_000, help="how many (20000)")
    add("--clients", type=int, default=16, help="that ask at the same time (16)")
    add("--seed", type=int, default=1, help="of what they ask (1)")
    add("--faults", help="in this order, commas between (all there are)")
    add("--hosts", action="store_true", help="two hosts, HAProxy in front; needs root")
    add("--check", action="store_true", help="only say whether there can be such hosts here")
    add("--cut", type=float, default=25.0, help="seconds that a host is cut off (25)")
    add("--redis-down", type=float, default=5.0, help="seconds that Redis is away (5)")
    add("--whole-within", type=float, default=120.0, help="seconds to recover from a fault (120)")
    return parser.parse_args()


def main() -> int:
    os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")  # before torch is imported
    tests = HERE.parent
    folders = (tests / "integration" / "serve", tests / "deploy", tests, HERE)
    sys.path[:0] = map(str, folders)
    asked = arguments()
    if asked.check:
        return checked()
    from chaos_clients import Tally, crowd
    from chaos_questions import questions_of

    tally, began = Tally(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tasc-chaos-") as folder:
        to_stderr("starting two nodes, two gateways and two replicas ...")
        with started(Path(folder), asked) as (chaos, task):
            to_stderr("asking the model itself ...")
            questions = questions_of(task, chaos.store.url)
            begun = time.monotonic()
            threads = crowd(chaos.base, questions, asked.requests, asked.clients, asked.seed, tally)
            hits = harm_in_turn(chaos, tally, asked)
            for thread in threads:
                thread.join()
            asking_s = time.monotonic() - begun
    return report(tally, hits, asking_s, time.monotonic() - began)


def started(folder: Path, asked: argparse.Namespace) -> Any:
    """The service: on this machine itself, or on two hosts behind a load balancer."""
    import chaos_hosts
    import chaos_service

    if asked.hosts:
        return chaos_hosts.running(folder, asked.cut)
    return chaos_service.running(folder, asked.redis_down)


def harm_in_turn(chaos: Any, tally: Any, asked: argparse.Namespace) -> list[Hit]:
    """Make each fault once its share of the requests is answered, and see how it is outlived."""
    from chaos_clients import wait_until

    faults, hits = faults_of(asked), list[Hit]()
    if not wait_until(chaos.whole, asked.whole_within):
        raise TimeoutError("the service did not become whole before the first fault")
    for number, fault in enumerate(faults, start=1):
        due = asked.requests * number // (len(faults) + 1)
        wait_until(partial(_answered, tally, due), float("inf"))
        to_stderr(f"{tally.requests} answered; now: {fault}")
        failed, begin = tally.tries_failed, time.monotonic()
        chaos.harm(fault)
        failing_over = time.monotonic()
        wait_until(partial(_answered, tally, due + 2 * asked.clients), asked.whole_within)
        chaos.mend()
        whole = wait_until(chaos.whole, asked.whole_within)
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


def checked() -> int:
    import chaos_hosts

    why = chaos_hosts.why_not()
    if why:
        to_stderr(why)
    return int(why is not None)


def faults_of(asked: argparse.Namespace) -> list[str]:
    import chaos_hosts
    import chaos_service

    if asked.faults is None:
        return list(chaos_hosts.FAULTS if asked.hosts else chaos_service.FAULTS)
    return [fault for fault in asked.faults.split(",") if fault]


def _answered(tally: Any, count: int) -> bool:
    return bool(tally.requests >= count)


def report(tally: Any, hits: list[Hit], asking_s: float, seconds: float) -> int:
    from draft_report import git_revision

    print(f"{'fault':10}{'tries failed':>14}{'failovers':>11}{'pause s':>9}{'whole after s':>15}")
    for hit in hits:
        recovery = "never" if hit.recovery_s is None else f"{hit.recovery_s:.1f}"
        print(
            f"{hit.fault:10}{hit.failed:>14}{hit.failovers:>11.0f}{hit.pause_s:>9.2f}{recovery:>15}"
        )
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
    print(json.dumps(found))
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
