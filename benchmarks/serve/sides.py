"""The measurements of `way_in.py`: each starts a process, asks it and ends it.

A measurement returns its figures by name. The names are put together here, and read in `way_in`.
"""

import json
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import cycle, repeat
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

from benchmarks.common import ROOT, median_of, to_stderr
from benchmarks.serve.children import Child, started
from benchmarks.serve.load import Answered, Place, asked, paced, until, window
from benchmarks.serve.service import haproxy_modes

SUBJECTS = Path(__file__).with_name("subjects.py")
COMMAND = "from tasc_jobs.cli.main import main; main()"
# As the demo's. The same rows are asked several times: answers must not be drafted from.
ENGINE = {"rows": 8, "max_model_len": 512, "torch_threads": 1}
VLLM_ENGINE = {"backend": "vllm", "max_draft_tokens": 16}
DRAFT = {"recent_tokens": 0}
TINY_ENGINE = {"rows": 8, "max_model_len": 256, "cost_aware": False}
TASK, TINY = "massive_en", "tiny"
TINY_BODY = {"model": TINY, "prompt": "wake me up at nine", "max_tokens": 1, "metrics": "none"}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ROWS, LIST = 256, 64
ROLES = ("gateway", "replica", "proxy")
_PAUSE_S = 0.5  # before a window: requests that the last one broke off are ended
_WARM_UP_S = 30.0
_NO_ANSWER: dict[str, Any] = {"object": "chat.completion", "choices": ["x" * 600]}

Measured = dict[str, float]


def drafts(on: bool) -> str:
    return "drafts on" if on else "drafts off"


@dataclass
class Bench:
    """What all measurements share.

    Attributes:
        folder: For files; what a checkout leaves is below it.
        crowds: Numbers of connections above one.
        alone: Whether one connection is measured too.
        requests: Over one connection.
        answer: What ceilings answer: the service's answer to a row, once there is one.
        rates: Requests a second that each side's service answered last, with the smallest number
            of connections above one.
        skipped: What could not be measured, and why.
    """

    folder: Path
    inputs: Sequence[str]
    seconds: int
    requests: int
    crowds: Sequence[int]
    alone: bool
    gateways: int
    proxy: str
    parts: Sequence[str]
    backend: str = "tasc"
    answer: Any = field(default_factory=lambda: _NO_ANSWER)
    rates: dict[str, float] = field(default_factory=dict)
    errors: int = 0
    skipped: list[str] = field(default_factory=list)

    @property
    def engine(self) -> Mapping[str, Any]:
        """Settings of the engine."""
        return ENGINE if self.backend == "tasc" else {**ENGINE, **VLLM_ENGINE}

    def bodies(self, **options: Any) -> list[bytes]:
        """A chat request of each row."""
        return [
            _json({"model": TASK, "messages": [{"role": "user", "content": text}], **options})
            for text in self.inputs
        ]

    def one_by_one(self, place: Place, bodies: Sequence[bytes]) -> list[Answered]:
        """The answers to the first bodies, over one connection.

        Raises:
            RuntimeError: One is an error, or not whole.
        """
        return _right(asked(place, bodies[: self.requests]))

    def warm_up(self, place: Place, bodies: Sequence[bytes]) -> list[Answered]:
        """Ask until all is answered: Ray's HAProxy breaks connections off as its servers come up.

        Raises:
            RuntimeError: It is not, for too long.
        """
        deadline = time.monotonic() + _WARM_UP_S
        while time.monotonic() < deadline:
            with suppress(RuntimeError, OSError):
                return self.one_by_one(place, bodies)
            time.sleep(1)
        return self.one_by_one(place, bodies)

    def figures(
        self,
        name: str,
        unit: str,
        place: Place,
        bodies: list[bytes],
        child: Child,
        count: str | None = None,
    ) -> Measured:
        """Rates and latencies by number of connections.

        Args:
            count: Under this name, processor time by role with the least number above one.
        """
        found = Measured()
        if self.alone:
            rows = until(time.perf_counter() + self.seconds, cycle(bodies[: self.requests]))
            times = sorted(answer.milliseconds for answer in _right(asked(place, rows)))
            found[f"{name}, 1, {unit}"] = len(times) / sum(times) * 1e3
            found[f"{name}, 1, p50 ms"] = median_of(times)
            found[f"{name}, 1, p99 ms"] = times[-1]
        for connections in self.crowds:
            time.sleep(_PAUSE_S)
            before = child.processor_ms()
            took = window(place, bodies, connections, self.seconds)
            after = child.processor_ms()
            self.errors += took.errors
            found[f"{name}, {connections}, {unit}"] = took.rate
            found[f"{name}, {connections}, p50 ms"] = took.p50_ms
            found[f"{name}, {connections}, p99 ms"] = took.p99_ms
            if count and connections == self.crowds[0]:
                for role in after:
                    spent = (after[role] - before.get(role, 0.0)) / max(took.requests, 1)
                    found[f"{count}, {role}, ms a request"] = spent
        return found

    @property
    def modes(self) -> Mapping[str, str]:
        """The environment of a Ray Serve."""
        return haproxy_modes(self.folder) if self.proxy == "haproxy" else {}

    # Ceilings

    def no_work(self) -> Measured:
        """Ray Serve with no work, one hop and two."""
        port, found = _free_port(), Measured()
        arguments = [SUBJECTS, "no-work", str(port), self._answer_file(), str(self.gateways)]
        with started(arguments, ROOT, self.folder, self.modes) as child:
            base = _ready(child, port)
            for hops, path in (("one hop", "/one"), ("two hops", "/two")):
                place, bodies = Place(base, path), self.bodies(draft=True)
                self.warm_up(place, bodies)
                name = f"no work, {hops}"
                count = f"processor, {name}"
                found |= self.figures(name, "requests/s", place, bodies, child, count)
        return found

    def bare(self) -> Measured:
        """A uvicorn application that reads the same bodies and answers the same JSON.

        Processor time is measured as fast as it answers, and at the rate of each side's service, at
        which a process is woken for each request. There the requests come evenly, over one
        connection.
        """
        port = _free_port()
        arguments = [SUBJECTS, "bare", str(port), self._answer_file()]
        with started(arguments, ROOT, self.folder) as child:
            place, bodies = Place(_ready(child, port), "/one"), self.bodies(draft=True)
            self.warm_up(place, bodies)
            found = self.figures(
                "uvicorn", "requests/s", place, bodies, child, "processor, uvicorn"
            )
            for side, rate in self.rates.items():
                time.sleep(_PAUSE_S)
                before = child.processor_ms()["command"]
                end = time.perf_counter() + self.seconds
                answers = _right(asked(place, until(end, paced(cycle(bodies), rate))))
                spent = child.processor_ms()["command"] - before
                found[f"processor, uvicorn at the rate of {side}, ms a request"] = spent / len(
                    answers
                )
                found[f"uvicorn at the rate of {side}, requests/s"] = len(answers) / self.seconds
            return found

    def _answer_file(self) -> Path:
        file = self.folder / "answer.json"
        file.write_text(json.dumps(self.answer))
        return file


@dataclass(frozen=True)
class Side:
    """A checkout, measured with a store that its own code has filled.

    Attributes:
        url: Of the store.
        folder: For its files.
    """

    name: str
    root: Path
    url: str
    folder: Path
    bench: Bench

    def prepare(self) -> None:
        """Fill the store."""
        to_stderr(f"{self.name}: tasks, corpus and index ...")
        others = []
        if {"engine", "service", "lists"} & set(self.bench.parts):
            others = ["demo" if self.bench.backend == "tasc" else "smollm2"]
        arguments = [SUBJECTS, "prepare", self.url, self.bench.folder / "tiny-model", *others]
        with started(arguments, self.root, self.folder) as child:
            child.process.communicate()
            if child.process.returncode:
                raise RuntimeError(child.log.read_text())

    def engine(self) -> Measured:
        """The demo's engine without a service."""
        bench, found = self.bench, Measured()
        texts = self.folder / "inputs.json"
        texts.write_text(json.dumps(bench.inputs))
        cache, told = self.folder / "cache", [json.dumps(bench.engine), json.dumps(DRAFT), texts]
        arguments = [SUBJECTS, "engine", self.url, cache, *told]
        huge_pages = {"THP_MEM_ALLOC_ENABLE": "1"}  # as replicas have them
        with started(arguments, self.root, self.folder, huge_pages) as child:
            for draft in (True, False):
                child.ask(measure="one_by_one", draft=draft, requests=bench.requests)
            for draft in (True, False):
                name = f"engine, {drafts(draft)}"
                times = child.ask(measure="one_by_one", draft=draft, requests=bench.requests)
                found[f"{name}, p50 ms"] = median_of(times)
                found[f"{name}, rows/s"] = child.ask(
                    measure="rate", draft=draft, seconds=bench.seconds
                )
            if "lists" in bench.parts:
                found[f"engine, lists of {LIST}, rows/s"] = child.ask(
                    measure="lists", draft=True, size=LIST, seconds=bench.seconds
                )
        return found

    def vllm(self) -> Measured:
        """vLLM with the same weights and drafts, without this project's engine and service."""
        bench, texts = self.bench, self.folder / "inputs.json"
        texts.write_text(json.dumps(bench.inputs))
        arguments = [SUBJECTS, "vllm", json.dumps({**bench.engine, "draft": DRAFT}), texts]
        where = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "THP_MEM_ALLOC_ENABLE": "1"}
        with started(arguments, self.root, self.folder, where) as child:
            found = Measured()
            for crowd in bench.crowds:
                child.ask(at_once=crowd, seconds=bench.seconds)  # warms up
                rate = child.ask(at_once=crowd, seconds=bench.seconds)
                found[f"vLLM alone, {crowd}, rows/s"] = rate
        return found

    def service(self) -> Measured:
        """The service with the demo's task."""
        bench, found = self.bench, Measured()
        with self._serving({"name": TASK, "draft": DRAFT}, bench.engine) as (child, base):
            place = Place(base, CHAT)
            for draft in (False, True):
                answers = bench.warm_up(place, bench.bodies(draft=draft))
            bench.answer = json.loads(answers[0].body)
            if "service" in bench.parts:
                for draft in (True, False):
                    for stream in (False, True):
                        name = f"HTTP, {drafts(draft)}, {'streams' if stream else 'whole'}"
                        bodies = bench.bodies(draft=draft, stream=stream)
                        count = "processor" if draft and not stream else None
                        bench.warm_up(place, bodies)
                        found |= bench.figures(name, "rows/s", place, bodies, child, count)
                        if count and (rate := found[f"{name}, {bench.crowds[0]}, rows/s"]):
                            bench.rates[self.name] = rate
            if "lists" in bench.parts:
                found |= self._lists(Place(base, COMPLETIONS))
        return found

    def one_token(self) -> Measured:
        """The service with a tiny model in two replicas, one token a request."""
        task = {"name": TINY, "replicas": 2, "num_cpus": 0.1}
        with self._serving(task, TINY_ENGINE) as (child, base):
            place, bodies = Place(base, COMPLETIONS), [_json(TINY_BODY)] * ROWS
            self.bench.warm_up(place, bodies)
            return self.bench.figures(
                "one token", "requests/s", place, bodies, child, "processor, one token"
            )

    def _lists(self, place: Place) -> Measured:
        """Requests with a list of prompts, one after the other."""
        from tasc_jobs.demo.tasks import TEMPLATES

        prompts = [TEMPLATES[TASK].format(input=text) for text in self.bench.inputs[:LIST]]
        body = _json({"model": TASK, "prompt": prompts})
        (first,) = asked(place, [body])
        if first.status == 400:
            self._skip(f"lists of prompts, {json.loads(first.body)['error']['message']}")
            return {}
        began = time.perf_counter()
        answers = _right([first, *asked(place, until(began + self.bench.seconds, repeat(body)))])
        took = time.perf_counter() - began
        return {f"HTTP, lists of {LIST}, rows/s": LIST * (len(answers) - 1) / took}

    def _skip(self, what: str) -> None:
        told = f"{self.name}: {what}"
        if told not in self.bench.skipped:
            self.bench.skipped.append(told)
            to_stderr(f"skipped: {told}")

    @contextmanager
    def _serving(
        self, task: Mapping[str, Any], engine: Mapping[str, Any]
    ) -> Iterator[tuple[Child, str]]:
        """The service, started by its command, and its URL."""
        port, file = _free_port(), self.folder / "serve.yaml"
        settings = {
            "redis_url": self.url,
            "tasks": [task],
            "http": {"port": port, "gateways": self.bench.gateways},
            "engine": engine,
            "cache_dir": str(self.folder / "cache"),
        }
        file.write_text(json.dumps(settings))  # JSON is YAML
        arguments = ["-c", COMMAND, "serve", "--config", file]
        with started(arguments, self.root, self.folder, self.bench.modes) as child:
            yield child, _ready(child, port)


def _ready(child: Child, port: int) -> str:
    """The URL of a server, once it is ready."""
    base = f"http://127.0.0.1:{port}"

    def is_ready() -> bool:
        try:
            with urlopen(f"{base}/readyz", timeout=10) as answer:
                return bool(answer.status == 200)
        except (URLError, OSError):
            return False

    child.until(is_ready)
    return base


def _right(answers: list[Answered]) -> list[Answered]:
    wrong = [answer for answer in answers if not answer.is_right]
    if wrong:
        raise RuntimeError(f"the service answered {wrong[0]}")
    return answers


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _json(content: Any) -> bytes:
    return json.dumps(content).encode()
