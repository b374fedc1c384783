"""Ranks the tokens of a task's answers by frequency, and publishes the ranking.

The answers of a corpus are counted by Ray in the tasks that read them, so only counts are sent to
this process. The format of a ranking is that of ``tasc_engine.drafting.neural.ranking``.
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tasc_draft.drafts import Int32, Int64, Tokens
from tasc_engine.drafting.neural.ranking import Origin, Ranking
from tasc_jobs.errors import EmptyCorpusError, UsageError
from tasc_jobs.index.publish import publish_file
from tasc_runtime.data.rows import BadRow, Fields, check_file, read_rows
from tasc_runtime.models import load_tokenizer
from tasc_runtime.progress import StageProgress, silent
from tasc_store import Artifact, ArtifactStore, TaskRecord, TaskStore, UnknownTask, connect
from tasc_store.artifacts import VOCABULARY
from tasc_text import TaskTokenizer
from tasc_text.tokenizer import open_tokenizer

TokenizerOf: TypeAlias = TaskRecord | Path
"""The source of a tokenizer: the record of a task, or the path of the tokenizer."""
BATCH_ROWS = 500
_ROWS_PER_TASK = 20_000
STAGES = {"count": "rows", "publish": "steps"}


@functools.cache
def open_tokens(named: TokenizerOf) -> TaskTokenizer:
    """Opens a tokenizer, once per process.

    Raises:
        ServiceError: The tokenizer is not the one the task was registered with.
        TextError: The tokenizer cannot be loaded.
    """
    return load_tokenizer(named) if isinstance(named, TaskRecord) else open_tokenizer(named)


@dataclass
class TokenCounts:
    """A running sum of token counts.

    Attributes:
        counts: ``int64[vocab_size]``, the count of each token.
        read: Number of rows that were read.
        rows: Number of rows that were counted.
    """

    vocab_size: int
    read: int = 0
    rows: int = 0
    counts: Int64 = field(init=False)

    def __post_init__(self) -> None:
        self.counts = np.zeros(self.vocab_size, np.int64)

    def add(self, ids: NDArray[np.int32], counts: Int64, read: int, rows: int) -> None:
        """Add the counts of distinct ``ids``."""
        self.counts[ids] += counts
        self.read += read
        self.rows += rows

    def with_ends(self, eos_id: int) -> Int64:
        """Returns the counts with one end-of-sequence for each answer."""
        if eos_id >= self.vocab_size:
            raise ValueError(
                f"the end-of-sequence token {eos_id} is not in the vocabulary of "
                f"{self.vocab_size} tokens; set eos_token_id in config.json to a token of it"
            )
        counts = self.counts.copy()
        counts[eos_id] += self.rows
        return counts


def count_texts(tokenizer: TaskTokenizer, texts: Sequence[str]) -> tuple[NDArray[np.int32], Int64]:
    """Returns the distinct tokens of some texts, and the count of each."""
    return np.unique(Tokens.of(tokenizer.encode_outputs(texts)).ids, return_counts=True)


def count_file(
    path: Path, field_name: str, named: TokenizerOf, progress: StageProgress
) -> TokenCounts:
    """Counts the tokens of a file's answers; lines without an answer are skipped.

    Args:
        progress: Called for one stage, ``count``, without a total.

    Raises:
        FileError: The file cannot be read.
    """
    check_file(path, (field_name,))
    tokenizer = open_tokens(named)
    total = TokenCounts(tokenizer.vocab_size)
    answers = _answers(path, field_name)
    while batch := list(islice(answers, BATCH_ROWS)):
        texts = [text for text in batch if text is not None]
        total.add(*count_texts(tokenizer, texts), len(batch), len(texts))
        progress("count", total.read, None)
    return total


def _answers(path: Path, field_name: str) -> Iterator[str | None]:
    # The input is not used. The field of the answer takes its place, because every row has it.
    for row in read_rows(path, Fields(field_name, field_name)):
        yield None if isinstance(row, BadRow) else row.output


def count_corpus(
    url: str,
    task: str,
    named: TokenizerOf,
    parallelism: int | None,
    progress: StageProgress,
    *,
    keys: str = "",
) -> TokenCounts:
    """Counts the tokens of all outputs of a corpus.

    Args:
        parallelism: Number of ranges to read; by default one for every 20,000 rows.
        progress: Called for one stage, ``count``.
        keys: Prefix of the keys of the rows that are counted.

    Raises:
        RaySetupError: Ray is not running in this process.
        EmptyCorpusError: There are no rows.
        StoreError: Redis fails.
    """
    import ray.data  # imported here because answers in a file need no Ray

    from tasc_jobs.index.redis_source import RedisCorpusSource
    from tasc_jobs.ray_local import require_ray

    require_ray()
    source = RedisCorpusSource(url, task)
    counted = ray.data.read_datasource(
        source, override_num_blocks=parallelism or -(-source.rows // _ROWS_PER_TASK)
    ).map_batches(
        functools.partial(count_rows, named, keys), batch_format="pyarrow", batch_size=BATCH_ROWS
    )
    total = TokenCounts(open_tokens(named).vocab_size)
    progress("count", 0, source.rows)
    for table in counted.iter_batches(batch_format="pyarrow", batch_size=None):
        add_tables(total, table)
        progress("count", total.read, source.rows)
    return total


def count_rows(named: TokenizerOf, keys: str, table: pa.Table) -> pa.Table:
    """Turn rows of a `RedisCorpusSource` into one row of token counts."""
    outputs = table["output"].filter(pc.starts_with(table["key"], keys))
    ids, counts = count_texts(open_tokens(named), outputs.to_pylist())
    return pa.table(
        {
            "ids": pa.array([ids], pa.list_(pa.int32())),
            "counts": pa.array([counts], pa.list_(pa.int64())),
            "read": [table.num_rows],
            "rows": [len(outputs)],
        }
    )


def add_tables(total: TokenCounts, table: pa.Table) -> None:
    """Adds the tables that `count_rows` returned for some batches."""
    for ids, counts, read, rows in zip(*table.columns, strict=True):
        total.add(np.asarray(ids.values), np.asarray(counts.values), read.as_py(), rows.as_py())


@dataclass(frozen=True)
class Choice:
    """The rule for which counted tokens are kept; all of them if no field is set.

    Raises:
        UsageError: More than one field is set.
    """

    top_k: int | None = None
    top_p: float | None = None
    min_frequency: int | None = None

    def __post_init__(self) -> None:
        if sum(each is not None for each in (self.top_k, self.top_p, self.min_frequency)) > 1:
            raise UsageError("--top-k, --top-p and --min-frequency exclude each other; give one")

    def of(self, ranking: Ranking) -> Int32:
        """Returns the tokens that are kept. Raises RankingError if the choice is impossible."""
        if self.top_k is not None:
            return ranking.top(self.top_k)
        if self.top_p is not None:
            return ranking.top_p(self.top_p)
        return ranking.at_least(1 if self.min_frequency is None else self.min_frequency)


@dataclass(frozen=True)
class RankJob:
    """The inputs of a ranking.

    Attributes:
        task: Task of the corpus and of the ranking.
        origin: ``raw`` counts all outputs of the corpus, ``target`` only answers of a service that
            were collected into the corpus, and ``draft`` the answers of a file.
        tokenizer: A folder or file used in place of the tokenizer of the task's model; on a cluster
            it must exist on every machine.
        answers: File with the answers to count in place of the corpus.
        answer_field: Field of an answer in that file.
        parallelism: Number of ranges to read; by default one for every 20,000 rows.

    Raises:
        UsageError: The origin is ``draft`` and there is no file of answers.
    """

    task: str
    origin: Origin
    tokenizer: Path | None = None
    answers: Path | None = None
    answer_field: str = "text"
    choice: Choice = Choice()
    parallelism: int | None = None

    def __post_init__(self) -> None:
        if self.origin == "draft" and self.answers is None:
            raise UsageError(
                "the corpus has no answers of a draft model; make them with `tasc generate` and "
                "name the file with --answers"
            )


def rank_and_publish(
    url: str, job: RankJob, progress: StageProgress = silent
) -> tuple[Artifact, Ranking]:
    """Rank a task's tokens, publish the ranking and make it current.

    Args:
        url: Address of Redis, as every node of the Ray cluster can reach it.
        progress: Called for the stages in STAGES, in that order.

    Raises:
        RaySetupError: A corpus must be read and Ray is not running in this process.
        EmptyCorpusError: There is nothing to count.
        UnknownTask: The task does not exist, and no tokenizer is given.
        FileError: The file of answers cannot be read.
        RankingError: The choice is outside the vocabulary.
        StoreError: Redis fails.
        TextError: The tokenizer cannot be loaded.
    """
    corpus, named = _subject(url, job)
    tokenizer = open_tokens(named)
    job.choice.of(_of_all(tokenizer))  # raises an error before anything is counted
    ranking = _ranking(job, _counts(url, corpus, job, named, progress), named)
    chosen = ranking.only(job.choice.of(ranking))
    progress("publish", 0, 2)
    with connect(url) as client:
        store = ArtifactStore(client, corpus, tokenizer.fingerprint, kind=VOCABULARY)
        artifact = publish_file(
            store, chosen.save, chosen.corpus_rows, partial(progress, "publish", 1, 2)
        )
    progress("publish", 2, 2)
    return artifact, chosen


def _subject(url: str, job: RankJob) -> tuple[str, TokenizerOf]:
    """Returns the name of the corpus, and the tokenizer for counting."""
    with connect(url) as client:
        try:
            record = TaskStore(client).get(job.task)
        except UnknownTask:
            if job.tokenizer is None:
                raise
            return job.task, job.tokenizer.absolute()
    return record.corpus_name, job.tokenizer.absolute() if job.tokenizer else record


def _counts(
    url: str, corpus: str, job: RankJob, named: TokenizerOf, progress: StageProgress
) -> TokenCounts:
    if job.answers is not None:
        return count_file(job.answers, job.answer_field, named, progress)
    from tasc_jobs.tuning.refresh import served_prefix

    keys = served_prefix(job.task) if job.origin == "target" else ""
    return count_corpus(url, corpus, named, job.parallelism, progress, keys=keys)


def _ranking(job: RankJob, found: TokenCounts, named: TokenizerOf) -> Ranking:
    if not found.rows:
        where = job.answers or f"the corpus of task {job.task!r}"
        raise EmptyCorpusError(
            f"{where} has no answers to count; `tasc refresh` moves collected ones into the corpus,"
            " --answers FILE counts those of a file, --from raw all outputs"
        )
    tokenizer = open_tokens(named)
    return Ranking.of(
        found.with_ends(tokenizer.eos_id),
        eos_id=tokenizer.eos_id,
        fingerprint=tokenizer.fingerprint,
        origin=job.origin,
        rows=found.rows,
        corpus_rows=0 if job.answers else found.read,
    )


def _of_all(tokenizer: TaskTokenizer) -> Ranking:
    """Returns the ranking in which every token was counted once."""
    counts = np.ones(tokenizer.vocab_size, np.int64)
    about = {"fingerprint": tokenizer.fingerprint, "origin": "raw", "rows": 1}
    return Ranking.of(counts, eos_id=tokenizer.eos_id, **about)
