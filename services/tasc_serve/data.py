"""Answers and classifies the rows of Ray datasets, with engines in a pool of Ray actors.

Each actor owns one `LLM`. Ray Data starts the actors, sends them blocks of rows, and restarts those
that die. Rows whose actor died are answered again, and their answers are the same.
"""

import os
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, fields
from functools import partial
from inspect import getfullargspec
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary
from zlib import crc32

import pyarrow as pa
from msgspec.structs import replace
from ray.data import ActorPoolStrategy, Dataset

from tasc_protocol import GenerationResult, Request, Scoring
from tasc_runtime.data.saved_task import SavedTask
from tasc_runtime.engine.versions import newest_version
from tasc_runtime.engine_settings import EngineSettings
from tasc_runtime.errors import ServiceError
from tasc_runtime.llm import LLM, Options, label_guide, parsed, settings_of
from tasc_store import TaskStore, connect
from tasc_text import resolve_folder

_LABEL = pa.struct([("label", pa.string()), ("probability", pa.float64())])
# Types of columns that may have texts. Ray Data has a type for any objects of Python.
_TEXTS = re.compile(r"(large_)?string|null|dictionary<values=(large_)?string|extension.*ObjectType")
_OF_ROWS = ("input", "messages", "min_tokens", "prompt")  # fields of errors that one row may have
_SCORING = {field.name for field in fields(Scoring)} - {"biases", "mass", "temperature"}
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
            ``{"rows": 16, "adapter": "/models/my-lora"}``. Paths are absolute, because actors have
            other working directories.
        options: Options of `LLM.generate`, except ``n`` and ``logprobs``.

    Raises:
        FieldError: An option is unknown or out of its range.
        ServiceError: A task is named, but no store.
        StoreError: Redis fails, or there is no such task.
        TextError: There is no such model.
        ValueError: The dataset does not have the column of the inputs, it already has a new column,
            or another argument is wrong.
    """
    given = parsed(Options, options)
    if given.n not in (None, 1) or given.logprobs is not None:
        raise ValueError("a row has one answer, which is a text; leave n and logprobs out")
    asked = replace(given.request(None, secrets.randbits(63)), max_tokens=given.max_tokens)
    columns = {output: pa.string(), f"{output}_finish_reason": pa.string()}
    work = _Work(input, columns, error, (None, "error"), asked)
    place, env = _place(model, redis_url, engine or {}, num_gpus)
    sizes = {"batch_size": batch_size, "num_cpus": num_cpus, "num_gpus": num_gpus}
    return _mapped(dataset, work, place, concurrency, preserve_order, runtime_env=env, **sizes)


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
            ``abstain_below``, ``abstain_label``, ``adapter`` and ``truncate_prompt_tokens``; and
            ``top_k``, the maximum number of probabilities of a row.
        dataset, model, input, error, concurrency, num_cpus, num_gpus, batch_size: See `generate`.
        preserve_order, redis_url, engine: See `generate`.

    Raises:
        FieldError, ServiceError, StoreError, TextError, ValueError: See `generate`.
    """
    known = {*_SCORING, "adapter", "truncate_prompt_tokens"}
    if unknown := sorted(options.keys() - known):
        raise ValueError(f"unknown option {unknown[0]}; known are {', '.join(sorted(known))}")
    how = Scoring(**{name: options.pop(name) for name in _SCORING & options.keys()})
    guide = None if labels is None else label_guide(labels)
    asked = Request(guide=guide, scoring=how, draft=False, **options)
    kinds = {"": pa.string(), "_probability": pa.float64(), "_unseen_mass": pa.float64()}
    if probabilities:
        kinds["_probabilities"] = pa.list_(_LABEL)
    columns = {f"{output}{name}": kind for name, kind in kinds.items()}
    work = _Work(input, columns, error, (None,) * len(columns), asked)
    place, env = _place(model, redis_url, engine or {}, num_gpus)
    sizes = {"batch_size": batch_size, "num_cpus": num_cpus, "num_gpus": num_gpus}
    return _mapped(dataset, work, place, concurrency, preserve_order, runtime_env=env, **sizes)


@dataclass(frozen=True)
class _Work:
    """The work of an actor.

    Attributes:
        input: The column of the inputs.
        columns: The new columns.
        error: One more new column, for errors.
        failed: Values of ``columns`` in a row with an error.
        asked: The request that all rows share.
    """

    input: str
    columns: Mapping[str, pa.DataType]
    error: str
    failed: tuple[str | None, ...]
    asked: Request

    def columns_with(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the types of all columns, given those of the dataset's own.

        Raises:
            ValueError: The dataset does not have the inputs, or it has a new column.
        """
        if self.error in self.columns:
            raise ValueError(f"error is {self.error!r}, which is a column of output; rename one")
        if self.input not in own:
            raise ValueError(f"there is no column {self.input!r} in {', '.join(own)}; set input")
        if taken := [name for name in (*self.columns, self.error) if name in own]:
            raise ValueError(f"the dataset has a column {taken[0]!r}; set another output or error")
        kind = own[self.input]  # a column of pandas may have another object as its type
        if isinstance(kind, pa.DataType) and not _TEXTS.match(str(kind)):
            raise ValueError(f"column {self.input!r} has the type {kind}; name a column of texts")
        return {**own, **self.columns, self.error: pa.string()}

    def request(self, row: int, text: Any) -> Request:
        """Returns the request of a row of a batch; raises ValueError if it has no text.

        Its random numbers depend on its text, since the row of a batch may differ from run to run.
        """
        if not isinstance(text, str):
            raise ValueError(f"input: {text!r:.80} is not a text")
        place = crc32(text.encode())
        return replace(self.asked, id=str(row), prompt=text, templated=True, prompt_index=place)

    def values(self, result: GenerationResult) -> tuple[Any, ...]:
        """Returns the values of the new columns in a row."""
        if result.error:
            return (*self.failed, result.error)
        if (scores := result.scores) is None:
            return (result.text, result.finish_reason, None)
        found = scores.probabilities
        pairs = zip(scores.labels, found, strict=True)
        scored = [{"label": label, "probability": probability} for label, probability in pairs]
        values = (result.text or None, found[0], scores.unseen, scored)
        return (*values[: len(self.columns)], None)


class LLMActor:
    """An actor that owns an `LLM`, and adds columns to batches of rows."""

    def __init__(self, place: Callable[[], LLM], work: _Work) -> None:
        self._llm, self._work = place(), work

    def __call__(self, table: pa.Table) -> pa.Table:
        work, requests, rows = self._work, list[Request](), dict[int, tuple[Any, ...]]()
        for row, text in enumerate(table[work.input].to_pylist()):
            try:
                requests.append(self._llm.reader.request(work.request(row, text)))
            except ValueError as error:
                field = getattr(error, "field", "input")
                if field.partition(".")[0] not in _OF_ROWS:
                    raise  # every row has this error
                reason = str(error).removeprefix(f"request {row}: ")
                reason = re.sub(r"^(messages|prompt)\b[\w.]*", "input", reason)
                rows[row] = (*work.failed, reason)
        for result in self._llm.engine.generate(requests):
            rows[int(result.id)] = work.values(result)
        for at, (name, kind) in enumerate({**work.columns, work.error: pa.string()}.items()):
            table = table.append_column(name, pa.array([rows[i][at] for i in sorted(rows)], kind))
        return table


def _place(
    model: str | Path, redis_url: str | None, engine: Mapping[str, Any], num_gpus: float
) -> tuple[Callable[[], LLM], dict[str, Any]]:
    """Returns a function that opens the `LLM` in an actor, and the actor's ``runtime_env``."""
    engine = {**({} if num_gpus else {"device": "cpu"}), **engine}
    if 0 < num_gpus < 1:  # an `LLM` takes every GPU that it sees for a whole one
        share = engine.get("gpu_memory_share", EngineSettings().gpu_memory_share)
        engine["gpu_memory_share"] = share * num_gpus
    where, url = [str(model)], redis_url or os.environ.get("REDIS_URL")
    open: Callable[..., LLM] = LLM
    if isinstance(model, Path) or "/" in model or model.startswith((".", "~")):
        folder = resolve_folder(str(model), engine.get("revision"), weights=False)
        if Path(model).expanduser().is_dir():
            where = [str(folder)]
        open = LLM.load if SavedTask.is_in(folder) else LLM
    elif url:
        with closing(connect(url)) as client:
            _, version = newest_version(TaskStore(client), model)
        open, where, engine = LLM.from_task, [model, url], {"version": version, **engine}
    else:
        names = f"{model} names a task, but no store is named; give redis_url or set REDIS_URL"
        raise ServiceError(f"{names}, or write ./{model} for a folder")
    own = getfullargspec(open).kwonlyargs
    settings = settings_of({name: engine[name] for name in engine.keys() - set(own)}, own)
    return partial(open, *where, **engine), settings.runtime_env


def _mapped(
    dataset: Dataset,
    work: _Work,
    place: Callable[[], LLM],
    concurrency: int | tuple[int, int],
    preserve_order: bool,
    **sizes: Any,
) -> Dataset:
    """Returns the dataset with the new columns of ``work``, which actors make."""
    try:
        columns = _known.get(dataset)
        if columns is None and (schema := dataset.schema()):  # there are rows
            columns = dict(zip(schema.names, schema.types, strict=True))
    except pa.ArrowException as error:
        raise ValueError(f"blocks have columns of different types ({error}); cast them") from error
    least, most = (concurrency,) * 2 if isinstance(concurrency, int) else concurrency
    columns = columns and work.columns_with(columns)
    # One task of an actor is one of these blocks, however large the blocks of the dataset are.
    blocks = dataset.repartition(target_num_rows_per_block=sizes["batch_size"], strict=True)
    mapped = blocks.map_batches(
        LLMActor,
        batch_format="pyarrow",
        compute=ActorPoolStrategy(min_size=least, max_size=most),
        fn_constructor_args=(place, work),
        udf_modifying_row_count=False,
        **sizes,
    )
    if columns:
        _known[mapped] = columns
    if preserve_order:
        mapped.context.execution_options.preserve_order = True
    return mapped
