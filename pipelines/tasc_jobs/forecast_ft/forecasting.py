"""What `tasc forecast-ft` is given, as a forecast: rows, a tokenizer, maybe a model to measure."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from tasc_draft.learning import held_out
from tasc_engine import ModelSource
from tasc_engine.model.loading import DTYPES
from tasc_jobs.enrich.algorithm import EnrichSettings
from tasc_jobs.enrich.texts import TextSource, corpus_source, file_source
from tasc_jobs.errors import EmptyCorpusError, UsageError
from tasc_jobs.evaluate.subject import Asking, Setup, Subject
from tasc_jobs.forecast_ft.forecast import Point, Price, forecast
from tasc_jobs.forecast_ft.price import measure_price
from tasc_jobs.runtime.stages import StageProgress, silent
from tasc_runtime.engine.model_source import device_of
from tasc_runtime.rows import Fields, read_corpus
from tasc_store import TaskStore, connect
from tasc_text import PromptTemplate

STAGES = {"merge": "tokens", "measure": "runs"}


@dataclass(frozen=True)
class Rows:
    """Where rows come from.

    Attributes:
        train: Files; the task's corpus, if there are none.
        test: Files of held-out rows; a part of the others, if there are none.
        tokenizer: That of the model, if there is none.
    """

    task: str | None
    train: tuple[Path, ...]
    test: tuple[Path, ...]
    tokenizer: Path | None
    eos: str | None
    fields: tuple[str, str]


@dataclass(frozen=True)
class Measuring:
    """The model whose steps are timed, and how."""

    model: Path
    template: str | None
    dtype: str
    device: str
    setup: Setup


@dataclass(frozen=True)
class Forecast:
    """What was found.

    Attributes:
        rows: Held-out rows that lengths are judged by.
        price: None where no model was measured.
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
    url: str | None,
    rows: Rows,
    settings: EnrichSettings,
    budgets: Sequence[int],
    measuring: Measuring | None,
    progress: StageProgress = silent,
) -> Forecast:
    """Forecast every budget.

    Raises:
        UsageError: A tokenizer or a template is missing, or the dtype is none.
        EmptyCorpusError: There are no rows, or too few to hold some out.
        FamilyError: A tokenizer of this kind cannot be enriched.
        JobError: The model cannot be measured.
    """
    template = _template(url, rows, measuring) if measuring else None
    train, held = _split(url, rows, measuring)
    price = None
    points = forecast(
        train.tokenizer, train.outputs, held.outputs, settings, budgets,
        lambda done, most: progress("merge", done, most),
    )  # fmt: skip
    if measuring and template:
        usual = round(max(point.steps_per_answer for point in points))
        price = _price(measuring, template, held, usual, lambda n, of: progress("measure", n, of))
        points = tuple(point.priced(price) for point in points)
    name = rows.task or ", ".join(path.name for path in rows.train)
    setup = measuring.setup if measuring else Setup()
    return Forecast(name, len(held.outputs), points, price, setup.rows)


def _price(
    measuring: Measuring,
    template: PromptTemplate,
    held: TextSource,
    tokens: int,
    progress: Callable[[int, int], None],
) -> Price:
    device = device_of(measuring.device, gpus=torch.cuda.device_count())
    source = ModelSource(measuring.model, dtype=measuring.dtype, device=device)
    subject = Subject(source, Asking(template), measuring.setup)
    return measure_price(subject, held.inputs, tokens, progress)


def _split(
    url: str | None, rows: Rows, measuring: Measuring | None
) -> tuple[TextSource, TextSource]:
    tokenizer = rows.tokenizer or (measuring.model if measuring else None)
    if rows.train:
        train = file_source(rows.train, tokenizer, rows.eos, rows.fields)
    else:
        assert url is not None
        assert rows.task is not None
        train = corpus_source(url, rows.task, tokenizer, rows.eos)
    if rows.test:
        return train, _test(train, rows)
    if len(train.outputs) < 2:
        raise EmptyCorpusError("one row alone cannot be held out; name others with --test")
    kept, held = (_some(train, part.tolist()) for part in held_out(len(train.outputs)))
    return kept, held


def _test(train: TextSource, rows: Rows) -> TextSource:
    found = list(read_corpus(rows.test, Fields(*rows.fields)))
    if not found:
        raise EmptyCorpusError(f"no rows in {', '.join(map(str, rows.test))}; name other files")
    return TextSource(train.tokenizer, [row.input for row in found], [row.output for row in found])


def _some(source: TextSource, rows: Sequence[int]) -> TextSource:
    return TextSource(
        source.tokenizer, [source.inputs[r] for r in rows], [source.outputs[r] for r in rows]
    )


def _template(url: str | None, rows: Rows, measuring: Measuring) -> PromptTemplate:
    if measuring.dtype not in DTYPES:
        raise UsageError(f"dtype is {measuring.dtype}; choose one of {', '.join(DTYPES)}")
    if measuring.template is not None:
        return PromptTemplate(measuring.template.replace("\\n", "\n"))
    if url is None or rows.task is None:
        raise UsageError("files do not say how a model is asked; name the prompt with --template")
    with connect(url) as client:
        return PromptTemplate(TaskStore(client).get(rows.task).template)
