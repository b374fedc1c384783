"""Send malformed and hostile requests to the service: it must answer them and remain unchanged.

    python benchmarks/fuzz/bench_fuzz.py
    python benchmarks/fuzz/bench_fuzz.py --requests 2000 --seed 7
    python benchmarks/fuzz/bench_fuzz.py --seconds 60 --base http://127.0.0.1:8000 --key tasc_...

Three of five requests are JSON bodies made by the service's own /openapi.json and then spoilt:
wrong types, numbers without end, half characters, deep nesting, floods of biases, guides that take
for ever, messages of all roles. The others are compressed bodies, forms, paths, headers, random
bytes on the socket, wrong lengths, invalid chunks, pipelines, slow senders, and clients that
disconnect. Without --base a service with two tiny models is started that needs an API key. The
service must not answer with 500, leave a request without an end (--deadline), or lose a process,
and its answers must be the same at the end as at the beginning. The same --seed sends the same
requests. Tables go to stdout, progress to stderr; the last line of stdout is one JSON object. The
exit code is 1 if the service failed.
"""

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

if __name__ == "__main__":  # modules are found from the repository's root, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from benchmarks.common import (
    finish,
    parser_of,
    show_table,
    to_stderr,
    use_one_thread,
    use_test_helpers,
)
from benchmarks.fuzz.attacks import Attacks
from benchmarks.fuzz.service import Target, running, surface_of
from benchmarks.fuzz.wire import Attack, Outcome, play
from benchmarks.serve.service import PROXIES, Process, processes

_SHOWN = 5  # examples of each fault
_TOLD_S = 10.0
PROBE = {"prompt": "wake me up", "max_tokens": 8, "temperature": 0}


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--requests", type=int, default=20_000, help="number of requests (20000)")
    add("--seconds", type=float, help="stop after so many seconds, with fewer requests")
    add("--seed", type=int, default=1, help="seed of all random choices (1)")
    add("--at-once", type=int, default=16, help="requests at the same time (16)")
    add("--deadline", type=float, default=60.0, help="seconds after which a request hangs (60)")
    add("--base", help="a running service; without it, one is started")
    add("--key", help="an API key of that service")
    add("--proxy", choices=PROXIES, default=PROXIES[0], help="proxy of Ray Serve (%(default)s)")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    use_one_thread()
    use_test_helpers("serving")
    plan = Plan(options.requests, options.seconds, options.seed, options.at_once, options.deadline)
    with ExitStack() as stack:
        if options.base:
            target = Target(options.base.rstrip("/"), options.key)
        else:
            to_stderr("starting a service ...")
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="tasc-fuzz-"))
            target = stack.enter_context(running(Path(folder), options.proxy))
        found = fuzz(target, plan)
    for line in (*found.wrong, *(f"dead: {who}" for who in found.dead)):
        print(line)
    record = found.as_json
    for title, what in (("answers", "by_status"), ("attacks", "by_kind")):
        rows = [[name, str(count)] for name, count in record[what].items()]
        show_table(title, [what.replace("_", " "), ""], rows)
    grown = [[who, f"{b:,}", str(files)] for who, (b, files) in found.grown.items()]
    show_table("growth since the first fifth", ["process", "bytes", "file handles"], grown)
    finish({**record, "proxy": options.proxy})
    return 0 if found.passed else 1


@dataclass
class Tally:
    """Counts of the outcomes, and examples of those that must not occur."""

    requests: int = 0
    by_status: Counter[str] = field(default_factory=Counter)
    by_kind: Counter[str] = field(default_factory=Counter)
    internal_errors: int = 0
    hangs: int = 0
    refused: int = 0
    unanswered: int = 0
    longest_s: float = 0.0
    examples: list[str] = field(default_factory=list)

    def add(self, attack: Attack, outcome: Outcome) -> list[str]:
        """Count an outcome; returns descriptions of its faults unless enough were shown."""
        self.requests += 1
        self.by_kind[attack.kind] += 1
        self.by_status.update([str(s) for s in outcome.statuses] or ["none"])
        self.longest_s = max(self.longest_s, outcome.seconds)
        found = {
            "internal_errors": outcome.internal or 500 in outcome.statuses,
            "hangs": outcome.hung,
            "refused": outcome.refused,
            "unanswered": attack.answered and not outcome.statuses and not outcome.cut,
        }
        faults = [name for name, is_so in found.items() if is_so]
        for name in faults:
            setattr(self, name, getattr(self, name) + 1)
        told = [
            f"{name}: {_shown(attack)}\n    -> {outcome.seconds:.1f} s {outcome.head!r}"
            for name in faults
            if getattr(self, name) <= _SHOWN
        ]
        self.examples += told
        return told


def _shown(attack: Attack) -> str:
    sent = b"".join(step for step in attack.steps if isinstance(step, bytes))
    head, _, body = sent.partition(b"\r\n\r\n")
    return f"{attack.kind}: {head[:400]!r} ... {len(body)} bytes {body[:1500]!r}"


@dataclass(frozen=True)
class Found:
    """The results of a run.

    Attributes:
        wrong: Probes with another answer than before the first attack.
        dead: Processes that existed before the first attack and not after the last one.
        grown: The growth of each process in bytes and file handles between the first fifth of the
            attacks and the end.
    """

    tally: Tally
    seconds: float
    wrong: list[str]
    dead: list[str]
    grown: dict[str, tuple[int, int]]

    @property
    def passed(self) -> bool:
        tally = self.tally
        faults = tally.internal_errors + tally.hangs + tally.refused + tally.unanswered
        return not faults and not self.wrong and not self.dead

    @property
    def as_json(self) -> dict[str, Any]:
        tally = self.tally
        return {
            "requests": tally.requests,
            "by_status": dict(sorted(tally.by_status.items())),
            "internal_errors": tally.internal_errors,
            "hangs": tally.hangs,
            "dead": len(self.dead) + len(self.wrong),
            "seconds": round(self.seconds, 1),
            "refused": tally.refused,
            "unanswered": tally.unanswered,
            "by_kind": dict(sorted(tally.by_kind.items())),
            "longest_s": round(tally.longest_s, 2),
            "grown": {who: {"bytes": b, "files": f} for who, (b, f) in self.grown.items()},
        }


@dataclass(frozen=True)
class Plan:
    """The size of a run: a number of attacks, or as many as a time allows."""

    requests: int
    seconds: float | None
    seed: int
    at_once: int
    deadline_s: float


def fuzz(target: Target, plan: Plan) -> Found:
    """Attack the service; probes are sent before, in between, and after the attacks."""
    surface = surface_of(target)
    to_stderr(f"{len(surface.routes)} routes, {len(surface.endpoints)} take JSON; seed {plan.seed}")
    attacks = Attacks(surface, random.Random(plan.seed))
    answers = Answers(target, list(surface.tasks))
    before, began = processes(target.mark), time.monotonic()
    middle: dict[int, Process] = {}
    tally, wrong = Tally(), list[str]()

    async def looked() -> None:
        now = processes(target.mark)
        if not middle and tally.requests >= plan.requests / 5:
            middle.update(now)
        wrong.extend(await asyncio.to_thread(answers.wrong))
        memory = ", ".join(f"{p.role} {p.memory >> 20} MiB" for p in now.values())
        to_stderr(f"{_progress(tally, plan, time.monotonic() - began)}; {memory}")

    asyncio.run(_attacked(target, plan, attacks, tally, looked))
    wrong += answers.wrong()
    after = processes(target.mark)
    dead = [f"{p.role}, process {p.pid}" for pid, p in before.items() if pid not in after]
    middle = middle or before
    grown = {
        f"{p.role} {pid}": (p.memory - middle[pid].memory, p.files - middle[pid].files)
        for pid, p in after.items()
        if pid in middle
    }
    return Found(tally, time.monotonic() - began, wrong, dead, grown)


async def _attacked(
    target: Target,
    plan: Plan,
    attacks: Attacks,
    tally: Tally,
    looked: Callable[[], Any],
) -> None:
    url = urlsplit(target.base)
    host, port = url.hostname or "", url.port or 80
    ends = None if plan.seconds is None else time.monotonic() + plan.seconds
    left = iter(range(plan.requests))

    async def attacker() -> None:
        for _ in left:
            if ends is not None and time.monotonic() > ends:
                return
            attack = attacks.next()
            for fault in tally.add(attack, await play(host, port, attack, plan.deadline_s)):
                to_stderr(fault)

    async def watcher() -> None:
        while True:
            await asyncio.sleep(_TOLD_S)
            await looked()

    watching = asyncio.create_task(watcher())
    await asyncio.gather(*(attacker() for _ in range(plan.at_once)))
    watching.cancel()
    (ended,) = await asyncio.gather(watching, return_exceptions=True)
    if not isinstance(ended, asyncio.CancelledError):
        raise ended


class Answers:
    """The answers of the tasks to the probe, which no attack may change."""

    def __init__(self, target: Target, tasks: list[str]) -> None:
        self._target = target
        self._first = {task: self._ask(task) for task in tasks}

    def wrong(self) -> list[str]:
        """A line for each task whose answer is not the first one."""
        found = []
        for task, first in self._first.items():
            if (now := self._ask(task)) != first:
                found.append(f"{task} said {first!r}, now {now!r}")
        return found

    def _ask(self, task: str) -> object:
        for _ in range(20):
            try:
                content = self._target.json("/v1/completions", {"model": task, **PROBE})
                return content["choices"][0]["text"]  # type: ignore[index]
            except OSError as error:  # full: the attacks take every place
                if getattr(error, "code", None) not in (429, 503):
                    return repr(error)
                time.sleep(0.5)
        return "full for 10 s"


def _progress(tally: Tally, plan: Plan, seconds: float) -> str:
    done = f"{tally.requests} of {plan.requests}, {tally.requests / seconds:.0f} a second"
    return f"{done}, {tally.internal_errors} internal errors, {tally.hangs} hangs"


if __name__ == "__main__":
    sys.exit(main())
