"""A corpus in Redis to token ids on this machine's disk, by Ray Data. It builds nothing of them.

Blocks of ids stream through the object store and are written as they come, in whatever order; the
files hold them in corpus order. Memory holds a few blocks and a few numbers a row.
"""

import functools
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import ray.data

from tasc_draft.tokens import Int32, Int64, Tokens
from tasc_jobs.index.redis_source import RedisCorpusSource
from tasc_jobs.index.token_file import TokenFile
from tasc_jobs.runtime.stages import StageProgress
from tasc_runtime.models import load_tokenizer
from tasc_store import TaskRecord
from tasc_text import PromptTemplate, TaskTokenizer

# So much, by rows or by text, is encoded at a time, and read by one task.
BATCH_ROWS, _BATCH_BYTES = 500, 2 << 20
_RANGE_ROWS, _RANGE_BYTES = 4_000, 16 << 20
# Ray Data's own 128 MiB are more than a small object store has.
_BLOCK_BYTES = 8 << 20
_IDS = pa.list_(pa.int32())


def tokenise(
    source: RedisCorpusSource,
    record: TaskRecord,
    folder: Path,
    parallelism: int | None,
    progress: StageProgress,
) -> tuple[Tokens, Tokens | None]:
    """The outputs of a corpus and, as the service will encode them, its rendered prompts.

    A corpus none of whose rows has an input has no prompts. Where some rows have one, a row without
    has the bare template for a prompt, as a request without would.

    Args:
        folder: Where the files go; the arrays returned are maps of them.
        parallelism: Ranges the corpus is read in; by default one for every 4,000 rows or 16 MiB.
        progress: Told of stage ``tokenise``, in rows.

    Raises:
        JobError: A row was lost or doubled.
    """
    done, any_input = 0, False
    progress("tokenise", 0, source.rows)
    row_bytes = max(source.estimate_inmemory_data_size() // source.rows, 1)
    ranges = parallelism or -(-source.rows // _most(_RANGE_ROWS, _RANGE_BYTES, row_bytes))
    dataset = ray.data.read_datasource(source, override_num_blocks=ranges).map_batches(
        functools.partial(_encode, record),
        batch_format="pyarrow",
        batch_size=_most(BATCH_ROWS, _BATCH_BYTES, row_bytes),
    )
    dataset.context.target_max_block_size = _BLOCK_BYTES
    with TokenFile(folder / "outputs") as outputs, TokenFile(folder / "prompts") as prompts:
        for table in dataset.iter_batches(batch_format="pyarrow", batch_size=None):
            ordinals = table["ordinal"].to_numpy()
            outputs.append(ordinals, *_flat(table["output"]))
            prompts.append(ordinals, *_flat(table["prompt"]))
            any_input = any_input or bool(pc.any(table["has_input"]).as_py())
            done += table.num_rows
            progress("tokenise", done, source.rows)
    return outputs.tokens(source.rows), prompts.tokens(source.rows) if any_input else None


def _most(rows: int, room: int, row_bytes: int) -> int:
    """How many rows of a size go into so many rows and bytes."""
    return max(min(rows, room // row_bytes), 1)


def _flat(column: pa.ChunkedArray) -> tuple[Int32, Int64]:
    """The ids of a column's lists, one behind the other, and the lists' lengths."""
    whole = column.combine_chunks()
    return pc.list_flatten(whole).to_numpy(), pc.list_value_length(whole).to_numpy()


def _encode(record: TaskRecord, table: pa.Table) -> pa.Table:
    tokenizer, template = _tokenizer(record), PromptTemplate(record.template)
    inputs = table["input"].to_pylist()
    prompts = [tokenizer.encode_prompt(template.render(value)) for value in inputs]
    outputs = tokenizer.encode_outputs(table["output"].to_pylist())
    return pa.table(
        {
            "ordinal": table["ordinal"],
            "output": pa.array(outputs, _IDS),
            "prompt": pa.array(prompts, _IDS),
            "has_input": pa.array([bool(value) for value in inputs], pa.bool_()),
        }
    )


@functools.cache
def _tokenizer(record: TaskRecord) -> TaskTokenizer:
    """Loaded once per worker process, from the folder or hub cache of the worker's own node."""
    return load_tokenizer(record)
