"""Answers and classifies the rows of Ray datasets, with engines in a pool of Ray actors.

Each actor owns one `LLM`. Ray Data starts the actors, sends them blocks of rows, and restarts those
that die. Rows whose actor died are answered again, and their answers are the same.
"""

import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from inspect import getfullargspec
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary
from zlib import crc32

import pyarrow as pa
from ray.data import ActorPoolStrategy, Dataset

from tasc_runtime.data.saved_task import SavedTask
from tasc_runtime.engine.versions import newest_version
from tasc_runtime.engine_settings import EngineSettings
from tasc_runtime.errors import ServiceError
from tasc_runtime.llm import LLM, Options, parsed, scoring_request, settings_of
from tasc_store import TaskStore, connect
from tasc_text import resolve_folder

_PATHS = ("adapter", "cache_dir", "chat_template", "corpus")  # keywords of `LLM` that may be paths
_LABEL = pa.struct([("label", pa.string()), ("probability", pa.float64())])
# Columns of datasets made here. Otherwise Ray Data would start an engine to find them.
_known: WeakKeyDictionary[Dataset, Mapping[str, Any]] = WeakKeyDictionary()


def generate(
    dataset: Dataset,
    model: str | Path,
    *,
    input: str = "text",
    output: str = "answer",
    error: str = "error",
    concurrency: int | tuple[int, int] = 1,
    num_cpus: float = 0.5,
    num_gpus: float = 0.0,
    batch_size: int = 256,
    preserve_order: bool = False,
    redis_url: str | None = None,
    engine: Mapping[str, Any] | None = None,
    **options: Any,
) -> Dataset:
    """Returns the dataset with an answer to each row.

    ```python
    rows = ray.data.read_parquet("s3://bucket/tickets/")
    answers = tasc_serve.data.generate(rows, "./my-model", max_tokens=64)
    answers.write_parquet("s3://bucket/answers/")
    ```

    Rows are answered when Ray Data needs them, as when they are written. Arguments are checked at
    once. If the columns of the dataset are not known, its first rows are read for that.

    An answer depends only on the row's text, the options and their ``seed``. Equal texts get equal
    answers. Without ``seed``, each call of this function draws one.

    Args:
        model: The name of a task, which is answered in its newest version at this call. With a
            slash in it, or a dot or ``~`` at its beginning: a folder that `LLM.save` wrote, or the
            folder or hub name of a model. A folder must exist on every node.
        input: The column of the inputs, which are texts.
        output: The new column of the answers; null in a row that has none. Another new column,
            ``{output}_finish_reason``, has ``stop``, ``length`` or ``error``.
        error: The new column that says why a row has no answer, for example because its input is
            null or too long; null in other rows.
        concurrency: Number of actors; or the minimum and the maximum, between which Ray Data
            scales.
        num_cpus: Logical CPUs that each actor reserves. If actors reserve all of a cluster, tasks
            that read and write rows cannot run.
        num_gpus: GPUs of each actor, or a part of one. With 0, engines run on the CPU.
        batch_size: Number of rows that an actor answers at a time. The dataset is cut into blocks
            of this size, and the rows of a block whose actor dies are answered again. The last rows
            of a block do not fill the engine, so it should be 30 times the engine's ``rows`` or
            more, and a small part of the rows of each actor.
        preserve_order: Whether rows stay in their order. This also sets the order of everything
            else in the dataset's pipeline. Otherwise blocks follow each other as they are finished.
        redis_url: The store of a task; unset: ``REDIS_URL`` of the environment.
        engine: Further keywords of `LLM`, `LLM.load` or `LLM.from_task`, such as
            ``{"rows": 16, "adapter": "/models/my-lora"}``.
        options: Options of `LLM.generate`, except ``n`` and ``logprobs``.

    Raises:
        FieldError: An option is unknown or out of its range.
        ServiceError: A task is named, but no store.
        StoreError: Redis fails, or there is no such task.
        TextError: There is no such model.
        ValueError: The dataset does not have the column of the inputs, it already has a new column,
            or another argument is wrong.
    """
    asked = parsed(Options, options)
    asked.request(None)  # raises if options contradict each other
    if asked.n not in (None, 1) or asked.logprobs is not None:
        name = "n" if asked.logprobs is None else "logprobs"
        raise ValueError(f"a row has one answer, which is a text; leave {name} out")
    seed = secrets.randbits(63) if asked.seed is None else asked.seed
    columns = {output: pa.string(), f"{output}_finish_reason": pa.string()}
    work = _Work(input, columns, error, (None, "error"), _answers, {**options, "seed": seed})
    pool = _Pool(concurrency, num_cpus, num_gpus, batch_size, preserve_order)
    return pool.mapped(dataset, work, *_opened(model, redis_url, engine or {}, num_gpus))


def classify(
    dataset: Dataset,
    model: str | Path,
    labels: Sequence[str] | None = None,
    *,
    input: str = "text",
    output: str = "label",
    error: str = "error",
    probabilities: bool = False,
    concurrency: int | tuple[int, int] = 1,
    num_cpus: float = 0.5,
    num_gpus: float = 0.0,
    batch_size: int = 256,
    preserve_order: bool = False,
    redis_url: str | None = None,
    engine: Mapping[str, Any] | None = None,
    **options: Any,
) -> Dataset:
    """Returns the dataset with the likeliest label of each row, and its probability.

    Labels are scored without drafts, so that equal texts have equal probabilities.

    Args:
        labels: The labels; unset: the task's ``choices``.
        output: The new column of the labels; null in a row that failed. Where the label is less
            probable than ``abstain_below``, it is ``abstain_label``, or null without one. Other new
            columns are ``{output}_probability`` and ``{output}_unseen_mass``, see `Classification`.
        probabilities: Whether to add the column ``{output}_probabilities``, which has ``label`` and
            ``probability`` of all labels that were scored, the most likely first.
        options: Options of `LLM.classify`: ``end``, ``exact``, ``tolerance``, ``max_steps``,
            ``abstain_below``, ``abstain_label``, ``prior``, ``adapter`` and
            ``truncate_prompt_tokens``.
        dataset, model, input, error, concurrency, num_cpus, num_gpus, batch_size: See `generate`.
        preserve_order, redis_url, engine: See `generate`.

    Raises:
        FieldError, ServiceError, StoreError, TextError, ValueError: See `generate`.
    """
    known = {*getfullargspec(LLM.classify).kwonlyargs} - {"draft", "errors", "progress"}
    if unknown := sorted(options.keys() - known):
        raise ValueError(f"unknown option {unknown[0]}; help(LLM.classify) lists them")
    scoring_request(labels, **options)  # raises if an option is out of its range
    columns = {
        output: pa.string(),
        f"{output}_probability": pa.float64(),
        f"{output}_unseen_mass": pa.float64(),
        **({f"{output}_probabilities": pa.list_(_LABEL)} if probabilities else {}),
    }
    failed = (None,) * len(columns)
    work = _Work(input, columns, error, failed, _labels, {"labels": labels, **options})
    pool = _Pool(concurrency, num_cpus, num_gpus, batch_size, preserve_order)
    return pool.mapped(dataset, work, *_opened(model, redis_url, engine or {}, num_gpus))


@dataclass(frozen=True)
class _Work:
    """The work of an actor.

    Attributes:
        input: The column of the inputs.
        columns: The new columns.
        error: One more new column, for errors.
        failed: Values of ``columns`` in a row with an error.
        find: Yields values and an error for each text. Values may be more than there are columns.
        options: Options of ``find``.
    """

    input: str
    columns: Mapping[str, pa.DataType]
    error: str
    failed: tuple[str | None, ...]
    find: Callable[..., Iterator[tuple[tuple[Any, ...], str | None]]]
    options: Mapping[str, Any]

    def columns_with(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the types of all columns, given those of the dataset's own.

        Raises:
            ValueError: The dataset does not have the inputs, or it has a new column.
        """
        if self.error in self.columns:
            raise ValueError(f"error is {self.error!r}, which is a column of output; rename one")
        if self.input not in own:
            has = ", ".join(own)
            raise ValueError(f"there is no column {self.input!r} among {has}; name one by input")
        if taken := [name for name in (*self.columns, self.error) if name in own]:
            way_out = "give other names by output and error, or drop it"
            raise ValueError(f"the dataset already has a column {taken[0]!r}; {way_out}")
        kind = own[self.input]
        if isinstance(kind, pa.DataType) and not _may_be_text(kind):
            raise ValueError(f"column {self.input!r} has the type {kind}; name a column of texts")
        return {**own, **self.columns, self.error: pa.string()}


class LLMActor:
    """An actor that owns an `LLM`, and adds columns to batches of rows."""

    def __init__(self, open: Callable[[], LLM], work: _Work) -> None:
        self._llm, self._work = open(), work

    def __call__(self, table: pa.Table) -> pa.Table:
        work = self._work
        given = table[work.input].to_pylist()
        rows = [(*work.failed, f"the input is {one!r:.80}; it must be a text") for one in given]
        texts = {i: one for i, one in enumerate(given) if isinstance(one, str)}
        found = work.find(self._llm, list(texts.values()), **work.options)
        for i, (values, error) in zip(texts, found, strict=True):
            rows[i] = (*(work.failed if error else values[: len(work.columns)]), error)
        for at, (name, kind) in enumerate({**work.columns, work.error: pa.string()}.items()):
            table = table.append_column(name, pa.array([row[at] for row in rows], kind))
        return table


def _answers(
    llm: LLM, texts: Sequence[str], **options: Any
) -> Iterator[tuple[tuple[str, str], str | None]]:
    places = [crc32(text.encode()) for text in texts]  # batches may differ from run to run
    for one in llm.generate(texts, places=places, errors="keep", progress=False, **options):
        yield (one.text, one.finish_reason), one.error


def _labels(
    llm: LLM, texts: Sequence[str], **options: Any
) -> Iterator[tuple[tuple[Any, ...], str | None]]:
    for one in llm.classify(texts, draft=False, errors="keep", progress=False, **options):
        scored = [{"label": name, "probability": p} for name, p in one.probabilities.items()]
        yield (one.label, one.probability, one.unseen_mass, scored), one.error


def _opened(
    model: str | Path, redis_url: str | None, engine: Mapping[str, Any], num_gpus: float
) -> tuple[Callable[[], LLM], Mapping[str, Any]]:
    """Returns a function that opens the `LLM` in an actor, and the actor's ``runtime_env``."""
    engine = {**({} if num_gpus else {"device": "cpu"}), **engine}
    for name in _PATHS:  # an actor has another working directory
        if isinstance(path := engine.get(name), str | Path) and Path(path).expanduser().exists():
            engine[name] = str(Path(path).expanduser().resolve())
    if 0 < num_gpus < 1:  # an `LLM` takes every GPU that it sees for a whole one
        share = engine.get("gpu_memory_share", EngineSettings().gpu_memory_share)
        engine["gpu_memory_share"] = share * num_gpus
    open: Callable[..., LLM] = LLM
    place: tuple[str, ...] = (str(model),)
    if isinstance(model, Path) or "/" in model or model.startswith((".", "~")):
        folder = resolve_folder(str(model), engine.get("revision"), weights=False)
        if Path(model).expanduser().is_dir():
            place = (str(folder),)
        open = LLM.load if SavedTask.is_in(folder) else LLM
    else:
        if not (url := redis_url or os.environ.get("REDIS_URL")):
            raise ServiceError(
                f"model is {model}, which names a task, but no store is named; give redis_url or "
                f"set REDIS_URL, or write ./{model} for a folder"
            )
        with closing(connect(url)) as client:
            _, version = newest_version(TaskStore(client), model)
        open, place, engine = LLM.from_task, (model, url), {"version": version, **engine}
    own = getfullargspec(open).kwonlyargs
    fields = {name: value for name, value in engine.items() if name not in own}
    return partial(open, *place, **engine), settings_of(fields, own).runtime_env


@dataclass(frozen=True)
class _Pool:
    """The actors of a dataset; see `generate`."""

    concurrency: int | tuple[int, int]
    num_cpus: float
    num_gpus: float
    batch_size: int
    preserve_order: bool

    def mapped(
        self,
        dataset: Dataset,
        work: _Work,
        open: Callable[[], LLM],
        runtime_env: Mapping[str, Any],
    ) -> Dataset:
        """Returns the dataset with the new columns of ``work``, which actors make."""
        own = _columns_of(dataset)
        columns = None if own is None else work.columns_with(own)
        size = self.concurrency
        least, most = (size, size) if isinstance(size, int) else size
        # One task of an actor is one of these blocks, however large the blocks of the dataset are.
        blocks = dataset.repartition(target_num_rows_per_block=self.batch_size, strict=True)
        mapped = blocks.map_batches(
            LLMActor,
            batch_size=self.batch_size,
            batch_format="pyarrow",
            compute=ActorPoolStrategy(min_size=least, max_size=most),
            fn_constructor_args=(open, work),
            num_cpus=self.num_cpus,
            num_gpus=self.num_gpus,
            udf_modifying_row_count=False,
            runtime_env=dict(runtime_env) or None,
        )
        if columns is not None:
            _known[mapped] = columns
        if self.preserve_order:
            mapped.context.execution_options.preserve_order = True
        return mapped


def _columns_of(dataset: Dataset) -> Mapping[str, Any] | None:
    """Returns the names and types of a dataset's columns; None if it has no rows.

    The type of a column of pandas may be another object than a type of Arrow.

    Raises:
        ValueError: Blocks of the dataset have different types.
    """
    if (known := _known.get(dataset)) is not None:
        return known
    try:
        schema = dataset.schema()
    except pa.ArrowException as error:
        message = f"blocks of the dataset have different types ({error})"
        raise ValueError(f"{message}; cast the columns to one type each") from error
    return schema and dict(zip(schema.names, schema.types, strict=True))


def _may_be_text(kind: pa.DataType) -> bool:
    """Whether a column may have texts; an extension type of Ray has Python objects as binary."""
    texts = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    others = (pa.types.is_null, pa.types.is_dictionary)
    objects = isinstance(kind, pa.BaseExtensionType) and pa.types.is_large_binary(kind.storage_type)
    return objects or any(is_kind(kind) for is_kind in (*texts, *others))
