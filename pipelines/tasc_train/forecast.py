"""Forecasts the effect of new tokens without fine-tuning: entropy, length, steps and time.

Algorithm 1 adds one token after the other, so a run with the largest budget contains the runs with
smaller budgets. The times of a prompt and of a step come from a linear fit to answers of two
lengths.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

from tasc_draft.replaying import held_out
from tasc_jobs.errors import EmptyCorpusError
from tasc_jobs.report.document import Curve, Lines, ReportDocument, Table
from tasc_jobs.task_inputs import TaskInputs
from tasc_runtime.progress import StageProgress, silent
from tasc_store import CorpusRow
from tasc_text import TaskTokenizer
from tasc_train.enrich.growing_tokenizer import GrowingTokenizer
from tasc_train.enrich.ngram_selection import Enriched, EnrichSettings, enrich
from tasc_train.evaluate.measured_model import MeasuredModel, Prompt, Setup

_BATCH = 1000
ROUNDS = 3
_ROWS = 64
_BATCHES = 4  # minimum number of batches, so that few steps have free rows
_MIN_TOKENS = 8  # minimum length of the longer answers, for two clearly different lengths
STAGES = {"merge": "tokens", "measure": "runs"}


@dataclass(frozen=True)
class Price:
    """The cost of an answer on a machine: milliseconds of its prompt and of each of its steps.

    Rows that are decoded together share the time.
    """

    prompt_ms: float
    step_ms: float

    def of(self, steps: float) -> float:
        return self.prompt_ms + steps * self.step_ms


@dataclass(frozen=True)
class Point:
    """The forecast for one token budget.

    Attributes:
        new_tokens: Number of new tokens; below the budget if no more n-grams qualify.
        renyi2_bits: Renyi entropy of order 2 of the tokens of the train outputs.
        train_reduction: Number of tokens of the train outputs without new tokens, divided by the
            number with new tokens.
        length_reduction: The same ratio for held-out outputs.
        steps_per_answer: Expected steps without drafts: one per token, and one for the end.
        ms_per_answer: Expected milliseconds per answer; None if no model was measured.
    """

    budget: int
    new_tokens: int
    renyi2_bits: float
    train_reduction: float
    length_reduction: float
    steps_per_answer: float
    ms_per_answer: float | None = None

    def priced(self, price: Price) -> "Point":
        return replace(self, ms_per_answer=price.of(self.steps_per_answer))


def forecast(
    tokenizer: TaskTokenizer,
    train: Sequence[str],
    held_out: Sequence[str],
    settings: EnrichSettings,
    budgets: Sequence[int],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[Point, ...]:
    """Returns a point for each budget, in increasing order.

    Args:
        settings: The rules for choosing tokens; their budget is ignored.
        progress: Called with the number of tokens added and the largest budget.

    Raises:
        FamilyError: A tokenizer of this kind cannot be enriched.
    """
    rising = sorted(set(budgets))
    found = enrich(tokenizer, train, replace(settings, budget=rising[-1]), progress)
    lengths = lengths_by_budget(tokenizer, found, held_out, rising)
    return tuple(
        _point(found, budget, lengths[0], length, len(held_out))
        for budget, length in zip(rising, lengths[1:], strict=True)
    )


def lengths_by_budget(
    tokenizer: TaskTokenizer, found: Enriched, texts: Sequence[str], budgets: Sequence[int]
) -> list[int]:
    """Counts the tokens of texts without new tokens, and with the new tokens of each budget."""
    growing = GrowingTokenizer(tokenizer.backend)
    lengths = [_length(growing, texts)]
    for fewer, more in pairwise((0, *budgets)):
        for token in found.tokens[fewer:more]:
            growing.add(token.content)
        lengths.append(_length(growing, texts))
    return lengths


def _point(found: Enriched, budget: int, before: int, after: int, rows: int) -> Point:
    given = found.tokens[:budget]
    last = given[-1] if given else found
    return Point(
        budget=budget,
        new_tokens=len(given),
        renyi2_bits=last.renyi2_bits,
        train_reduction=found.length / max(last.length, 1),
        length_reduction=before / max(after, 1),
        steps_per_answer=after / rows + 1,
    )


def _length(growing: GrowingTokenizer, texts: Sequence[str]) -> int:
    batches = (texts[start : start + _BATCH] for start in range(0, len(texts), _BATCH))
    return sum(len(ids) for batch in batches for ids in growing.encode(batch))


def measure_price(
    measured: MeasuredModel,
    inputs: Sequence[str],
    tokens: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Price:
    """Measure the time of answers of one token and of ``tokens`` tokens, in alternation.

    Raises:
        EmptyCorpusError: No input's prompt leaves room for an answer.
        JobError: The engine ended an answer with an error.
    """
    rows = max(_ROWS, _BATCHES * measured.config.rows)
    prompts = measured.prompts(inputs[:rows])
    if not prompts:
        raise EmptyCorpusError(
            f"no prompt of {len(inputs)} rows leaves room for an answer in "
            f"{measured.config.max_model_len} tokens; raise --max-model-len"
        )
    lengths = (1, max(tokens, _MIN_TOKENS))
    for length in lengths:
        _timed(measured, prompts, length)
    found: dict[int, list[tuple[float, float]]] = {length: [] for length in lengths}
    for turn in range(ROUNDS * len(lengths)):
        length = lengths[turn % len(lengths)]
        found[length].append(_timed(measured, prompts, length))
        progress(turn + 1, ROUNDS * len(lengths))
    (one, few), (other, many) = (_median(found[length]) for length in lengths)
    step = max((other - one) / (many - few), 0.0) if many > few else 0.0
    return Price(prompt_ms=max(one - few * step, 0.0), step_ms=step)


def _timed(measured: MeasuredModel, prompts: Sequence[Prompt], tokens: int) -> tuple[float, float]:
    """Returns the mean milliseconds and the mean number of tokens of an answer."""
    began = time.perf_counter()
    generated = sum(len(result.tokens) for result in measured.exact_lengths(prompts, tokens))
    return 1000 * (time.perf_counter() - began) / len(prompts), generated / len(prompts)


def _median(found: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return statistics.median(ms for ms, _ in found), found[0][1]


@dataclass(frozen=True)
class Forecast:
    """The forecasts of all budgets.

    Attributes:
        rows: Number of held-out rows with which lengths are measured.
        price: Cost of answers; None if no model was measured.
    """

    name: str
    rows: int
    points: tuple[Point, ...]
    price: Price | None
    batch_rows: int

    @property
    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def forecast_job(
    inputs: TaskInputs,
    test: Sequence[CorpusRow],
    settings: EnrichSettings,
    budgets: Sequence[int],
    setup: Setup,
    progress: StageProgress = silent,
) -> Forecast:
    """Forecast every budget, and measure the time of the model if the options name one.

    Args:
        test: Held-out rows; without any, a part of the task's rows is held out.

    Raises:
        UsageError: A tokenizer or a template is missing, or the dtype is unknown.
        EmptyCorpusError: There are no rows, or too few to hold some out.
        FamilyError: A tokenizer of this kind cannot be enriched.
        JobError: The model cannot be measured.
    """
    timed = (inputs.source, inputs.generation) if inputs.options.model else None
    tokenizer = inputs.tokenizer
    train, held = (inputs.some_rows, test) if test else _split(inputs.some_rows)
    points = forecast(
        tokenizer,
        [row.output for row in train],
        [row.output for row in held],
        settings,
        budgets,
        partial(progress, "merge"),
    )
    price = None
    if timed:
        usual = round(max(point.steps_per_answer for point in points))
        price = measure_price(
            MeasuredModel(*timed, setup),
            [row.input for row in held],
            usual,
            partial(progress, "measure"),
        )
        points = tuple(point.priced(price) for point in points)
    name = inputs.options.task or ", ".join(path.name for path in inputs.options.files)
    return Forecast(name, len(held), points, price, setup.rows)


def _split(rows: Sequence[CorpusRow]) -> tuple[list[CorpusRow], list[CorpusRow]]:
    if len(rows) < 2:
        raise EmptyCorpusError(
            "there is only one row, so none can be held out; name other rows with --test"
        )
    train, held = ([rows[at] for at in part] for part in held_out(len(rows)))
    return train, held


def forecast_page(found: Forecast) -> ReportDocument:
    """Returns the report of the forecasts of all token budgets."""
    first, points = found.points[0], found.points
    budgets = [point.budget for point in points]
    shorter = Curve("held out", budgets, [point.length_reduction for point in points])
    trained = Curve("train", budgets, [point.train_reduction for point in points])
    entropy = Curve(found.name, budgets, [point.renyi2_bits for point in points])
    return ReportDocument(
        f"Forecast of fine-tuning for {found.name}",
        _summary(found),
        (
            Table.of(
                f"What to expect of new tokens, without drafts, b = {found.batch_rows}",
                (_row(point, first) for point in points),
            ),
        ),
        (
            Lines("Length of outputs", "new tokens, at most", "times shorter", (shorter, trained)),
            Lines("Entropy of output tokens", "new tokens, at most", "H2, bits", (entropy,)),
        ),
    )


def _summary(found: Forecast) -> tuple[str, ...]:
    lines = [
        f"lengths of {found.rows:,} held-out outputs, with one step per token and one for the end"
    ]
    if found.price:
        price = found.price
        lines.append(
            f"measured at b = {found.batch_rows}: {price.prompt_ms:.2f} ms for an answer's prompt, "
            f"{price.step_ms:.3f} ms for each of its steps"
        )
    if found.points[-1].new_tokens < found.points[-1].budget:
        lines.append(f"the outputs give at most {found.points[-1].new_tokens} new tokens")
    return tuple(lines)


def _row(point: Point, first: Point) -> dict[str, str]:
    ms, before = point.ms_per_answer, first.ms_per_answer
    speed_up = None if ms is None or before is None else before / max(ms, 1e-9)
    return {
        "budget": str(point.budget),
        "new tokens": str(point.new_tokens),
        "H2, bits": f"{point.renyi2_bits:.3f}",
        "shorter, train": f"{point.train_reduction:.2f} x",
        "shorter, held out": f"{point.length_reduction:.2f} x",
        "steps an answer": f"{point.steps_per_answer:.2f}",
        "ms an answer": "not measured" if ms is None else f"{ms:.2f}",
        "speed-up": "not measured" if speed_up is None else f"{speed_up:.2f} x",
    }
