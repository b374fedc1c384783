"""Timed runs of the same rows, with drafts and without, turn by turn. It judges no answer."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tasc_draft import DraftIndex
from tasc_jobs.evaluate.subject import Prompt, Subject

WARM_UP_ROWS = 32


@dataclass(frozen=True)
class Run:
    """All rows answered once.

    Attributes:
        texts: Answers, in the order of the prompts.
        tokens: Of all answers, ends of sequence included.
        steps: Forwards that could give a row a token, over all rows.
        seconds: From the first request to the last answer.
    """

    texts: tuple[str, ...]
    tokens: int
    steps: int
    seconds: float


@dataclass(frozen=True)
class Spread:
    """Several measurements of one thing."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True)
class Side:
    """What runs of one kind have in common.

    Attributes:
        ms_per_answer: Milliseconds of a run by its answers: the share of the whole batch's time.
    """

    answers: tuple[str, ...]
    tokens_per_answer: float
    steps_per_answer: float
    ms_per_answer: Spread

    @classmethod
    def of(cls, runs: Sequence[Run]) -> "Side":
        rows = len(runs[0].texts)
        return cls(
            runs[0].texts,
            statistics.median(run.tokens for run in runs) / rows,
            statistics.median(run.steps for run in runs) / rows,
            Spread.of([1000 * run.seconds / rows for run in runs]),
        )


def measure(
    subject: Subject,
    prompts: Sequence[Prompt],
    index: DraftIndex | None,
    repeats: int,
    progress: Callable[[int], None] = lambda rows: None,
) -> dict[str, Side]:
    """Sides ``plain`` and, where there is an index, ``drafted``; warmed up before.

    The order changes from round to round, so that neither side gets the warmer machine. Each
    drafted run begins without what was learnt from answers of the one before.

    Raises:
        JobError: The engine could not go on with an answer.
    """
    drafts: dict[str, DraftIndex | None] = {"plain": None}
    if index is not None:
        drafts["drafted"] = index
    for each in drafts.values():
        answer(subject, prompts[:WARM_UP_ROWS], each)
    runs: dict[str, list[Run]] = {side: [] for side in drafts}
    for turn in range(repeats):
        for side in sorted(drafts, reverse=turn % 2 == 0):
            runs[side].append(answer(subject, prompts, drafts[side], progress))
    return {side: Side.of(found) for side, found in runs.items()}


def answer(
    subject: Subject,
    prompts: Sequence[Prompt],
    index: DraftIndex | None,
    progress: Callable[[int], None] = lambda rows: None,
) -> Run:
    """Answer all prompts, all handed over at once."""
    subject.draft_from(index)
    texts: dict[int, str] = {}
    tokens = steps = 0
    began = time.perf_counter()
    for row, result in subject.answers(prompts, draft=index is not None):
        texts[row] = result.text
        tokens += len(result.tokens)
        steps += result.acceptance.steps
        progress(1)
    seconds = time.perf_counter() - began
    return Run(tuple(texts[p.row] for p in prompts), tokens, steps, seconds)
