"""Tokenises a corpus in Redis with Ray Data, to files of token ids on this machine's disk.

Blocks of ids are streamed through the object store and written in the order of their arrival. The
final files are in corpus order. The memory holds a few blocks, and a few numbers per row.
"""

import functools
from pathlib import Path
from typing import BinaryIO, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import ray.data

from tasc_draft.drafts import Int32, Int64, Tokens
from tasc_jobs.errors import JobError
from tasc_jobs.index.redis_source import RedisCorpusSource
from tasc_jobs.words import SIDES, one_encoding_thread, text_column, token_ids
from tasc_runtime.models import load_tokenizer, template_of
from tasc_runtime.progress import StageProgress
from tasc_store import TaskRecord

_LEAST_ROWS, _MOST_BYTES = 4_000, 8 << 20  # of a range
_ENCODED_ROWS = 8_000  # at a time; a long template makes prompts that need much memory
# Ray Data's default of 128 MiB exceeds a small object store.
_BLOCK_BYTES = 8 << 20


class TokenFile:
    """A file of token ids. Append rows inside the block, then call ``tokens``.

    Args:
        path: The file to write. If rows are appended out of order, a second file beside it has
            them in order.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO
        self._ordinals: list[Int64] = []
        self._lengths: list[Int64] = []

    def __enter__(self) -> Self:
        self._file = self._path.open("wb")
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def append(self, ordinals: Int64, ids: Int32, lengths: Int64) -> None:
        """Add rows.

        Args:
            ordinals: ``int64[rows]``, the positions of the rows in the corpus.
            ids: ``int32[tokens]``, the concatenated tokens of the rows.
            lengths: ``int64[rows]``, the number of tokens of each row.
        """
        self._file.write(np.ascontiguousarray(ids, np.int32).data)
        self._ordinals.append(np.asarray(ordinals, np.int64))
        self._lengths.append(np.asarray(lengths, np.int64))

    def tokens(self, rows: int) -> Tokens:
        """Returns all rows in order, with their ids in a read-only memory map of the file.

        Raises:
            JobError: One of the ``rows`` positions was not appended exactly once.
        """
        ordinals = np.concatenate([np.zeros(0, np.int64), *self._ordinals])
        lengths = np.concatenate([np.zeros(0, np.int64), *self._lengths])
        order = np.argsort(ordinals, kind="stable")
        if not np.array_equal(ordinals[order], np.arange(rows)):
            raise JobError(
                f"{rows} rows were to be tokenised, {len(ordinals)} came back, "
                f"{len(np.unique(ordinals))} different ones; build the index again"
            )
        if not np.array_equal(order, np.arange(rows)):
            self._path = self._put_in_order(order, lengths)
        return Tokens(_mapped(self._path), lengths[order])

    def _put_in_order(self, order: Int64, lengths: Int64) -> Path:
        """Copy the file run by run; a run is a sequence of rows that were appended in order."""
        ids, ends = _mapped(self._path), np.cumsum(lengths)
        begins = np.flatnonzero(np.diff(order, prepend=-2) != 1)
        path = self._path.with_name(f"{self._path.name}.ordered")
        with path.open("wb") as file:
            for first, last in zip(begins, [*(begins[1:] - 1), len(order) - 1], strict=True):
                begin, end = ends[order[first]] - lengths[order[first]], ends[order[last]]
                file.write(ids[begin:end].data)
        self._path.unlink()
        return path


def _mapped(path: Path) -> Int32:
    if not path.stat().st_size:  # an empty file cannot be mapped
        return np.zeros(0, np.int32)
    return np.asarray(np.memmap(path, np.int32, "r"))


def tokenise(
    source: RedisCorpusSource,
    record: TaskRecord,
    folder: Path,
    parallelism: int | None,
    progress: StageProgress,
) -> tuple[Tokens, Tokens | None]:
    """Returns the outputs of a corpus and its rendered prompts, encoded as in the service.

    If no row of the corpus has an input, there are no prompts. If only some rows have an input, the
    prompt of each other row is the template without an input, as for a request without an input.

    Args:
        folder: Folder of the files; the returned arrays are memory maps of them.
        parallelism: Number of ranges in which the corpus is read; by default those of
            `RedisCorpusSource.ranges` of 4,000 rows or more and of up to 8 MiB.
        progress: Called for the stage ``tokenise``, in rows.

    Raises:
        JobError: A row was lost or duplicated.
    """
    done, any_input = 0, False
    progress("tokenise", 0, source.rows)
    # Without a batch size, Ray Data reads and encodes in one task, and stores no texts.
    dataset = ray.data.read_datasource(
        source, override_num_blocks=parallelism or source.ranges(_LEAST_ROWS, _MOST_BYTES)
    ).map_batches(functools.partial(_encode, record), batch_format="pyarrow", batch_size=None)
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


def _flat(column: pa.ChunkedArray) -> tuple[Int32, Int64]:
    """Returns the concatenated ids of a column's lists, and the lengths of the lists."""
    whole = column.combine_chunks()
    return pc.list_flatten(whole).to_numpy(), pc.list_value_length(whole).to_numpy()


def _encode(record: TaskRecord, table: pa.Table) -> pa.Table:
    one_encoding_thread()
    firsts = range(0, max(len(table), 1), _ENCODED_ROWS)
    return pa.concat_tables(_encoded(record, table.slice(at, _ENCODED_ROWS)) for at in firsts)


def _encoded(record: TaskRecord, table: pa.Table) -> pa.Table:
    tokenizer, template = _tokenizer(record), template_of(record)
    inputs, outputs = (text_column(table, side) for side in SIDES)
    return pa.table(
        {
            "ordinal": table["ordinal"],
            "output": token_ids(tokenizer.encode_outputs, outputs),
            "prompt": token_ids(functools.partial(template.encode_rows, tokenizer), inputs),
            "has_input": pc.not_equal(inputs, ""),
        }
    )


# Loaded once per worker process, from the folder or hub cache of the worker's node.
_tokenizer = functools.cache(load_tokenizer)
