"""Ranks the tokens of a task's answers by frequency, and publishes the ranking.

``tasc_engine.drafting.neural.ranking`` defines the format of a ranking.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np

from tasc_draft.drafts import Int32, Int64, Tokens
from tasc_engine.drafting.neural.ranking import Origin, Ranking
from tasc_jobs.errors import EmptyCorpusError, UsageError
from tasc_jobs.index.publish import publish_file
from tasc_jobs.task_inputs import corpus_rows, served_prefix
from tasc_runtime.data.rows import BadRow, Fields, check_file, read_rows
from tasc_runtime.models import load_tokenizer
from tasc_runtime.progress import StageProgress, silent
from tasc_store import Artifact, ArtifactStore, CorpusStore, TaskStore, UnknownTask, connect
from tasc_store.artifacts import VOCABULARY
from tasc_text import TaskTokenizer
from tasc_text.tokenizer import open_tokenizer

BATCH_ROWS = 500
STAGES = {"count": "rows", "publish": "steps"}


@dataclass
class TokenCounts:
    """The counts of the tokens of answers.

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

    def with_ends(self, eos_id: int) -> Int64:
        """Returns the counts with one end-of-sequence for each answer."""
        if eos_id >= self.vocab_size:
            raise ValueError(
                f"the end-of-sequence token {eos_id} is not in the vocabulary of "
                f"{self.vocab_size} tokens; set eos_token_id in config.json to one of these tokens"
            )
        counts = self.counts.copy()
        counts[eos_id] += self.rows
        return counts


def count_tokens(
    tokenizer: TaskTokenizer,
    answers: Iterable[str | None],
    total: int | None = None,
    progress: StageProgress = silent,
) -> TokenCounts:
    """Counts the tokens of answers.

    Args:
        answers: An answer for each row; None for a row that is not counted.
        total: Number of rows, if it is known.
        progress: Called for one stage, ``count``.
    """
    found, rest = TokenCounts(tokenizer.vocab_size), iter(answers)
    while batch := list(islice(rest, BATCH_ROWS)):
        texts = [text for text in batch if text is not None]
        ids = Tokens.of(tokenizer.encode_outputs(texts)).ids
        found.counts += np.bincount(ids, minlength=found.vocab_size)
        found.read += len(batch)
        found.rows += len(texts)
        progress("count", found.read, total)
    return found


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
        tokenizer: A folder or file used in place of the tokenizer of the task's model.
        answers: File with the answers to count in place of the corpus.
        answer_field: Field of an answer in that file.

    Raises:
        UsageError: The origin is ``draft`` and there is no file of answers.
    """

    task: str
    origin: Origin
    tokenizer: Path | None = None
    answers: Path | None = None
    answer_field: str = "text"
    choice: Choice = Choice()

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
        progress: Called for the stages in STAGES, in that order.

    Raises:
        EmptyCorpusError: There is nothing to count.
        UnknownTask: The task does not exist, and no tokenizer is given.
        FileError: The file of answers cannot be read.
        RankingError: The choice is outside the vocabulary.
        StoreError: Redis fails.
        TextError: The tokenizer cannot be loaded.
    """
    with connect(url) as client:
        try:
            record = TaskStore(client).get(job.task)
        except UnknownTask:
            if job.tokenizer is None:
                raise
            record = None
        corpus = record.corpus_name if record else job.task
        if record and job.tokenizer is None:
            tokenizer = load_tokenizer(record)
        else:
            assert job.tokenizer is not None
            tokenizer = open_tokenizer(job.tokenizer.absolute())
        # An impossible choice raises an error here, before anything is counted.
        job.choice.of(_ranking(job, count_tokens(tokenizer, [""]), tokenizer))
        found = _counted(job, CorpusStore(client, corpus), tokenizer, progress)
        ranking = _ranking(job, found, tokenizer)
        chosen = ranking.only(job.choice.of(ranking))
        progress("publish", 0, 2)
        store = ArtifactStore(client, corpus, tokenizer.fingerprint, kind=VOCABULARY)
        artifact = publish_file(
            store, chosen.save, chosen.corpus_rows, partial(progress, "publish", 1, 2)
        )
    progress("publish", 2, 2)
    return artifact, chosen


def _counted(
    job: RankJob, corpus: CorpusStore, tokenizer: TaskTokenizer, progress: StageProgress
) -> TokenCounts:
    if job.answers is not None:
        check_file(job.answers, (job.answer_field,))
        # The input is not used, so the field of the answer is also read as the input.
        lines = read_rows(job.answers, Fields(job.answer_field, job.answer_field))
        answers = (None if isinstance(row, BadRow) else row.output for row in lines)
        return count_tokens(tokenizer, answers, None, progress)
    keys, rows = served_prefix(job.task) if job.origin == "target" else "", len(corpus)
    outputs = (
        row.output if row.key.startswith(keys) else None for row in corpus_rows(corpus, rows)
    )
    return count_tokens(tokenizer, outputs, rows, progress)


def _ranking(job: RankJob, found: TokenCounts, tokenizer: TaskTokenizer) -> Ranking:
    if not found.rows:
        where = job.answers or f"the corpus of task {job.task!r}"
        raise EmptyCorpusError(
            f"{where} has no answers to count; run `tasc refresh` to move collected answers into "
            "the corpus, count a file with --answers FILE, or all outputs with --from raw"
        )
    return Ranking.of(
        found.with_ends(tokenizer.eos_id),
        eos_id=tokenizer.eos_id,
        fingerprint=tokenizer.fingerprint,
        origin=job.origin,
        rows=found.rows,
        corpus_rows=0 if job.answers else found.read,
    )
