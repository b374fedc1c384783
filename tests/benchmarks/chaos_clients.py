"""Clients that ask without a pause, try again as told, and judge every answer they get."""

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

_LONGEST_S = 120.0  # that a client goes on trying; beyond, its request is lost


@dataclass(frozen=True)
class Question:
    """A request and the one answer that is right."""

    body: dict[str, Any]
    text: str
    tokens: int


@dataclass
class Tally:
    """What became of the requests.

    Attributes:
        requests: That were asked, each until it was answered.
        failed: Tries that ended in an error, by what it was.
        wrong: Answers that were not the right ones, duplicated pieces among them.
        lost: Requests that were never answered.
        duplicated: Of the wrong ones, those that said more than the right answer.
        unclean: Failed tries whose error had not the service's shape.
        answered_at: When answers came, in seconds of the monotonic clock.
        asking: Whether there are requests left to be asked.
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
        """Longest time without any answer between two moments, while somebody asked."""
        with self._lock:
            inside = sorted(t for t in self.answered_at if begin <= t <= end)
        end = end if self.asking else max([begin, *inside])
        moments = [begin, *inside, end]
        return max(b - a for a, b in pairwise(moments))


class Failed(Exception):
    """A try came to nothing.

    Attributes:
        clean: Whether it was told so in the service's shape.
    """

    def __init__(self, what: str, clean: bool) -> None:
        super().__init__(what)
        self.what, self.clean = what, clean


def ask(
    client: httpx.Client, url: str, question: Question, stream: bool, key: str | None = None
) -> str:
    """The text of one try's answer; raises Failed."""
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
    """Start clients that ask so many requests together, half of them streaming."""
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
    """Whether it came to hold in time."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True
