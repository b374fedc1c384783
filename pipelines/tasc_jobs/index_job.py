"""The draft index of a task, as a Ray Data job: tokenise the corpus in parallel, build, publish.

One corpus gives one index per tokenizer. N-gram counts do not depend on the order of documents, so
the same corpus gives the same bytes whatever the parallelism. The index becomes current only when
it is whole in the store; a job that dies leaves the old one current.
"""

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import ray.data

from tasc_draft import CorpusIndex, Documents, build_index, write_index
from tasc_jobs.errors import RaySetupError
from tasc_jobs.redis_source import RedisCorpusSource
from tasc_serve.models import load_tokenizer
from tasc_store import Artifact, ArtifactStore, TaskRecord, connect
from tasc_text import TaskTokenizer

_ROWS_PER_TASK = 20_000
_BATCH_ROWS = 2_000
KEPT_VERSIONS = 5


def build_and_publish(
    url: str,
    record: TaskRecord,
    *,
    parallelism: int | None = None,
    progress: Callable[[int], None] = lambda rows: None,
) -> tuple[Artifact, CorpusIndex]:
    """Build a task's index from its corpus, publish it and make it current.

    Args:
        url: The Redis, as every node of the Ray cluster can reach it.
        parallelism: Ranges the corpus is tokenised in; by default one for every 20,000 rows.
        progress: Told how many more rows are tokenised.

    Raises:
        RaySetupError: Ray is not running in this process.
        EmptyCorpusError: There are no rows.
        StoreError: Redis fails.
        TextError: The model's tokenizer cannot be loaded.
        ServeError: It is not the one the task was registered with.
    """
    tokenizer = load_tokenizer(record)
    source = RedisCorpusSource(url, record.corpus_name)
    index = build_index(
        _tokenised(source, record, parallelism, progress),
        fingerprint=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size,
        eos_id=tokenizer.eos_id,
        n_max=record.draft.n_max,
        p_min=record.draft.p_min,
    )
    store = ArtifactStore(connect(url), record.corpus_name, tokenizer.fingerprint)
    with tempfile.TemporaryDirectory(prefix="tasc-index-") as folder_name:
        path = Path(folder_name) / "index"
        write_index(index, path)
        artifact = store.publish(path, source.rows)
    store.announce(artifact.version)
    store.prune(KEPT_VERSIONS)
    return artifact, index


def _tokenised(
    source: RedisCorpusSource,
    record: TaskRecord,
    parallelism: int | None,
    progress: Callable[[int], None],
) -> Documents:
    if not ray.is_initialized():
        raise RaySetupError("no Ray is running; start one with tasc_jobs.ray_local.local_ray()")
    blocks = parallelism or -(-source.rows // _ROWS_PER_TASK)
    dataset = ray.data.read_datasource(source, override_num_blocks=blocks).map_batches(
        functools.partial(_encode, record), batch_format="pyarrow", batch_size=_BATCH_ROWS
    )
    ids: list[np.ndarray] = []
    lengths: list[np.ndarray] = []
    for table in dataset.iter_batches(batch_format="pyarrow", batch_size=None):
        column = table["ids"].combine_chunks()
        ids.append(pc.list_flatten(column).to_numpy())
        lengths.append(pc.list_value_length(column).to_numpy())
        progress(table.num_rows)
    return Documents(np.concatenate(ids), np.concatenate(lengths).astype(np.int64))


def _encode(record: TaskRecord, table: pa.Table) -> pa.Table:
    ids = _tokenizer(record).encode_outputs(table["output"].to_pylist())
    return pa.table({"ids": pa.array(ids, pa.list_(pa.int32()))})


@functools.cache
def _tokenizer(record: TaskRecord) -> TaskTokenizer:
    """Loaded once per worker process, from the folder or hub cache of the worker's own node."""
    return load_tokenizer(record)
