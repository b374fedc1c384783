"""Rebuilds a task's index with answers of its service; makes it current if it drafts better.

Collected answers are moved into the corpus. A part of the rows that are in no index is held out,
and the current index and a new index of all other rows are replayed on that part. A run that was
killed can be run again and adds nothing twice.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial

import numpy as np
import redis
from numpy.typing import NDArray

from tasc_draft import DraftIndex, Int32, write_index
from tasc_draft.replaying import answers
from tasc_jobs.errors import JobError
from tasc_jobs.index.build import STAGES as BUILD_STAGES
from tasc_jobs.index.build import TokenCorpus, opened
from tasc_jobs.index.publish import publish_file
from tasc_jobs.ray_local import local_ray
from tasc_jobs.task_inputs import served_key
from tasc_jobs.tuning.replays import GuidedAnswers, run
from tasc_protocol import GuideSpec
from tasc_runtime.progress import StageProgress, silent
from tasc_runtime.sampling_options import guide_of
from tasc_store import (
    ArtifactStore,
    CollectedRows,
    CorpusRow,
    CorpusStore,
    TaskRecord,
    TaskStore,
    connect,
)

STAGES = {**BUILD_STAGES, "replay": "rows"}
_PROMPT_TOKENS = 3000  # number of last tokens of a prompt that are replayed
_SHARE, _MIN_HELD_OUT, _MAX_HELD_OUT = 5, 50, 600  # one in 5 new rows is held out, within limits


@dataclass(frozen=True)
class RefreshOptions:
    """The conditions for a new index.

    Attributes:
        margin: Minimum relative rise of tokens per step.
        min_rows: Minimum number of new rows of the corpus; with fewer, nothing is built.
        keep: Number of versions kept in the store in addition to the current one.
        parallelism, max_bytes: See `build_and_publish`.
    """

    margin: float = 0.01
    min_rows: int = 200
    keep: int = 5
    parallelism: int | None = None
    max_bytes: int | None = None


@dataclass(frozen=True)
class Refreshed:
    """The result of a refresh, and the reason.

    Attributes:
        moved: Number of collected rows that are new to the corpus; ``known`` were already in it.
        new_rows: Number of corpus rows that are newer than the rows of the newest index.
        judged_rows: Number of new rows on which the indexes were replayed; neither index had them.
        old_version: The current version before the refresh; None if there was none.
        old_tokens_per_step, new_tokens_per_step: Tokens per step on the judged rows. The old index
            is not replayed if its rows are unknown, because they may include the judged rows.
        version: The new current version; None if the old one stays current.
        versions: All versions that the store has now.
    """

    task: str
    moved: int
    known: int
    corpus_rows: int
    new_rows: int
    reason: str
    judged_rows: int = 0
    old_version: int | None = None
    old_tokens_per_step: float | None = None
    new_tokens_per_step: float | None = None
    version: int | None = None
    versions: tuple[int, ...] = ()

    @property
    def in_words(self) -> str:
        moved = f"{self.moved} collected rows moved into the corpus"
        known = f", {self.known} were there already" if self.known else ""
        return f"{self.task}: {moved}{known}; {self.reason}"


def refresh(
    url: str,
    name: str,
    options: RefreshOptions | None = None,
    progress: StageProgress = silent,
    *,
    judged: int = 0,
) -> Refreshed:
    """Move collected rows into a task's corpus, and refresh its index if that is an improvement.

    If an index must be built and Ray is not running, Ray is started.

    Args:
        progress: Called for the stages in STAGES; the stages of a build occur twice.
        judged: Number of corpus rows when an index was last judged. The corpus must also have
            `min_rows` rows after these, so that an insufficient index is not built repeatedly.

    Raises:
        IndexChanged: Another process has made another version current; the new one is stored.
        JobError: No row has an input, so there are no requests to draft for; or the task's guide
            cannot be compiled.
        StoreError: The task does not exist, or Redis fails.
        DraftError, TextError, ServiceError, RayError: See `build_and_publish`.
    """
    options = options or RefreshOptions()
    client = connect(url)
    record = TaskStore(client).get(name)
    moved, known = move_collected(client, record)
    store = ArtifactStore(client, record.corpus_name, record.fingerprint)
    current, versions = store.current(), store.versions()
    newest = store.get(versions[-1]) if versions else None
    # The first ``seen`` rows may be in the newest or the current index. Later rows are in neither,
    # unless the rows of an index are unknown.
    seen = max((each.corpus_rows or 0 for each in (newest, current) if each), default=0)
    rows = len(CorpusStore(client, record.corpus_name))
    old = current.version if current else None
    done = Refreshed(name, moved, known, rows, max(rows - seen, 0), "", old_version=old)
    waiting = max(rows - max(seen, judged), 0)
    if waiting < options.min_rows:
        reason = f"{waiting} new rows; a new index needs {options.min_rows} (--min-rows)"
        return replace(done, reason=reason, versions=tuple(versions))
    with (
        local_ray(),
        opened(
            url,
            record,
            parallelism=options.parallelism,
            max_bytes=options.max_bytes,
            progress=progress,
        ) as corpus,
    ):
        known = current is not None and bool(current.corpus_rows)
        spec = guide_of(record)
        return _judge(corpus, store, done, options, spec, seen, comparable=known)


def move_collected(client: redis.Redis, record: TaskRecord) -> tuple[int, int]:
    """Move a task's collected rows into its corpus; returns the numbers of new and known rows.

    A row's key is made of task and input, so a task's answer to an input is added only once.

    Raises:
        StoreError: Redis fails; rows that were already moved stay in the corpus.
    """
    collected, corpus = CollectedRows(client, record.name), CorpusStore(client, record.corpus_name)
    left, added, known = len(collected), 0, 0
    while left > 0 and (batch := collected.read()).rows:
        rows = [CorpusRow(served_key(record.name, row.input), *astuple(row)) for row in batch.rows]
        appended = corpus.append(rows)
        collected.remove(batch.end)  # last, so that a killed run loses no rows
        added, known = added + appended.added, known + appended.known
        left -= len(rows)
    return added, known


def _judge(
    corpus: TokenCorpus,
    store: ArtifactStore,
    done: Refreshed,
    options: RefreshOptions,
    guide: GuideSpec | None,
    seen: int,
    comparable: bool,
) -> Refreshed:
    """Replay both indexes on rows that neither holds, and publish the new one if it is better.

    Args:
        guide: The guide of the task's answers, if they have one.
        seen: Number of rows at the start of the corpus that may be in an index.
        comparable: Whether there is a current index that is known to have none of the later rows.
            If not, the new index is published without a comparison.
    """
    kept, held = held_out(seen, corpus.rows)
    trial = corpus.index(kept)
    judged = _answers(corpus, held)
    guided = GuidedAnswers()
    if guide:
        guided = GuidedAnswers.of(guide, [answer for _, answer in judged], corpus.tokenizer)
    new = _tokens_per_step(corpus, trial, judged, guided)
    old = _tokens_per_step(corpus, corpus.before, judged, guided) if comparable else None
    done = replace(
        done,
        corpus_rows=corpus.rows,
        new_rows=corpus.rows - seen,
        judged_rows=len(held),
        old_tokens_per_step=old,
        new_tokens_per_step=new,
    )
    rate = f"{new:.3f} tokens per step on {len(held)} held-out rows"
    if old is not None and new < old * (1 + options.margin):
        needed = f"less than {options.margin:.1%} above the {old:.3f} of version {done.old_version}"
        reason = f"the new index has {rate}, {needed}, which stays current"
        return replace(done, reason=reason, versions=tuple(store.versions()))
    index = corpus.index(weights=trial.weights)
    corpus.progress("publish", 0, 2)
    artifact = publish_file(
        store,
        partial(write_index, index),
        corpus.rows,
        partial(corpus.progress, "publish", 1, 2),
        forecast=new,
        after=done.old_version or 0,
        keep=options.keep,
    )
    corpus.progress("publish", 2, 2)
    than = f"; version {done.old_version} has {old:.3f}" if old is not None else ""
    if done.old_version and old is None:
        than = (
            f"; version {done.old_version} was not replayed, because the rows that it was built "
            "from are unknown"
        )
    reason = f"version {artifact.version} is current: it has {rate}{than}"
    return replace(done, reason=reason, version=artifact.version, versions=tuple(store.versions()))


def held_out(seen: int, rows: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Splits the row numbers 0 to ``rows - 1`` into those for building and those for judging.

    A fifth of the rows after the first ``seen`` is used for judging, but at least 50 and at most
    600 rows, and never more than half.
    """
    new = rows - seen
    count = min(max(new // _SHARE, _MIN_HELD_OUT), _MAX_HELD_OUT, max(new // 2, 1))
    out = np.zeros(rows, bool)
    out[seen + np.random.default_rng(rows).choice(new, count, replace=False)] = True
    return np.flatnonzero(~out), np.flatnonzero(out)


def _answers(corpus: TokenCorpus, rows: NDArray[np.int64]) -> list[tuple[Int32, Int32]]:
    if corpus.prompts is None:
        raise JobError(
            f"no row of the corpus of task {corpus.store.task} has an input, so there are no "
            "requests to judge an index by; use `tasc build-index`"
        )
    prompts, outputs = corpus.prompts.take(rows), corpus.outputs.take(rows)
    found = answers(prompts, outputs, corpus.tokenizer.eos_id)
    return [(prompt[-_PROMPT_TOKENS:], answer) for prompt, answer in found]


def _tokens_per_step(
    corpus: TokenCorpus,
    index: DraftIndex,
    rows: Sequence[tuple[Int32, Int32]],
    guided: GuidedAnswers,
) -> float:
    """Returns tokens per step as the service counts them, including forced tokens.

    Drafts also come from recent answers, and the weights continue to learn.
    """
    corpus.progress("replay", 0, len(rows))
    done = iter(range(1, len(rows) + 1))
    found = run(
        index,
        rows,
        corpus.settings,
        branching=True,
        tokenizer=corpus.tokenizer,
        progress=lambda: corpus.progress("replay", next(done), len(rows)),
        guided=guided,
    )
    return found.tokens_per_step
