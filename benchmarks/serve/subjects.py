"""What `way_in.py` measures beside the service, each in a process of its own.

``prepare`` fills a store, ``engine`` answers without a service, ``vllm`` is vLLM with the drafts
of `tasc_draft.vllm` and nothing else of this project, ``no-work`` is Ray Serve and ``bare`` is
uvicorn, which both read a body and answer the same JSON.
"""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from functools import partial
from itertools import count
from pathlib import Path
from shutil import copyfile
from typing import Any

if __name__ == "__main__":  # modules are found from the repository's root, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from benchmarks.common import use_test_helpers

AT_ONCE = 1000  # requests that Ray Serve takes; more than there are connections
SMOLLM2_TOKENS = 64  # of an answer at most


def prepare(url: str, folder: str, *others: str) -> None:
    """Put a tiny random model's task into a store.

    Args:
        others: ``demo`` adds the demo's task with its index, and ``smollm2`` the same task of
            SmolLM2.
    """
    use_test_helpers("tiny")
    import torch

    import tiny
    from tasc_jobs.demo.prepare import prepare as prepare_demo
    from tasc_jobs.demo.tasks import TASK
    from tasc_jobs.ray_local import local_ray
    from tasc_store import TaskRecord, TaskStore, connect
    from tasc_text import TaskTokenizer

    model = Path(folder)
    if not model.is_dir():
        tiny.make_tokenizer(model)
        tiny.make_model(model, dtype=torch.float32)
    record = TaskRecord(
        name="tiny",
        model=folder,
        fingerprint=TaskTokenizer.from_folder(model).fingerprint,
        template="{input}",
    )
    TaskStore(connect(url)).put(record)
    if "demo" in others:
        with local_ray(), redirect_stdout(sys.stderr):
            prepare_demo(url, [TASK])
    if "smollm2" in others:
        prepare_smollm2(url, TASK)


def prepare_smollm2(url: str, task: str) -> None:
    """Register a task with the weights and the index of `make bench-model`."""
    from benchmarks.engine.smollm2 import index_of, model_of
    from tasc_draft.index.draft_index import INDEX_FILE
    from tasc_jobs.index.publish import publish_file
    from tasc_jobs.tasks.options import TaskOptions
    from tasc_jobs.tasks.register import create
    from tasc_store import ArtifactStore, TaskStore, connect

    client = connect(url)
    options = TaskOptions(model=str(model_of(task)), dtype="bfloat16", max_tokens=SMOLLM2_TOKENS)
    record = create(TaskStore(client), task, options, replace=False).record
    store, index = ArtifactStore(client, task, record.fingerprint), index_of(task) / INDEX_FILE
    publish_file(store, partial(copyfile, index), None)


def engine(url: str, cache: str, settings: str, draft: str, inputs: str) -> None:
    """Answer each line of stdin, which names what to measure, with a line on stdout."""
    from tasc_jobs.demo.tasks import TASK
    from tasc_runtime.engine.builder import EngineBuilder
    from tasc_runtime.engine_settings import DraftOverrides, EngineSettings
    from tasc_store import connect

    worker = EngineBuilder.of_task(
        connect(url),
        TASK,
        EngineSettings(**json.loads(settings)),
        draft=DraftOverrides(**json.loads(draft)),
        cache_dir=Path(cache),
    )
    measures = {"rate": rate, "one_by_one": one_by_one, "lists": lists}
    texts = json.loads(Path(inputs).read_text())
    for line in sys.stdin:
        asked = json.loads(line)
        measure = measures[asked.pop("measure")]
        print(json.dumps(measure(worker, texts, **asked)), flush=True)


def vllm(settings: str, inputs: str) -> None:
    """As `engine`, with vLLM's own engine and messages; it answers one measure, ``rate``."""
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    from benchmarks.engine.loop import hold
    from benchmarks.engine.smollm2 import index_of, model_of
    from tasc_jobs.demo.tasks import TASK

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM writes to stdout
    given, model = json.loads(settings), model_of(TASK)
    speculation = {
        "method": "custom_class",
        "model": "tasc_draft.vllm.TascProposer",
        "num_speculative_tokens": given["max_draft_tokens"],
    }
    made = LLM(
        str(model), dtype="bfloat16", max_model_len=given["max_model_len"],
        max_num_seqs=given["rows"], speculative_config=speculation,
        additional_config={"tasc": {"index": str(index_of(TASK)), "draft": given["draft"]}},
    )  # fmt: skip
    hold(given["torch_threads"])
    params = SamplingParams(
        temperature=0.0, max_tokens=SMOLLM2_TOKENS, output_kind=RequestOutputKind.FINAL_ONLY
    )
    tokenizer, core = made.get_tokenizer(), made.llm_engine
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
        )
        for text in json.loads(Path(inputs).read_text())
    ]
    names, open_ = count(), 0
    for line in sys.stdin:
        asked = json.loads(line)
        ended, began = 0, time.perf_counter()
        while (took := time.perf_counter() - began) < asked["seconds"]:
            while open_ < asked["at_once"]:
                each = next(names)
                core.add_request(str(each), prompts[each % len(prompts)], params)
                open_ += 1
            done = sum(output.finished for output in core.step())
            open_, ended = open_ - done, ended + done
        while open_:
            open_ -= sum(output.finished for output in core.step())
        print(json.dumps(ended / took), file=answers, flush=True)


def rate(worker: Any, texts: Sequence[str], *, draft: bool, seconds: float) -> float:
    """Answers a second, of those that end within so many seconds."""
    began = time.perf_counter()

    def endless() -> Iterator[str]:
        for i in count():
            if time.perf_counter() - began >= seconds:
                return
            yield texts[i % len(texts)]

    ends = [time.perf_counter() - began for _ in _answers(worker, endless(), draft)]
    return sum(end <= seconds for end in ends) / seconds


def one_by_one(worker: Any, texts: Sequence[str], *, draft: bool, requests: int) -> list[float]:
    """Milliseconds of one answer after the other."""
    times = []
    for text in texts[:requests]:
        began = time.perf_counter()
        list(_answers(worker, [text], draft))
        times.append((time.perf_counter() - began) * 1e3)
    return times


def lists(worker: Any, texts: Sequence[str], *, draft: bool, size: int, seconds: float) -> float:
    """Answers a second where so many are asked for at a time, again when all have ended."""
    began, done = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        done += len(list(_answers(worker, texts[:size], draft)))
    return done / (time.perf_counter() - began)


def _answers(worker: Any, texts: Any, draft: bool) -> Any:
    from tasc_protocol import Request

    calls = (Request(str(i), text, templated=True, draft=draft) for i, text in enumerate(texts))
    return worker.engine.generate(worker.reader.request(call) for call in calls)


def application(answer: Any, asked: Callable[[bytes], Any] | None = None) -> Any:
    """Reads a body and answers the same each time, on the second path by what it asks."""
    from fastapi import FastAPI, Request
    from fastapi.responses import JSONResponse

    app = FastAPI()

    @app.post("/one")
    async def one(request: Request) -> JSONResponse:
        await request.body()
        return JSONResponse(answer)

    @app.post("/two")
    async def two(request: Request) -> JSONResponse:
        assert asked
        return JSONResponse(await asked(await request.body()))

    @app.get("/readyz")
    async def readyz() -> JSONResponse:
        return JSONResponse("ready")

    return app


class Nothing:
    """The second hop of Ray Serve without work."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    async def __call__(self, body: bytes) -> Any:
        return self._answer


class Ingress:
    """The first hop, made as the service's gateway is."""

    def __init__(self, answer: Any, nothing: Any) -> None:
        self._answer, self._nothing = answer, nothing

    def __serve_build_asgi_app__(self) -> Any:
        return application(self._answer, self._nothing.remote)


def no_work(port: str, answer: str, gateways: str) -> None:
    """Ray Serve with no work, in a Ray of its own, until it is ended."""
    from ray import serve
    from ray.serve.config import HTTPOptions
    from ray.serve.schema import LoggingConfig

    from tasc_jobs.ray_local import local_ray

    said = json.loads(Path(answer).read_text())
    quiet = LoggingConfig(enable_access_log=False, log_level="WARNING")
    options: dict[str, Any] = {
        "ray_actor_options": {"num_cpus": 0.1},
        "max_ongoing_requests": AT_ONCE,
    }
    with local_ray():
        serve.start(http_options=HTTPOptions(port=int(port)), logging_config=quiet)
        nothing = serve.deployment(Nothing, name="nothing", **options).bind(said)
        ingress: Any = serve.deployment(
            serve.ingress()(Ingress), name="gateway", num_replicas=int(gateways), **options
        )
        serve.run(ingress.bind(said, nothing), name="no-work", logging_config=quiet)
        try:
            threading.Event().wait()
        finally:
            serve.shutdown()


def bare(port: str, answer: str) -> None:
    """A server without Ray, until it is ended."""
    import uvicorn

    app = application(json.loads(Path(answer).read_text()))
    uvicorn.run(app, port=int(port), log_level="warning", access_log=False)


if __name__ == "__main__":
    subject: Callable[..., None] = {
        "prepare": prepare,
        "engine": engine,
        "vllm": vllm,
        "no-work": no_work,
        "bare": bare,
    }[sys.argv[1]]
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit())  # a Ray must be ended
    subject(*sys.argv[2:])
