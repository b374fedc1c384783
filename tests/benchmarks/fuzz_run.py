"""The attacks, so many at a time, and what is said of them all. It starts no service."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from fuzz_attacks import Attacks
from fuzz_service import Process, Target, processes, surface_of
from fuzz_wire import Attack, Outcome, play

_SHOWN = 5  # examples of each fault
_TOLD_S = 10.0
PROBE = {"prompt": "wake me up", "max_tokens": 8, "temperature": 0}


@dataclass
class Tally:
    """What came back, counted; examples of what must not."""

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
        """Count it; the faults that are worth showing."""
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
    """What a run found.

    Attributes:
        wrong: Probes that were not answered as before the first attack.
        dead: Processes that were there before and are not behind the last attack.
        grown: Bytes and file handles that each process had more at the end than when a fifth of
            the attacks was over.
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
    """How much is done: so many attacks, or as many as fit into a time."""

    requests: int
    seconds: float | None
    seed: int
    at_once: int
    deadline_s: float


def fuzz(target: Target, plan: Plan, say: Callable[[str], None]) -> Found:
    """Attack the service; the probe is asked before, now and then meanwhile, and behind."""
    surface = surface_of(target)
    say(f"{len(surface.routes)} routes, {len(surface.endpoints)} take JSON; seed {plan.seed}")
    attacks = Attacks(surface, random.Random(plan.seed))
    answers = Answers(target, list(surface.tasks))
    before, began = processes(target), time.monotonic()
    middle: dict[int, Process] = {}
    tally, wrong = Tally(), list[str]()

    async def looked() -> None:
        now = processes(target)
        if not middle and tally.requests >= plan.requests / 5:
            middle.update(now)
        wrong.extend(await asyncio.to_thread(answers.wrong))
        memory = ", ".join(f"{p.role} {p.memory >> 20} MiB" for p in now.values())
        say(f"{_progress(tally, plan, time.monotonic() - began)}; {memory}")

    asyncio.run(_attacked(target, plan, attacks, tally, looked, say))
    wrong += answers.wrong()
    after = processes(target)
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
    say: Callable[[str], None],
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
                say(fault)

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
    """What each task says to the probe, which no attack may change."""

    def __init__(self, target: Target, tasks: list[str]) -> None:
        self._target = target
        self._first = {task: self._ask(task) for task in tasks}

    def wrong(self) -> list[str]:
        """One line for each task that does not answer as at first."""
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
            except OSError as error:  # full: the attackers hold every place
                if getattr(error, "code", None) not in (429, 503):
                    return repr(error)
                time.sleep(0.5)
        return "full for 10 s"


def _progress(tally: Tally, plan: Plan, seconds: float) -> str:
    done = f"{tally.requests} of {plan.requests}, {tally.requests / seconds:.0f} a second"
    return f"{done}, {tally.internal_errors} internal errors, {tally.hangs} hangs"
