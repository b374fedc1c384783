"""Helpers of many tests: waiting, time, ports, and engines on tiny models.

Models and tokenizers are made by `tiny`, adapters by `lora_folders`, neural drafters by
`neural_drafters`.
"""

import ast
import asyncio
import dataclasses
import json
import re
import resource
import socket
import sys
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NoReturn

import httpx
import msgspec
import numpy as np
import pytest

from tasc_draft import DraftIndex, DraftSettings, NgramProposer, Proposer, Tokens, build_index
from tasc_draft.drafts import Drafts
from tasc_engine import Engine, EngineConfig, ModelSource, Request, StepRecord, Target
from tasc_engine.step import verify
from tasc_engine.step.cost import StepCosts
from tasc_protocol import PARAMETERS, Sampling
from tasc_store import TaskRecord
from tasc_text import TaskTokenizer

# Only a broken test waits this long. A test on a machine three times slower than usual does not.
DEADLINE_S = 300.0


def parsed(path: Path) -> ast.Module:
    """The syntax tree of a source file.

    Before CPython 3.11.8, parsing fails at random in a process where another thread parses, too, as
    Ray's threads do (python/cpython#106905).
    """
    for _ in range(20):
        with suppress(SystemError):
            return ast.parse(path.read_text("utf-8"))
    return ast.parse(path.read_text("utf-8"))


SMALL = EngineConfig(rows=2, max_model_len=64, prefill_chunk=16)
# Every candidate is drafted, however improbable, so that drafts are accepted and rejected.
EAGER = DraftSettings(min_prob=0.0)


def eventually(holds: Callable[[], object], pause_s: float = 0.02) -> None:
    """Poll until a condition holds; fail after `DEADLINE_S`."""
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline, f"the condition did not hold within {DEADLINE_S} s"
        time.sleep(pause_s)


async def eventually_async(holds: Callable[[], object], pause_s: float = 0.001) -> None:
    """`eventually` for a condition that other coroutines of this event loop bring about."""
    async with asyncio.timeout(DEADLINE_S):
        while not holds():
            await asyncio.sleep(pause_s)


def assert_self_contained(html: str) -> None:
    """Asserts that a page needs no network: it has only addresses of SVG and loads nothing."""
    names = {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert set(re.findall(r'https?://[^"]*', html)) == names
    assert not re.search(r"<(script|link|img|iframe)|@import|url\((?!#)|src=", html)
    assert set(re.findall(r'href="(.)', html)) <= {"#"}


@contextmanager
def refused(
    kind: type[Exception], *named: str, **attributes: object
) -> Iterator[pytest.ExceptionInfo[Exception]]:
    """Asserts that the block raises an error of ``kind`` with each of the names in its message."""
    with pytest.raises(kind) as caught:
        yield caught
    for name in named:
        assert name in str(caught.value)
    assert {name: getattr(caught.value, name) for name in attributes} == attributes


def failing(error: BaseException) -> Callable[..., NoReturn]:
    """Returns a function that raises the error for any arguments."""

    def fails(*args: object, **named: object) -> NoReturn:
        raise error

    return fails


def failing_where(
    patch: pytest.MonkeyPatch, owner: Any, name: str, error: BaseException, when: Callable[..., Any]
) -> list[bool]:
    """Makes a function raise when ``when(number of the call, *arguments)`` is true.

    Returns a list that records for each call whether it raised.
    """
    honest, raised = getattr(owner, name), list[bool]()

    def scarce(*args: Any, **options: Any) -> Any:
        raised.append(bool(when(len(raised) + 1, *args)))
        if raised[-1]:
            raise error
        return honest(*args, **options)

    patch.setattr(owner, name, scarce)
    return raised


@dataclass
class FakeClock:
    """Stands in for ``time.monotonic`` and the like; a test moves ``now``."""

    now: float = 100.0

    def __call__(self) -> float:
        return self.now


@contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """Makes writes beyond ``size`` bytes of a file fail in the block."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def asgi(app: Any, method: str, path: str, **request: Any) -> httpx.Response:
    """Returns the response of an application to one request."""

    async def once() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, **request)

    return asyncio.run(once())


class HttpServer(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print the error, except where a client ended before its answer, as a killed one does.

        It would be printed into the output of the test that runs meanwhile.
        """
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


@contextmanager
def http_server(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Runs a server on loopback in a thread for the block; yields its URL."""
    with HttpServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def write_rows(path: Path, rows: Iterable[object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read_rows(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def record_of(folder: Path, name: str, template: str = "{input}\n", **fields: Any) -> TaskRecord:
    fingerprint = TaskTokenizer.from_folder(folder).fingerprint
    return TaskRecord(name, str(folder), fingerprint, template, **fields)


def free_port(host: str = "127.0.0.1") -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def load_target(
    folder: Path, config: EngineConfig = SMALL, dtype: str = "float64", **source: Any
) -> Target:
    """Loads the model of a folder; ``source`` is passed to `ModelSource`."""
    return Target.load(ModelSource(folder, dtype=dtype, **source), config)


def lying(monkeypatch: pytest.MonkeyPatch, vocab_size: int) -> None:
    """Makes the target accept a wrong token after the draft in every step with a draft."""

    def wrong(chosen: Any, drafts: Any, *rest: Any, honest: Any = verify.accept) -> Any:
        found = honest(chosen, drafts, *rest)
        for row in np.flatnonzero(np.diff(drafts.offsets) > 0):
            if n := found.emitted[row]:
                found.tokens[row, n - 1] = (found.tokens[row, n - 1] + 1) % vocab_size or 1
        return found

    monkeypatch.setattr(verify, "accept", wrong)


class Silent:
    """A proposer that drafts nothing."""

    max_depth = 1

    def start(self, row: int, prompt: Any, labels: Any = None) -> None: ...
    def observe(self, row: int, tokens: Any, hidden: Any = None) -> None: ...
    def finish(self, row: int) -> None: ...

    def propose(self, rows: Any, budget: Any, least: Any = None) -> Drafts:
        return Drafts.empty(len(rows))


class Known(Silent):
    """Drafts the rest of a known answer as a chain. ``answer_of`` has the answer to a prompt."""

    max_depth = 16

    def __init__(self, answer_of: Callable[[tuple[int, ...]], Sequence[int]]) -> None:
        self._answer_of, self._left = answer_of, dict[int, list[int]]()

    def start(self, row: int, prompt: Any, labels: Any = None) -> None:
        self._left[row] = list(self._answer_of(tuple(prompt.tolist())))

    def observe(self, row: int, tokens: Any, hidden: Any = None) -> None:
        del self._left[row][: len(tokens)]

    def draft(self, row: int, budget: int) -> list[int]:
        return self._left[row][:budget]

    def propose(self, rows: Any, budget: Any, min_probs: Any = None) -> Drafts:
        chains = [self.draft(r, b) for r, b in zip(rows.tolist(), budget.tolist(), strict=True)]
        places = np.array([i for chain in chains for i in range(len(chain))], np.int32)
        return Drafts(
            np.array([token for chain in chains for token in chain], np.int32),
            places - 1,
            (places + 1).astype(np.int16),
            np.cumsum([0, *map(len, chains)]).astype(np.int32),
            np.zeros(len(places), np.float32),
            np.zeros(len(places), np.int8),
        )


def index_of(
    tokenizer: TaskTokenizer,
    outputs: Sequence[Sequence[int]],
    prompts: Sequence[Sequence[int]] | None = None,
) -> DraftIndex:
    """Returns the draft index of token ids of rows."""
    return build_index(
        Tokens.of(outputs),
        None if prompts is None else Tokens.of(prompts),
        fingerprint=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size,
        eos_id=tokenizer.eos_id,
    )


def make_proposer(
    tokenizer: TaskTokenizer,
    settings: DraftSettings = EAGER,
    config: EngineConfig = SMALL,
    *,
    index: DraftIndex | None = None,
    branching: bool = True,
    spare: int = 0,
) -> NgramProposer:
    """Makes a proposer for this engine configuration; without an index it drafts from rows."""
    return NgramProposer(
        settings,
        rows=config.rows,
        capacity=config.max_model_len,
        vocab_size=tokenizer.vocab_size,
        eos_ids=tokenizer.eos_ids,
        index=index or DraftIndex.empty(tokenizer.fingerprint, tokenizer.vocab_size),
        branching=branching,
        spare=spare,
    )


def make_engine(
    folder: Path,
    config: EngineConfig = SMALL,
    *,
    dtype: str = "float64",
    target: Target | None = None,
    proposer: Proposer | None = None,
    settings: DraftSettings = EAGER,
    index: DraftIndex | None = None,
    on_step: Callable[[StepRecord], None] = lambda record: None,
    costs: StepCosts | None = None,
) -> Engine:
    """An engine of the model in ``folder``.

    A target that is given replaces the model of this ``dtype``; a proposer that is given replaces
    the n-gram proposer of these ``settings`` and this ``index``.
    """
    tokenizer = TaskTokenizer.from_folder(folder)
    return Engine(
        target or load_target(folder, config, dtype),
        tokenizer,
        proposer or make_proposer(tokenizer, settings, config, index=index),
        config,
        on_step,
        costs,
    )


def replace(value: Any, **changes: Any) -> Any:
    """Returns a frozen dataclass or msgspec struct with other values."""
    is_struct = isinstance(value, msgspec.Struct)
    return (msgspec.structs.replace if is_struct else dataclasses.replace)(value, **changes)


async def completed(replica: Any, request: Request) -> Any:
    """Returns the last output of a replica for a request, or its refusal."""
    items: list[Any] = []
    await replica.answer(request, items.append)
    return items[-1]


async def streamed(replica: Any, request: Request) -> AsyncGenerator[Any, None]:
    """Yields what a replica sends for a request; closing the generator cancels it."""
    items: asyncio.Queue[Any] = asyncio.Queue()
    answering = asyncio.create_task(replica.answer(request, items.put_nowait))
    answering.add_done_callback(lambda done: items.put_nowait(None))
    try:
        while (item := await items.get()) is not None:
            yield item
        await answering
    finally:
        answering.cancel()
        await asyncio.gather(answering, return_exceptions=True)


def ruled(rule: Sampling) -> dict[str, Any]:
    """The fields of a `Request` with this sampling rule."""
    parameters = {name: getattr(rule, name) for name in PARAMETERS}
    own = {name: v for name, v in parameters.items() if v != PARAMETERS[name].default}
    return {
        "parameters": own,
        "logit_bias": rule.logit_bias,
        "seed": rule.seed,
        "prompt_index": rule.prompt,
        "choice_index": rule.choice,
    }


def requests_of(prompts: Iterable[Sequence[int]], max_tokens: int, **differs: Any) -> list[Request]:
    return [
        Request(str(i), tuple(prompt), max_tokens, **differs) for i, prompt in enumerate(prompts)
    ]
