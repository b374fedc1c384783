"""A task's ranked vocabulary as a job on Ray: count its answers' tokens, choose, publish.

Each block is counted where it is read, and only counts travel. It drafts nothing; what is in the
file is the business of ``tasc_engine.drafting.neural.ranking``.
"""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tasc_draft.tokens import Int32
from tasc_engine.drafting.neural.ranking import Origin, Ranking
from tasc_jobs.drafter.token_counts import TokenCounts, TokenizerOf, count_file, open_tokens
from tasc_jobs.errors import EmptyCorpusError, UsageError
from tasc_jobs.runtime.stages import StageProgress, silent
from tasc_store import Artifact, ArtifactStore, TaskStore, UnknownTask, connect
from tasc_store.artifacts.artifact_store import VOCABULARY
from tasc_text import TaskTokenizer

STAGES = {"count": "rows", "publish": "steps"}
KEPT_VERSIONS = 5


@dataclass(frozen=True)
class Choice:
    """Which of the tokens that were counted are kept; all of them, if nothing is set.

    Raises:
        UsageError: More than one is set.
    """

    top_k: int | None = None
    top_p: float | None = None
    min_frequency: int | None = None

    def __post_init__(self) -> None:
        if sum(each is not None for each in (self.top_k, self.top_p, self.min_frequency)) > 1:
            raise UsageError("--top-k, --top-p and --min-frequency exclude each other; name one")

    def of(self, ranking: Ranking) -> Int32:
        """Raises RankingError: it cannot be chosen."""
        if self.top_k is not None:
            return ranking.top(self.top_k)
        if self.top_p is not None:
            return ranking.top_p(self.top_p)
        return ranking.at_least(1 if self.min_frequency is None else self.min_frequency)


@dataclass(frozen=True)
class RankJob:
    """What is ranked.

    Attributes:
        task: Whose corpus, and whose the ranking is.
        origin: ``raw`` counts every output of the corpus, ``target`` those that a service gave and
            collected there; ``draft`` only ever a file.
        tokenizer: A folder or file instead of the tokenizer of the task's model; on a cluster it
            must be on every machine.
        answers: Count the answers of this file instead of the corpus.
        answer_field: Field of an answer in that file.
        parallelism: Ranges the corpus is read in; by default one for every 20,000 rows.

    Raises:
        UsageError: The answers of a draft model, and no file of them.
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
                "a draft model's answers are in no corpus; let it answer with `tasc generate` and "
                "name the file with --answers"
            )


def rank_and_publish(
    url: str, job: RankJob, progress: StageProgress = silent
) -> tuple[Artifact, Ranking]:
    """Rank a task's tokens, publish the ranking and make it current.

    Args:
        url: The Redis, as every node of the Ray cluster can reach it.
        progress: Told of the stages in STAGES, in that order.

    Raises:
        RaySetupError: A corpus is to be read and Ray is not running in this process.
        EmptyCorpusError: There is nothing to count.
        UnknownTask: There is no such task, and no tokenizer is named.
        FileError: The file of answers cannot be read.
        RankingError: The choice is outside the vocabulary.
        StoreError: Redis fails.
        TextError: The tokenizer cannot be loaded.
    """
    corpus, named = _subject(url, job)
    tokenizer = open_tokens(named)
    job.choice.of(_of_all(tokenizer))  # what cannot be chosen is said before anything is counted
    ranking = _ranking(job, _counts(url, corpus, job, named, progress), named)
    chosen = ranking.only(job.choice.of(ranking))
    progress("publish", 0, 2)
    with connect(url) as client:
        store = ArtifactStore(client, corpus, tokenizer.fingerprint, kind=VOCABULARY)
        artifact = publish_ranking(store, chosen, lambda: progress("publish", 1, 2))
    progress("publish", 2, 2)
    return artifact, chosen


def publish_ranking(
    store: ArtifactStore, ranking: Ranking, stored: Callable[[], None] = lambda: None
) -> Artifact:
    """Store a ranking as the next version, make it current and let go of old versions.

    Args:
        stored: Called when the version is whole in the store and not yet current.

    Raises:
        StoreError: Redis fails.
    """
    with tempfile.TemporaryDirectory(prefix="tasc-vocabulary-") as folder:
        path = Path(folder) / "vocabulary.npz"
        ranking.save(path)
        artifact = store.publish(path, ranking.corpus_rows)
    stored()
    store.announce(artifact.version)
    store.prune(KEPT_VERSIONS)
    return artifact


def _subject(url: str, job: RankJob) -> tuple[str, TokenizerOf]:
    """Whose corpus, and which tokenizer."""
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
    from tasc_jobs.drafter.corpus_tokens import count_corpus  # here, since files need no Ray
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
    """What counting every token once would give."""
    counts = np.ones(tokenizer.vocab_size, np.int64)
    about = {"fingerprint": tokenizer.fingerprint, "origin": "raw", "rows": 1}
    return Ranking.of(counts, eos_id=tokenizer.eos_id, **about)
