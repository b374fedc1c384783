"""Clients that ask the service and judge every answer.

A crowd asks without a pause and sends a request again until it is answered. A load asks at a steady
rate, or as fast as it is answered, and sends nothing again.
"""

import json
import random
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx

_LONGEST_S = 120.0  # a request that is not answered within this time is lost
_LATEST_S = 1.0  # a client that is later than this skips requests instead of catching up


@dataclass(frozen=True)
class Question:
    """A request and its only correct answer."""

    body: dict[str, Any]
    text: str
    tokens: int


@dataclass
class Tally:
    """The results of requests.

    Attributes:
        requests: Requests that are finished, answered or lost.
        failed: Tries that ended with an error, by the kind of error.
        wrong: Answers that were not correct, those with duplicated pieces included.
        lost: Requests that were never answered.
        duplicated: Wrong answers that are longer than the correct one.
        unclean: Failed tries whose error did not have the format of the service.
        answered_at: The times of answers in seconds of the monotonic clock.
        asking: Whether there are requests left to send.
    """

    requests: int = 0
    wrong: int = 0
    lost: int = 0
    duplicated: int = 0
    unclean: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)
    answered_at: list[float] = field(default_factory=list)
    asking: bool = True
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def answered(self, question: Question, text: str) -> None:
        with self._lock:
            self.requests += 1
            self.answered_at.append(time.monotonic())
            if text != question.text:
                self.wrong += 1
                self.duplicated += len(text) > len(question.text)
                self.examples.append(f"{text!r:.200} for {question.text!r:.200}")

    def failed_as(self, what: str, clean: bool) -> None:
        with self._lock:
            self.failed[what] += 1
            self.unclean += not clean

    def never_answered(self) -> None:
        with self._lock:
            self.requests += 1
            self.lost += 1

    @property
    def tries_failed(self) -> int:
        return self.failed.total()

    def longest_pause(self, begin: float, end: float) -> float:
        """The longest time without an answer between two moments while requests were left."""
        with self._lock:
            inside = sorted(t for t in self.answered_at if begin <= t <= end)
        end = end if self.asking else max([begin, *inside])
        moments = [begin, *inside, end]
        return max(b - a for a, b in pairwise(moments))


class Failed(Exception):
    """A try failed.

    Attributes:
        clean: Whether the error had the format of the service.
    """

    def __init__(self, what: str, clean: bool) -> None:
        super().__init__(what)
        self.what, self.clean = what, clean


def ask(
    client: httpx.Client, url: str, question: Question, stream: bool, key: str | None = None
) -> str:
    """Send a request once; the text of the answer.

    Raises:
        Failed: There is no complete answer.
    """
    body, headers = question.body | {"stream": stream}, {"Idempotency-Key": key} if key else {}
    try:
        if not stream:
            response = client.post(url, json=body, headers=headers)
            return str(_good(response)["choices"][0]["text"])
        with client.stream("POST", url, json=body, headers=headers) as response:
            if response.status_code != 200:
                response.read()
                _good(response)
            return _joined(response)
    except httpx.HTTPError as error:
        raise Failed(f"connection: {type(error).__name__}", True) from error


def _good(response: httpx.Response) -> Any:
    try:
        content = response.json()
    except ValueError:
        content = None
    if response.status_code == 200 and content:
        return content
    clean = isinstance(content, dict) and "error" in content
    raise Failed(f"status {response.status_code}", clean)


def _joined(response: httpx.Response) -> str:
    text, whole = "", False
    for line in response.iter_lines():
        if line.startswith("data: {"):
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise Failed("error in a stream", True)
            text += event["choices"][0]["text"]
            whole = event["choices"][0]["finish_reason"] is not None
    if not whole:
        raise Failed("a stream without its end", False)
    return text


def crowd(
    base: str, questions: Sequence[Question], requests: int, clients: int, seed: int, tally: Tally
) -> list[threading.Thread]:
    """Start clients that send so many requests together; half of the answers are streams."""
    left = iter(range(requests))
    lock = threading.Lock()

    def take() -> int | None:
        with lock:
            at = next(left, None)
            tally.asking = at is not None
            return at

    def work(number: int) -> None:
        chance = random.Random(seed * 1000 + number)
        with httpx.Client(timeout=90) as client:
            while (at := take()) is not None:
                question = chance.choice(questions)
                _until_answered(client, f"{base}/v1/completions", question, at % 2 == 0, tally)

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(clients)]
    for thread in threads:
        thread.start()
    return threads


def _until_answered(
    client: httpx.Client, url: str, question: Question, stream: bool, tally: Tally
) -> None:
    key, deadline = uuid.uuid4().hex, time.monotonic() + _LONGEST_S
    while time.monotonic() < deadline:
        try:
            tally.answered(question, ask(client, url, question, stream, key))
        except Failed as failed:
            tally.failed_as(failed.what, failed.clean)
            time.sleep(0.1)
        else:
            return
    tally.never_answered()


def wait_until(holds: Callable[[], bool], timeout_s: float) -> bool:
    """Wait until a condition holds; whether it holds in time."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


@dataclass
class Load:
    """Clients that run while the load is entered; half of the answers are streams.

    Attributes:
        per_second: The rate of all clients together; None for the greatest possible one.
        answers: For each answer the time of the request, in seconds of the monotonic clock, and
            its duration.
        failed: Requests without an answer, by the kind of error.
        wrong: Answers that are not correct.
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
        """Milliseconds of the requests that began between two moments."""
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
    """A percentile, rounded; None without values."""
    import numpy as np

    return round(float(np.percentile(values, of)), 1) if values else None
