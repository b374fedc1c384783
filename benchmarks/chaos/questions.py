"""The questions that clients ask, and the answers of the model to them."""

import random
from typing import Any

import tiny
from benchmarks.chaos.clients import Question
from tasc_runtime.llm import LLM

_QUESTIONS = 60


def questions_of(task: Any, url: str) -> list[Question]:
    """Questions, half greedy, half sampled. One engine with one row answers them without drafts.

    Raises:
        AssertionError: The answer to a greedy question differs from `generate` of transformers.
    """
    chance = random.Random(7)
    llm = LLM.from_task(task.record.name, url, rows=1, max_model_len=256, cost_aware=False)
    return [_question(llm, task, chance, at) for at in range(_QUESTIONS)]


def _question(llm: LLM, task: Any, chance: random.Random, at: int) -> Question:
    prompt, most = f"{chance.choice(tiny.SENTENCES)} {at}", chance.choice([1, 8, 24, 64])
    options: dict[str, Any] = {"max_tokens": most}
    if at % 2:
        options |= {"temperature": 1.2, "seed": at, "frequency_penalty": 0.4, "ignore_eos": True}
    ids = llm.tokenizer.encode_prompt(prompt)
    (answer,) = llm.generate(ids, draft=False, **options)
    if not at % 2:
        plain = tuple(tiny.plain(task.model, ids, most))
        assert plain == answer.tokens, f"transformers says {plain}, we say {answer.tokens}"
    body = {"model": task.record.name, "prompt": prompt, **options}
    return Question(body, answer.text, len(answer.tokens))
