"""Clients that ask at a steady rate, or as fast as they are answered; every answer is judged."""

import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import httpx
import numpy as np
from chaos_clients import Failed, Question, ask

_LATEST_S = 1.0  # a client that is later than this lets requests go instead of catching up


@dataclass
class Load:
    """A number of clients, half of whose requests stream.

    Attributes:
        per_second: Requests of all clients together; None for as many as there can be.
        answers: When each was asked for, in seconds of the monotonic clock, and how long it took.
        failed: Requests without an answer, by what went wrong; nothing is tried again.
        wrong: Answers that are not the model's own.
    """

    base: str
    questions: Sequence[Question]
    clients: int
    per_second: float | None = None
    answers: list[tuple[float, float]] = field(default_factory=list)
    failed: Counter[str] = field(default_factory=Counter)
    wrong: int = 0
    _stop: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def __enter__(self) -> "Load":
        numbers = range(self.clients)
        self._threads = [threading.Thread(target=self._work, args=(n,)) for n in numbers]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def between(self, begin: float, end: float) -> list[float]:
        """Milliseconds of the requests begun between two moments."""
        return [seconds * 1e3 for at, seconds in tuple(self.answers) if begin <= at < end]

    def rate(self, begin: float, end: float) -> float:
        return len(self.between(begin, end)) / (end - begin)

    def _work(self, number: int) -> None:
        chance = random.Random(number)
        pause = self.clients / self.per_second if self.per_second else 0.0
        due = time.monotonic() + pause * number / self.clients
        with httpx.Client(timeout=90) as client:
            while not self._stop.wait(max(due - time.monotonic(), 0)):
                self._one(client, chance.choice(self.questions), stream=chance.random() < 0.5)
                due = max(due + pause, time.monotonic() - _LATEST_S)

    def _one(self, client: httpx.Client, question: Question, stream: bool) -> None:
        begin = time.monotonic()
        try:
            text = ask(client, f"{self.base}/v1/completions", question, stream)
        except Failed as failed:
            self.failed[failed.what] += 1
            return
        self.answers.append((begin, time.monotonic() - begin))
        self.wrong += text != question.text


def percentile(values: Sequence[float], of: float) -> float | None:
    """None of nothing."""
    return round(float(np.percentile(values, of)), 1) if values else None
