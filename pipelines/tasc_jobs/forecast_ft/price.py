"""Measures what a model's prompts and steps cost on this machine. It knows no tokenizer's n-grams.

Answers of two lengths are timed; a straight line through both says what a step costs, and what is
left for the prompt.
"""

import statistics
import time
from collections.abc import Callable, Sequence

from tasc_jobs.errors import EmptyCorpusError
from tasc_jobs.evaluate.subject import Prompt, Subject
from tasc_jobs.forecast_ft.forecast import Price

ROUNDS = 3
_ROWS = 64
_BATCHES = 4  # at least, so that few steps have free rows
_LEAST_TOKENS = 8  # of the longer answers: two lengths that are too close say nothing


def measure_price(
    subject: Subject,
    inputs: Sequence[str],
    tokens: int,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> Price:
    """Time answers of one token, and of as many as a usual answer has, turn by turn.

    Raises:
        EmptyCorpusError: No input's prompt leaves room for an answer.
        JobError: The engine could not go on with an answer.
    """
    most = max(_ROWS, _BATCHES * subject.config.rows)
    prompts = subject.prompts(inputs[:most])
    if not prompts:
        raise EmptyCorpusError(
            f"none of {len(inputs)} prompts leaves room for an answer in "
            f"{subject.config.max_model_len} tokens; raise --max-model-len"
        )
    lengths = (1, max(tokens, _LEAST_TOKENS))
    for length in lengths:
        _timed(subject, prompts, length)
    found: dict[int, list[tuple[float, float]]] = {length: [] for length in lengths}
    for turn in range(ROUNDS * len(lengths)):
        length = lengths[turn % len(lengths)]
        found[length].append(_timed(subject, prompts, length))
        progress(turn + 1, ROUNDS * len(lengths))
    (one, few), (other, many) = (_median(found[length]) for length in lengths)
    step = max((other - one) / (many - few), 0.0) if many > few else 0.0
    return Price(prompt_ms=max(one - few * step, 0.0), step_ms=step)


def _timed(subject: Subject, prompts: Sequence[Prompt], tokens: int) -> tuple[float, float]:
    """Milliseconds and tokens of an answer."""
    began = time.perf_counter()
    said = sum(len(result.tokens) for result in subject.exact_lengths(prompts, tokens))
    return 1000 * (time.perf_counter() - began) / len(prompts), said / len(prompts)


def _median(found: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return statistics.median(ms for ms, _ in found), found[0][1]
