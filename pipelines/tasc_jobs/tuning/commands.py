"""The jobs behind `tasc replay` and `tasc tune`."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import redis

from tasc_draft import BigramTable, DraftIndex, DraftSettings, Replay, write_index
from tasc_draft.index.bigrams import read_bigrams
from tasc_jobs.errors import EmptyCorpusError
from tasc_jobs.hints import command
from tasc_jobs.index.publish import IndexSize, current_index, publish_file
from tasc_jobs.preview import Preview, preview
from tasc_jobs.report.document import ReportDocument
from tasc_jobs.task_inputs import InputOptions, TaskInputs, corpus_rows, read_files
from tasc_jobs.tuning.costs import CostFile, costs_here
from tasc_jobs.tuning.held_out import HeldOut
from tasc_jobs.tuning.replay_page import replay_page, tune_page
from tasc_jobs.tuning.replays import (
    Comparison,
    GuidedAnswers,
    Measured,
    compare,
    named_proposers,
    prepare,
)
from tasc_jobs.tuning.tune import AtRows, Price, Tuned, at_rows, by_curve, by_node, planned, tune
from tasc_protocol import GuideSpec, Request
from tasc_runtime.data.local_corpus import TokenRows, encode, index_of
from tasc_runtime.engine_settings import EngineSettings
from tasc_runtime.models import load_tokenizer, template_of
from tasc_runtime.progress import note, show_progress
from tasc_runtime.sampling_options import guide_of
from tasc_store import Artifact, ArtifactStore, CorpusStore, TaskRecord, TaskStore
from tasc_text import PromptTemplate, TaskTokenizer
from tasc_text.template import FIELD


@dataclass(frozen=True)
class StoredTask:
    """A task's record, rows and current index.

    Attributes:
        index: The current index; None if there is none yet.
        index_rows: Number of corpus rows that the index was built from; None if unknown or if
            there is no index.
        newer_rows: Number of corpus rows appended after the index was built; 0 if unknown.
    """

    record: TaskRecord
    tokenizer: TaskTokenizer
    rows: TokenRows
    index: DraftIndex | None
    index_rows: int | None
    newer_rows: int

    @property
    def bigrams(self) -> BigramTable | None:
        return self.index.bigrams if self.index else None

    @property
    def max_bytes(self) -> int | None:
        """Bytes of the index's corpus part if a size cap excluded outputs; else None."""
        if self.index is None or self.index_rows in (None, self.index.corpus.documents):
            return None
        return self.index.corpus.nbytes


def read_task(client: redis.Redis, task: str) -> StoredTask:
    """Read a task, its current index and the rows that the index was built from.

    If these rows are unknown, all rows of the corpus are read.

    Raises:
        EmptyCorpusError: There are no rows.
        StoreError: The task does not exist, or Redis fails.
        DraftError: The current index is damaged or has another format.
        TextError, ServiceError: The tokenizer cannot be loaded, or is not the task's.
    """
    record = TaskStore(client).get(task)
    tokenizer = load_tokenizer(record)
    corpus = CorpusStore(client, record.corpus_name)
    store = _artifacts(client, record)
    artifact, total = store.current(), len(corpus)
    built_from = (artifact and artifact.corpus_rows) or None
    rows = encode(corpus_rows(corpus, built_from or total), tokenizer, template_of(record))
    if not len(rows):
        raise EmptyCorpusError(
            f"the corpus of task {record.corpus_name!r} has no rows; ingest some first"
        )
    index = current_index(store)
    return StoredTask(record, tokenizer, rows, index, built_from, total - len(rows))


def publish(client: redis.Redis, task: StoredTask, index: DraftIndex, forecast: float) -> Artifact:
    """Store an index as the task's next version and make it current.

    Args:
        index: The task's index with other weights and settings. If the task had no index, an index
            of its rows.
        forecast: Expected tokens per step.

    Raises:
        StoreError: Redis fails.
    """
    rows = len(task.rows) if task.index is None else task.index_rows
    store = _artifacts(client, task.record)
    return publish_file(store, partial(write_index, index), rows, forecast=forecast)


def _artifacts(client: redis.Redis, record: TaskRecord) -> ArtifactStore:
    return ArtifactStore(client, record.corpus_name, record.fingerprint)


def replay_job(
    options: InputOptions,
    test: Sequence[Path],
    limit: int | None,
    *,
    proposers: Sequence[str],
    budgets: Sequence[int],
    bigrams: Path | None,
    online: bool,
    choices: tuple[str, ...] = (),
    emit: Callable[[dict[str, Any]], None],
) -> ReportDocument:
    """Replay the answers of files; see `tasc replay --help`.

    Args:
        options: Options with the tokenizer, the prompt and the files that are indexed.
        limit: Maximum number of rows of ``test`` to replay.
        choices: Labels to which answers are limited.
        emit: Called with the figures of each proposer and budget as soon as they are known.

    Raises:
        JobError: A file cannot be read or has no rows, or a proposer is unknown.
        TextError: The tokenizer or the template cannot be used.
        DraftError: The bigram table cannot be used.
    """
    named = named_proposers(proposers, bigrams is not None)
    inputs = TaskInputs(options, None, ())
    tokenizer, template = inputs.tokenizer, inputs.named_template or PromptTemplate(FIELD)
    table = read_bigrams(bigrams, tokenizer.fingerprint) if bigrams else None
    note("reading and tokenising rows ...")
    train = read_files(options.files, options.fields)
    judged = read_files(test, options.fields, limit)
    train_rows, test_rows = (encode(each.rows, tokenizer, template) for each in (train, judged))
    guided = None
    if choices:
        answers = [answer for _, answer in test_rows.answers(tokenizer.eos_id)]
        guided = GuidedAnswers.of(GuideSpec("choice", choices), answers, tokenizer)
    comparison = Comparison(train_rows, test_rows, tokenizer, named, budgets, table, online, guided)
    common = {
        "train_rows": len(train.rows),
        "train_refused": train.refused,
        "test_refused": judged.refused,
        "online": online,
        "end_of_sequence": tokenizer.backend.id_to_token(tokenizer.eos_id),
        "fingerprint": tokenizer.fingerprint,
    }
    note("learning weights and building indexes ...")
    prepared = prepare(comparison)
    found: list[Measured] = []
    with show_progress("replay", comparison.replayed_rows) as bar:
        for measured in compare(comparison, prepared, bar.advance):
            emit({**measured.figures(), **common})
            found.append(measured)
    lines = _in_words(options.files, test, common)
    if guided:
        plain = found[0].replay.plain_steps / found[0].replay.rows
        lines.append(
            f"With these labels, an answer takes {plain:.2f} forward passes without drafts."
        )
    return replay_page(found, lines)


def _in_words(train: Sequence[Path], test: Sequence[Path], common: dict[str, Any]) -> list[str]:
    refused = common["train_refused"] + common["test_refused"]
    lines = [
        f"Indexes hold the {common['train_rows']:,} rows of {_names(train)} and no rows of "
        f"{_names(test)}; answers end with {common['end_of_sequence']}.",
        "Proposers with weights learn from each answer after its replay; the column "
        '"frozen" has the tokens per step without this learning.',
        "Bytes per token: bytes of the corpus part, or of the whole index, divided by the number "
        "of tokens of the indexed outputs. SEP and EOS are counted, and prompts are not.",
    ]
    if common["online"]:
        lines.append("Proposers with weights also draft from answers replayed earlier (--online).")
    if refused:
        lines.append(f"{refused} lines were refused.")
    return lines


def _names(paths: Sequence[Path]) -> str:
    return ", ".join(path.name for path in paths)


@dataclass(frozen=True)
class PriceOptions:
    """The source of a draft token's cost: a fraction of a plain step, or a machine's costs.

    Attributes:
        node_cost: The fraction, used if ``costs`` is None.
        rows: b, the number of rows decoded together.
        measure: Whether to measure the costs of the task's model on this machine.
    """

    node_cost: float
    rows: int
    costs: CostFile | None = None
    measure: bool = False

    def price(self, held: HeldOut) -> Price:
        """Returns the price; raises JobError if the costs for ``rows`` rows are unknown."""
        if self.costs is None:
            return by_node(self.node_cost, held.prompt_tokens)
        curve = self.costs.curve(self.rows, held.context)
        return by_curve(curve, held.prompt_tokens)

    def by_rows(self, held: HeldOut, tuned: Tuned) -> list[AtRows]:
        """Returns the expected speed-up for each measured number of rows."""
        curves = self.costs.curves(held.context) if self.costs else []
        return [at_rows(tuned, curve, held.prompt_tokens) for curve in curves]

    def in_words(self) -> str:
        if self.costs is None:
            return (
                f"Assumed, not measured: a token costs {self.node_cost:.1%} of a step without "
                f"drafts (--node-cost {self.node_cost:g}). --measure-cost measures this cost."
            )
        costs = self.costs
        return (
            f"Measured, not assumed: the cost of a drafted token for {costs.model} in "
            f"{costs.dtype} on {costs.device} at b = {self.rows}."
        )

    def figures(self) -> dict[str, Any]:
        """Returns the assumptions as JSON values; ``node_cost`` or ``step_cost`` is None."""
        if self.costs is None:
            return {"node_cost": self.node_cost, "step_cost": None}
        machine = self.costs.model_dump(include={"model", "device", "dtype"})
        return {"node_cost": None, "step_cost": {**machine, "rows": self.rows}}


def tune_job(
    client: redis.Redis, name: str, priced: PriceOptions, branching: bool, measured_rows: int = 0
) -> tuple[dict[str, Any], ReportDocument]:
    """Choose a task's settings, and publish its index with them as the current version.

    Args:
        measured_rows: Number of rows that the model answers with the chosen settings, with and
            without drafts; limited to the rows that neither the index nor the weights were built
            from.

    Returns:
        The figures as JSON values, and the report.

    Raises:
        JobError: The corpus is too small, or the costs were not measured for this number of rows.
        StoreError: The task does not exist, or Redis fails.
        DraftError: The current index is damaged or has another format.
        TextError, EngineError: The model cannot be loaded for a measurement.
    """
    if priced.costs:
        priced.costs.curve(priced.rows, 0.0)  # raises an error before anything slow begins
    note("reading and tokenising rows ...")
    task = read_task(client, name)
    _note_differences(task)
    held = HeldOut(
        task.rows,
        task.tokenizer,
        branching=branching,
        bigrams=task.bigrams,
        max_bytes=task.max_bytes,
        guide=guide_of(task.record),
    )
    if priced.measure:
        priced = replace(priced, costs=costs_here(task.record, priced.rows, note))
    price = priced.price(held)
    with show_progress(f"tune {name}", planned(held), "replays") as bar:
        tuned = tune(held, task.record.draft, price, bar.advance)
    settings = tuned.chosen.settings
    if "recent" in settings.sources:
        settings = replace(settings, recent_tokens=task.record.draft.recent_tokens)
    index = task.index or index_of(task.rows, task.tokenizer)
    index = replace(index, weights=tuned.weights, settings=settings)
    forecast = tuned.chosen.replay.tokens_per_step
    artifact, size = publish(client, task, index, forecast), IndexSize.of(index)
    measured = None
    if measured_rows:
        measured = _measured(task, held, settings, priced.rows, measured_rows)
    by_rows = priced.by_rows(held, tuned)
    figures = {
        "task": name,
        "measured": measured and _preview_figures(measured),
        "version": artifact.version,
        "corpus_rows": artifact.corpus_rows,
        "judged_rows": held.rows,
        "prompt_tokens": held.prompt_tokens,
        "price": priced.figures(),
        "by_rows": [asdict(each) for each in by_rows],
        "index": size.figures(),
        "settings": asdict(settings),
        "chosen": tuned.chosen.figures(),
        "sources": [worth.figures() for worth in tuned.worths],
        "trials": [trial.figures() for trial in tuned.trials],
    }
    summary = (
        f"Index version {artifact.version} of {name} is current: mixed, up to "
        f"{settings.num_speculative_tokens} draft tokens, {settings.neighbours} neighbours, "
        f"min_prob {settings.min_prob}, sources {', '.join(settings.sources)}.",
        f"Expected: {_forwards(tuned.chosen.replay)} and {tuned.chosen.speed_up:.2f} x, from "
        f"{held.rows:,} rows that neither the index nor the weights had seen. {_ASSUMED}",
        priced.in_words(),
        *([f"By rows decoded together: {', '.join(map(str, by_rows))}."] if by_rows else []),
        f"Size of the index: {size.in_words}.",
        _measured_in_words(measured, priced.rows),
    )
    return figures, tune_page(name, tuned, by_rows, summary)


_ASSUMED = (
    "This assumes that the model answers as the corpus does; `tasc tune --rows N` measures the "
    "speed-up on N rows."
)


def _forwards(found: Replay) -> str:
    drafted, plain = found.steps / found.rows, found.plain_steps / found.rows
    return f"{drafted:.2f} forward passes an answer ({plain:.2f} without drafts)"


def _measured(
    task: StoredTask, held: HeldOut, settings: DraftSettings, b: int, rows: int
) -> Preview:
    """Answer held-out rows with the task's model, with the tuned drafts and without drafts."""
    from tasc_runtime.engine.builder import EngineBuilder

    note(f"loading the model to measure {min(rows, held.rows)} rows ...")
    drafted = replace(task.record, draft=settings)
    index = held.index(settings, held.weights(settings))
    builder = EngineBuilder(
        drafted, 1, EngineSettings(rows=b), tokenizer=task.tokenizer, index=index, say=note
    )
    requests, refused = list[Request](), 0
    for n, (prompt, _) in enumerate(held.judging[:rows]):
        try:
            requests.append(builder.reader.request(Request(str(n), tuple(prompt.tolist()))))
        except ValueError:
            refused += 1
    return preview(builder.engine, requests, refused)


def _preview_figures(found: Preview) -> dict[str, Any]:
    return {
        "rows": found.rows,
        "refused": found.refused,
        "identical": found.identical,
        "forwards_per_answer": found.forwards(True),
        "plain_forwards_per_answer": found.forwards(False),
        "rows_per_s": found.rows / found.drafted.seconds if found.rows else None,
        "plain_rows_per_s": found.rows / found.plain.seconds if found.rows else None,
        "speed_up": found.speed_up,
    }


def _measured_in_words(found: Preview | None, b: int) -> str:
    if found is None:
        return "Not measured: `tasc tune --rows N` measures the speed-up on N rows."
    if not found.rows:
        return f"Not measured: none of {found.refused} rows can be answered."
    return (
        f"Measured: {found.speed_up:.2f} x on {found.rows} rows that the model answered, up to "
        f"{min(found.rows, b)} at a time, {found.forwards(True):.2f} forward passes an answer "
        f"({found.forwards(False):.2f} without drafts), {found.identical} of {found.rows} "
        "answers identical."
    )


def _note_differences(task: StoredTask) -> None:
    """Notes how the rows of the current index differ from the rows used for tuning."""
    build = command("build-index", task.record.name)
    if task.newer_rows:
        note(f"{task.newer_rows} newer rows are not in the index; `{build}` adds them")
    if task.index is not None and task.index_rows is None:
        note(
            "the current index came with the task, and its rows are unknown; the figures are "
            f"those of an index of the corpus, which `{build}` builds"
        )
