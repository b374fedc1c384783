"""The questions that clients ask, and the answers of the model to them."""

import random
from typing import Any

import tiny
from benchmarks.chaos.clients import Question
from tasc_engine import GenerationRequest
from tasc_runtime.engine.builder import EngineBuilder
from tasc_runtime.engine_settings import EngineSettings
from tasc_runtime.protocol import Call
from tasc_runtime.sampling_options import SamplingOptions
from tasc_store import connect

_QUESTIONS = 60


def questions_of(task: Any, url: str) -> list[Question]:
    """Questions, half greedy, half sampled. One engine with one row answers them without drafts.

    Raises:
        AssertionError: The answer to a greedy question differs from `generate` of transformers.
    """
    chance = random.Random(7)
    with connect(url) as client:
        settings = EngineSettings(rows=1, max_model_len=256, cost_aware=False)
        worker = EngineBuilder.of_task(client, task.record.name, settings)
        return [_question(worker, task, chance, at) for at in range(_QUESTIONS)]


def _question(worker: EngineBuilder, task: Any, chance: random.Random, at: int) -> Question:
    prompt = f"{chance.choice(tiny.SENTENCES)} {at}"
    body: dict[str, Any] = {
        "model": task.record.name, "prompt": prompt, "max_tokens": chance.choice([1, 8, 24, 64]),
    }  # fmt: skip
    if at % 2:
        body |= {"temperature": 1.2, "seed": at, "frequency_penalty": 0.4, "ignore_eos": True}
    request = worker.request(_call(body))
    (result,) = worker.engine.generate([request])
    if not at % 2:
        _require_plain(task, request, result.tokens)
    return Question(body, result.text, len(result.tokens))


def _call(body: dict[str, Any]) -> Call:
    names = ("temperature", "seed", "frequency_penalty", "ignore_eos")
    options = SamplingOptions(**{name: body[name] for name in names if name in body})
    return Call(
        "q", body["prompt"], templated=False, max_tokens=body["max_tokens"], draft=False,
        options=options,
    )  # fmt: skip


def _require_plain(task: Any, request: GenerationRequest, tokens: tuple[int, ...]) -> None:
    plain = tiny.plain(task.model, request.prompt, request.max_tokens)
    assert tuple(plain) == tokens, f"transformers says {plain}, we say {tokens}"
