"""The two tasks that the tests serve, the answers of their models, and access to the service."""

import itertools
import tempfile
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import httpx
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families
from transformers import PreTrainedModel

import tiny
from killable import pids
from tasc_draft import DraftIndex, write_index
from tasc_serve.replica.replica import TaskReplica
from tasc_serve.settings import ServeSettings
from tasc_store import Artifact, ArtifactStore, TaskRecord, connect
from tasc_text import PromptTemplate, TaskTokenizer

ALPHA, BETA = "alpha", "beta"
PAGE = "https://example.org"  # an origin with allowed scripts
TEMPLATES = {ALPHA: "{input} =>", BETA: "Q: {input}\nA:"}
SIZES = {ALPHA: 320, BETA: 290}  # two tokenizers over one corpus
ARCHITECTURES = {ALPHA: "qwen2", BETA: "llama"}
SEEDS = {ALPHA: 3, BETA: 1}  # alpha ends some of its answers itself
MODEL_LEN = 512
TEXT = tiny.SENTENCES[0]
# Adapters of the running service's BETA. The first one, the default, changes nothing.
ADAPTERS: dict[str, Any] = {"still": {"r": 4, "init_lora_weights": True}, "moved": {"r": 4}}


@dataclass(frozen=True)
class Said:
    """An answer as a client receives it."""

    text: str
    tokens: int
    reason: str


@dataclass(frozen=True)
class Ask:
    """A client's request; ``value`` is the message of a chat or the prompt of a completion."""

    task: str
    value: str
    max_tokens: int = 24
    chat: bool = False
    stream: bool = False
    draft: bool = True

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    @property
    def body(self) -> dict[str, Any]:
        message = {"role": "user", "content": self.value}
        body = {"messages": [message]} if self.chat else {"prompt": self.value}
        body |= {"model": self.task, "max_tokens": self.max_tokens, "stream": self.stream}
        return body | {"draft": self.draft}


@dataclass(frozen=True, eq=False)
class Task:
    """A registered task, and its model in this process, which gives the expected answers."""

    record: TaskRecord
    model: PreTrainedModel
    tokenizer: TaskTokenizer

    def prompt(self, value: str, *, chat: bool) -> tuple[int, ...]:
        text = PromptTemplate(self.record.template).render(value) if chat else value
        return tuple(self.tokenizer.encode_prompt(text))

    @cache  # noqa: B019 - two tasks, kept for the whole session anyway
    def plain(self, prompt: tuple[int, ...], max_tokens: int) -> Said:
        """Returns the answer of transformers."""
        tokens = tiny.plain(self.model, prompt, max_tokens)
        ended = tokens[-1] in self.tokenizer.eos_ids
        return Said(self.tokenizer.decode(tokens), len(tokens), "stop" if ended else "length")


def make_task(folder: Path, name: str) -> Task:
    tiny.make_tokenizer(folder, size=SIZES[name])
    model = tiny.make_model(folder, ARCHITECTURES[name], seed=SEEDS[name])
    tokenizer = TaskTokenizer.from_folder(folder)
    record = TaskRecord(
        name=name,
        model=str(folder),
        fingerprint=tokenizer.fingerprint,
        template=TEMPLATES[name],
        dtype="float64",
        max_tokens=24,
        corpus=ALPHA,
    )
    return Task(record, model, tokenizer)


@dataclass(frozen=True)
class Service:
    """The running service."""

    base: str
    redis_url: str
    settings: ServeSettings
    tasks: dict[str, Task]

    def client(self) -> OpenAI:
        """Returns the official client without retries, so that failures are visible."""
        return OpenAI(base_url=f"{self.base}/v1", api_key="none", max_retries=0, timeout=120)

    def expected(self, ask: Ask) -> Said:
        """Returns the answer of the model alone."""
        task = self.tasks[ask.task]
        return task.plain(task.prompt(ask.value, chat=ask.chat), ask.max_tokens)

    def answer(self, ask: Ask, client: httpx.Client | None = None) -> Said:
        """Returns the service's answer; raises httpx.HTTPStatusError for an error."""
        post = client.post if client else httpx.post
        response = post(f"{self.base}{ask.path}", json=ask.body, timeout=120)
        content = response.raise_for_status().json()
        (choice,) = content["choices"]
        text = choice["message"]["content"] if ask.chat else choice["text"]
        return Said(text, content["usage"]["completion_tokens"], choice["finish_reason"])

    def artifacts(self, task: str) -> ArtifactStore:
        record = self.tasks[task].record
        return ArtifactStore(connect(self.redis_url), record.corpus_name, record.fingerprint)

    def status(self, task: str) -> dict[str, object]:
        listed = httpx.get(f"{self.base}/v1/tasks", timeout=30).raise_for_status().json()["data"]
        return next(s for s in listed if s["task"] == task)

    def load(self, task: str) -> tuple[float, float]:
        """Returns the numbers of a task's running and waiting requests."""
        name, found = "tasc_num_requests_{}".format, self.metrics()
        return found.sum(name("running"), task=task), found.sum(name("waiting"), task=task)

    def metrics(self) -> "Samples":
        text = httpx.get(f"{self.base}/metrics", timeout=30).raise_for_status().text
        return Samples(text)


class Samples:
    """Samples of one reading of ``/metrics``."""

    def __init__(self, text: str) -> None:
        self._all = [s for f in text_string_to_metric_families(text) for s in f.samples]

    def sum(self, name: str, **labels: object) -> float:
        """Returns the sum of the series with these labels; 0 if there are none."""
        wanted = {k: str(v) for k, v in labels.items()}.items()
        return sum(s.value for s in self._all if s.name == name and wanted <= s.labels.items())


def complete(
    client: OpenAI,
    prompt: Any = TEXT,
    *,
    task: str = ALPHA,
    chat: bool = False,
    extra: dict[str, Any] | None = None,
    **fields: Any,
) -> Any:
    """Returns a whole answer by the official client, or its chunks with ``stream``.

    Args:
        extra: Fields that the client passes on unchecked; they precede ``fields``.
    """
    body = {"model": task, "max_tokens": 60, "extra_body": extra or {}, **fields}
    if chat:
        messages = [{"role": "user", "content": prompt}]
        return client.chat.completions.create(messages=messages, **body)
    return client.completions.create(prompt=prompt, **body)


def choices_of(answered: Any) -> list[tuple[str, str]]:
    """Returns text and finish reason of each choice, from a whole answer or from its chunks."""
    if hasattr(answered, "choices"):
        assert [c.index for c in answered.choices] == list(range(len(answered.choices)))
        answered = [answered]
    *others, last = answered
    assert not any(chunk.usage for chunk in others)
    texts, ends = defaultdict[int, str](str), dict[int, str]()
    for choice in (choice for chunk in (*others, last) for choice in chunk.choices):
        assert choice.index not in ends
        texts[choice.index] += _text(choice)
        if choice.finish_reason:
            ends[choice.index] = choice.finish_reason
    assert sorted(ends) == sorted(texts)
    return [(texts[i], ends[i]) for i in sorted(texts)]


def _text(choice: Any) -> str:
    if hasattr(choice, "text"):
        return str(choice.text)
    return str((choice.delta if hasattr(choice, "delta") else choice.message).content)


@contextmanager
def asking(service: Service, asks: Sequence[Ask], clients: int) -> Iterator[list[tuple[Ask, Said]]]:
    """Runs clients that send requests without a pause; yields the answers, none may be missing."""
    answers: list[tuple[Ask, Said]] = []
    errors: list[Exception] = []
    ended = threading.Event()

    def ask() -> None:
        with httpx.Client() as client:
            for one in itertools.takewhile(lambda _: not ended.is_set(), itertools.cycle(asks)):
                try:
                    answers.append((one, service.answer(one, client)))
                except Exception as error:
                    errors.append(error)

    with ThreadPoolExecutor(clients) as pool:
        for _ in range(clients):
            pool.submit(ask)
        try:
            yield answers
        finally:
            ended.set()
    assert errors == []


def utf8(token: str) -> bytes:
    """Returns the bytes of a token from its name in completions."""
    raw = token.removeprefix("bytes:")
    return bytes.fromhex(raw.replace("\\x", "")) if raw != token else token.encode()


@contextmanager
def running_replica(
    url: str, task: str, cache_dir: Path, rows: int = 4, length: int = 128,
    own: dict[str, Any] | None = None, **settings: Any,
) -> Iterator[TaskReplica]:  # fmt: skip
    """Starts a replica of a task in this process, as Serve would.

    Args:
        own: Settings of the task itself.
    """
    found = ServeSettings.model_validate(
        {
            "tasks": [{"name": task, **(own or {})}],
            "engine": {"rows": rows, "max_model_len": length, "device": "cpu", "cost_aware": False},
            "metrics": {"host": "127.0.0.1"},
            "poll_interval_s": 0.05,
            "cache_dir": cache_dir,
            **settings,
        }
    )
    running = TaskReplica(found, url, found.tasks[0])
    try:
        yield running
    finally:
        running.close()


def publish(
    store: ArtifactStore, index: DraftIndex, forecast: float | None = None, corpus_rows: int = 0
) -> Artifact:
    """Make an index the current one."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "index"
        write_index(index, path)
        artifact = store.publish(path, corpus_rows, forecast=forecast)
    store.announce(artifact.version)
    return artifact


def replica_pids(task: str) -> list[int]:
    """The processes of a task's replicas, among the descendants of this process."""
    return sorted(pids(f"ray::ServeReplica:tasc:{task}"))
