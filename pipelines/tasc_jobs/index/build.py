"""Builds the draft index of a task on Ray: tokenises the corpus in parallel, builds, publishes.

The same corpus and template give the same bytes at any parallelism. The index becomes current only
when it is complete in the store; if the job dies, the old index stays current. Data is streamed
through Ray's object store. Further memory is needed only in this process, about 60 bytes per token.
The tokens need disk space in the folder for temporary files (TMPDIR).
"""

import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, count, repeat
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypedDict, Unpack

import numpy as np
from numpy.typing import NDArray

from tasc_draft.drafts import DraftError, Int32, Tokens
from tasc_draft.index.bigrams import BigramTable, read_bigrams
from tasc_draft.index.corpus_build import Documents, check_cap, distinct, index_documents
from tasc_draft.index.corpus_sort import DEPTH, sort_part, splitters
from tasc_draft.index.draft_index import DraftIndex, with_prompts, write_index
from tasc_draft.index.weights import Weights
from tasc_draft.replaying import EPOCHS, corpus_weights
from tasc_draft.settings import DraftSettings
from tasc_jobs.index.publish import current_index, publish_file
from tasc_jobs.index.redis_source import RedisCorpusSource
from tasc_jobs.index.tokenise import tokenise
from tasc_jobs.ray_local import require_ray
from tasc_runtime.models import load_tokenizer
from tasc_runtime.progress import StageProgress, silent
from tasc_store import Artifact, ArtifactStore, CorruptArtifact, TaskRecord, connect
from tasc_text import TaskTokenizer

log = logging.getLogger(__name__)

STAGES = {
    "tokenise": "rows",
    "learn": "rounds",
    "merge outputs": "rows",
    "sort": "parts",
    "prune": "rounds",
    "index prompts": "rows",
    "publish": "steps",
}
NOTES = {"learn": "the first build on a machine compiles for up to a minute before round 1"}


class BuildOptions(TypedDict, total=False):
    """Options of a build.

    Attributes:
        parallelism: Number of ranges in which the corpus is tokenised, and of parts in which its
            n-grams are sorted. By default the number of ranges depends on the size of the corpus
            and the CPUs of the cluster, and there is one part per core of this node.
        bigrams: File of the target's own bigrams (``tasc model-bigrams``) to put into the index; by
            default, the bigrams of the current index are kept. The tuned settings of the current
            index are always kept.
        max_bytes: Maximum bytes of the corpus part. The outputs with the smallest expected gain are
            left out, and so are the prompts of their rows. Weights are learnt under the same cap.
        progress: Called for the stages in STAGES, in that order; ``learn`` is omitted if nothing
            is learnt, and ``prune`` if all outputs fit. The number of rounds of ``prune`` is not
            known in advance. ``publish`` stores the version in one step and makes it current in
            another.
    """

    parallelism: int | None
    bigrams: Path | None
    max_bytes: int | None
    progress: StageProgress


def build_and_publish(
    url: str, record: TaskRecord, **options: Unpack[BuildOptions]
) -> tuple[Artifact, DraftIndex]:
    """Build a task's index from its corpus, publish it and make it current.

    Weights are learnt if the corpus has at least 200 rows and any inputs. If the corpus has no
    inputs, the index has only outputs; see ``tokenise``.

    Args:
        url: Address of Redis, as every node of the Ray cluster can reach it.

    Raises:
        RaySetupError: Ray is not running in this process.
        EmptyCorpusError: There are no rows.
        DraftError: The bigrams are unreadable or belong to another tokenizer, the corpus is too
            big, or even an index without outputs exceeds ``max_bytes``.
        StoreError: Redis fails.
        TextError: The model's tokenizer cannot be loaded.
        ServiceError: The tokenizer is not the one the task was registered with.
        JobError: Ray lost or duplicated a row.
        RayError: Tokenising failed, or its workers died repeatedly.
    """
    with opened(url, record, **options) as corpus:
        index, progress = corpus.index(), corpus.progress
        progress("publish", 0, 2)
        stored = partial(progress, "publish", 1, 2)
        artifact = publish_file(corpus.store, partial(write_index, index), corpus.rows, stored)
    progress("publish", 2, 2)
    return artifact, index


@contextmanager
def opened(
    url: str, record: TaskRecord, **options: Unpack[BuildOptions]
) -> Iterator["TokenCorpus"]:
    """Tokenises a task's corpus onto this machine's disk for the duration of the block.

    See `build_and_publish` for the arguments and errors. This function publishes nothing.
    """
    parallelism, bigrams = options.get("parallelism"), options.get("bigrams")
    max_bytes, progress = options.get("max_bytes"), options.get("progress", silent)
    check_cap(max_bytes)
    require_ray()
    tokenizer = load_tokenizer(record)
    store = ArtifactStore(connect(url), record.corpus_name, tokenizer.fingerprint)
    before = _before(store)
    table = read_bigrams(bigrams, tokenizer.fingerprint) if bigrams else before.bigrams
    source = RedisCorpusSource(url, record.corpus_name)
    with TemporaryDirectory(prefix="tasc-index-") as name:
        outputs, prompts = tokenise(source, record, Path(name), parallelism, progress)
        yield TokenCorpus(
            store,
            before,
            before.settings or record.draft,
            tokenizer,
            outputs,
            prompts,
            table,
            parallelism,
            max_bytes,
            progress,
        )


@dataclass(frozen=True)
class TokenCorpus:
    """A corpus as tokens, and the store of its indexes.

    Attributes:
        before: The current index when the corpus was opened; an empty index if there was none.
        settings: Draft settings of the task: the tuned settings, or else the record's.
        bigrams, parts, max_bytes: Used for each index; see `build_and_publish` and `sorted_parts`.
    """

    store: ArtifactStore
    before: DraftIndex
    settings: DraftSettings
    tokenizer: TaskTokenizer
    outputs: Tokens
    prompts: Tokens | None
    bigrams: BigramTable | None
    parts: int | None
    max_bytes: int | None
    progress: StageProgress

    @property
    def rows(self) -> int:
        return len(self.outputs)

    def index(
        self, kept: NDArray[np.int64] | None = None, weights: Weights | None = None
    ) -> DraftIndex:
        """Returns an index of all rows, or of the rows with the numbers ``kept``.

        Args:
            weights: Weights of an index of some of these rows; by default they are learnt.
        """
        outputs, prompts = self.outputs, self.prompts
        if kept is not None:
            outputs, prompts = outputs.take(kept), prompts.take(kept) if prompts else None
        weights = weights or self._learnt(outputs, prompts)
        index = self._built(outputs, prompts, self.progress)
        return replace(index, weights=weights, settings=self.before.settings)

    def _learnt(self, outputs: Tokens, prompts: Tokens | None) -> Weights | None:
        if prompts is None:
            return None
        rounds = count()

        def built(outputs: Tokens, prompts: Tokens) -> DraftIndex:
            self.progress("learn", next(rounds), EPOCHS)
            return self._built(outputs, prompts)

        return corpus_weights(
            built,
            outputs,
            prompts,
            eos_id=self.tokenizer.eos_id,
            settings=self.settings,
            progress=lambda: self.progress("learn", next(rounds), EPOCHS),
        )

    def _built(
        self, outputs: Tokens, prompts: Tokens | None, progress: StageProgress = silent
    ) -> DraftIndex:
        rows, vocab_size, eos_id = len(outputs), self.tokenizer.vocab_size, self.tokenizer.eos_id
        progress("merge outputs", 0, rows)
        documents = distinct(outputs, vocab_size=vocab_size, eos_id=eos_id)
        progress("merge outputs", rows, rows)
        # Further sorting belongs to the stage ``prune``, whose progress is not counted in parts.
        reports = chain([progress], repeat(silent))
        corpus, kept = index_documents(
            documents,
            fingerprint=self.tokenizer.fingerprint,
            vocab_size=vocab_size,
            max_bytes=self.max_bytes,
            sort=lambda some: sorted_parts(some, self.parts, partial(next(reports), "sort")),
            pruned=lambda times: progress("prune", times, None),
        )
        progress("index prompts", 0, rows)
        index = with_prompts(
            corpus,
            kept,
            outputs,
            prompts,
            eos_id=eos_id,
            word_starts=self.tokenizer.word_starts,
            canonical=self.tokenizer.canonical,
        )
        progress("index prompts", rows, rows)
        return replace(index, bigrams=self.bigrams)


def _before(store: ArtifactStore) -> DraftIndex:
    """Returns the current index, or an empty one; the next index keeps its settings and bigrams."""
    try:
        index = current_index(store)
    except (DraftError, CorruptArtifact) as error:
        log.warning(
            "the current index cannot be read, so its tuned settings and bigrams are lost; run "
            "`tasc tune` after this build: %s",
            error,
        )
        index = None
    return index or DraftIndex.empty(store.fingerprint, vocab_size=1)


def sorted_parts(
    documents: Documents,
    parts: int | None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[tuple[Int32, Int32]]:
    """Returns sorted parts, which `assemble` joins to the same index for any number of parts.

    Args:
        parts: Number of parts; by default one per core of this node. Each core sorts one part at a
            time.
        progress: Called with the number of sorted parts and of all parts.
    """
    cores = len(os.sched_getaffinity(0))
    cuts = [None, *splitters(documents.text, parts or cores), None]
    sort = partial(sort_part, documents.text, documents.offsets, documents.counts, DEPTH)
    total = len(cuts) - 1
    progress(0, total)
    found = []
    with ThreadPoolExecutor(cores) as threads:
        for part in threads.map(sort, cuts[:-1], cuts[1:]):
            found.append(part)
            progress(len(found), total)
    return found
