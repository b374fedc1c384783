"""A batch job: every row of a file answered by engines in a Ray Data actor pool, in file order.

Engines are built by the same worker as online replicas, with the same drafting. Rows come out in
any order and are put back by ordinal; the job fails rather than lose or double one.
"""

import dataclasses
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import ray.data

from tasc_engine import GenerationRequest, GenerationResult
from tasc_jobs.errors import FileError, JobError, RaySetupError
from tasc_jobs.inputs import read_inputs
from tasc_serve.asked import Asked
from tasc_serve.calls import Call
from tasc_serve.settings import EngineSettings
from tasc_serve.worker import Worker
from tasc_store import TaskStore, connect

# An actor gets hundreds of rows at a time: with fewer, rows that end could not be refilled.
BATCH_ROWS = 512
NO_PROGRESS_TIMEOUT_S = 3600

_OUTPUT = pa.schema(
    [
        ("ordinal", pa.int64()),
        ("id", pa.string()),
        ("text", pa.string()),
        ("tokens", pa.list_(pa.int32())),
        ("finish_reason", pa.string()),
        ("index_version", pa.int64()),
        ("steps", pa.int64()),
        ("error", pa.string()),
    ]
)


@dataclass(frozen=True)
class BatchReport:
    """What a batch job did.

    Attributes:
        tokens: Of all answers, end-of-sequence included.
        steps: Decoding steps of all rows together.
        first_error: The first row without an answer, counted from 1, and why; None without errors.
    """

    rows: int
    errors: int
    tokens: int
    steps: int
    first_error: str | None = None

    @property
    def block_efficiency(self) -> float:
        return self.tokens / self.steps if self.steps else 0.0


def generate(
    url: str,
    task: str,
    source: Path,
    output: Path,
    *,
    engine: EngineSettings | None = None,
    actors: int = 1,
    actor_cpus: float = 0.5,
    actor_gpus: float = 0.0,
    draft: bool = True,
    asked: Asked | None = None,
    input_field: str = "input",
    id_field: str = "id",
    progress: Callable[[int], None] = lambda rows: None,
) -> BatchReport:
    """Answer every row of ``source`` and write one JSON line for each to ``output``.

    The output appears only when it is whole. A row that cannot be answered has ``error`` set.

    Args:
        actors: Engines in the pool.
        actor_cpus: Logical CPUs of each; below 1, so that reading is not starved on small machines.
        actor_gpus: GPUs of each; without any, engines run on the CPU.
        asked: How answers are wanted; random numbers of each row are its own.

    Raises:
        RaySetupError: Ray is not running in this process.
        FileError: The input cannot be read, or the output has no folder.
        UnknownTask: There is no such task.
        JobError: A row was lost or doubled.
    """
    if not ray.is_initialized():
        raise RaySetupError("no Ray is running; start one with tasc_jobs.ray_local.local_ray()")
    TaskStore(connect(url)).get(task)  # an unknown task is said here, not by every actor
    if not output.parent.is_dir():
        raise FileError(f"no folder {output.parent} for the output; make it or name another")
    tables = read_inputs(source, input_field, id_field, BATCH_ROWS)
    answers = ray.data.from_arrow(tables).map_batches(
        _Answer,
        fn_constructor_args=(url, task, engine or EngineSettings(), draft, asked, actor_gpus),
        compute=ray.data.ActorPoolStrategy(size=actors),
        num_cpus=actor_cpus,
        num_gpus=actor_gpus,
        batch_size=BATCH_ROWS,
        batch_format="pyarrow",
    )
    # A block of answers may take long; that nothing else hangs is for the engine to say.
    answers.context.execution_no_progress_timeout_s = NO_PROGRESS_TIMEOUT_S
    partial = output.with_name(output.name + ".partial")
    report = _write(answers, partial, sum(t.num_rows for t in tables), progress)
    partial.replace(output)
    return report


class _Answer:
    """One engine of the pool."""

    def __init__(
        self,
        url: str,
        task: str,
        settings: EngineSettings,
        draft: bool,
        asked: Asked | None,
        gpus: float,
    ) -> None:
        self._worker = Worker(connect(url), task, settings, gpus=gpus, max_waiting=BATCH_ROWS)
        self._draft, self._asked = draft, asked or Asked()

    def __call__(self, rows: pa.Table) -> pa.Table:
        answered = {row["ordinal"]: self._failed(row) for row in rows.to_pylist()}
        requests = list(self._requests(answered))
        for result in self._worker.engine.generate(requests):
            answered[int(result.id)].update(self._fields(result))
        return pa.Table.from_pylist(list(answered.values()), _OUTPUT)

    def _requests(self, rows: dict[int, dict[str, Any]]) -> Iterator[GenerationRequest]:
        for ordinal, row in rows.items():
            if row["error"] is None:
                try:
                    request = self._worker.request(self._call(ordinal, row["input"]))
                except ValueError as error:
                    row["error"] = str(error)
                else:
                    yield request

    def _call(self, ordinal: int, prompt: str) -> Call:
        asked = dataclasses.replace(self._asked, prompt=ordinal)
        return Call(str(ordinal), prompt, templated=True, draft=self._draft, asked=asked)

    def _fields(self, result: GenerationResult) -> dict[str, Any]:
        artifact = self._worker.artifact
        if result.error:
            return {"error": result.error}
        return {
            "text": result.text,
            "tokens": list(result.tokens),
            "finish_reason": result.finish_reason,
            "index_version": artifact.version if artifact else None,
            "steps": result.acceptance.steps,
        }

    @staticmethod
    def _failed(row: dict[str, Any]) -> dict[str, Any]:
        return {**dict.fromkeys(_OUTPUT.names), **row}


def _write(answers: Any, path: Path, expected: int, progress: Callable[[int], None]) -> BatchReport:
    """Write rows by ordinal as they become complete; what is ahead of its turn waits here."""
    rows = errors = tokens = steps = 0
    first_error = None
    ahead: dict[int, dict[str, Any]] = {}
    with path.open("w", encoding="utf-8") as file:
        for batch in answers.iter_batches(batch_format="pyarrow", batch_size=None):
            for row in batch.to_pylist():
                if row["ordinal"] in ahead or row["ordinal"] < rows:
                    raise JobError(f"row {row['ordinal']} was answered twice; {path} is not whole")
                ahead[row["ordinal"]] = row
            while (next_row := ahead.pop(rows, None)) is not None:
                rows += 1
                if next_row["error"] is not None:
                    errors += 1
                    first_error = first_error or f"row {rows}: {next_row['error']}"
                tokens += len(next_row["tokens"] or ())
                steps += next_row["steps"] or 0
                file.write(_line(next_row))
            progress(batch.num_rows)
    if rows != expected or ahead:
        raise JobError(f"{expected} rows went in and {rows} came out; {path} is not whole")
    return BatchReport(rows, errors, tokens, steps, first_error)


def _line(row: dict[str, Any]) -> str:
    kept = {k: v for k, v in row.items() if v is not None and k not in ("ordinal", "steps")}
    return json.dumps(kept, ensure_ascii=False) + "\n"
