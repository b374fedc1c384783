"""A task of the store for tuning: its record, its rows as tokens, its current index. No Ray.

What is tuned is what is current: the rows are those the index was built from, and what is published
is the same index with other weights and settings.
"""

from dataclasses import dataclass

import redis

from tasc_draft import BigramTable, DraftIndex, DraftSettings
from tasc_jobs.errors import EmptyCorpusError
from tasc_jobs.index.publish import current_index, publish_index
from tasc_jobs.tuning.task_rows import TaskRows, encode, from_corpus
from tasc_runtime.models import load_tokenizer
from tasc_store import Artifact, ArtifactStore, CorpusStore, TaskRecord, TaskStore
from tasc_text import PromptTemplate, TaskTokenizer


@dataclass(frozen=True)
class StoredTask:
    """A task as it stands.

    Attributes:
        index: The current one; None where none was announced yet.
        newer_rows: Rows of the corpus that came after the index was built.
    """

    record: TaskRecord
    tokenizer: TaskTokenizer
    rows: TaskRows
    index: DraftIndex | None
    newer_rows: int

    @property
    def settings(self) -> DraftSettings:
        """Those tuned before, else the task record's."""
        return (self.index and self.index.settings) or self.record.draft

    @property
    def bigrams(self) -> BigramTable | None:
        return self.index.bigrams if self.index else None

    @property
    def max_bytes(self) -> int | None:
        """What the corpus part of an index takes from which a cap left outputs out; else None."""
        if self.index is None or self.index.corpus.documents == len(self.rows):
            return None
        return self.index.corpus.nbytes


def read_task(client: redis.Redis, task: str) -> StoredTask:
    """Read a task, its current index and the rows it was built from, or all where there is none.

    Raises:
        EmptyCorpusError: There are no rows.
        StoreError: No such task, or Redis fails.
        DraftError: The current index is damaged or of another format.
        TextError, ServiceError: The tokenizer cannot be loaded, or is not the task's.
    """
    record = TaskStore(client).get(task)
    tokenizer = load_tokenizer(record)
    corpus = CorpusStore(client, record.corpus_name)
    store = _artifacts(client, record)
    artifact, there = store.current(), len(corpus)
    wanted = there if artifact is None else artifact.corpus_rows
    rows = encode(from_corpus(corpus, wanted), tokenizer, PromptTemplate(record.template))
    if not len(rows):
        raise EmptyCorpusError(
            f"the corpus of task {record.corpus_name!r} has no rows; ingest some first"
        )
    return StoredTask(record, tokenizer, rows, current_index(store), there - len(rows))


def publish(client: redis.Redis, task: StoredTask, index: DraftIndex, forecast: float) -> Artifact:
    """Store an index of the task's rows as its next version and make it current.

    Args:
        forecast: Tokens per step that it is expected to bring.

    Raises:
        StoreError: Redis fails.
    """
    return publish_index(_artifacts(client, task.record), index, len(task.rows), forecast=forecast)


def _artifacts(client: redis.Redis, record: TaskRecord) -> ArtifactStore:
    return ArtifactStore(client, record.corpus_name, record.fingerprint)
