"""A task's drafter: loads it for one engine, guards it, and combines it with the n-grams.

A ranked vocabulary comes from the store. The size of the drafter's vocabulary, and whether the
drafter has been switched off, are published as Prometheus series.
"""

import logging
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import get_args

import torch
from prometheus_client import CollectorRegistry, Gauge, Histogram
from safetensors import safe_open
from torch import Tensor

from tasc_draft import NgramProposer, Proposer
from tasc_engine import EngineConfig, ModelSource, Target
from tasc_engine.drafting.neural.card import read_card
from tasc_engine.drafting.neural.drafters import Eagle, Independent
from tasc_engine.drafting.neural.files import WEIGHTS, load_drafter
from tasc_engine.drafting.neural.hybrid import HybridProposer
from tasc_engine.drafting.neural.proposer import NeuralProposer
from tasc_engine.drafting.neural.ranking import Ranking
from tasc_engine.drafting.neural.recent import RecentVocabulary
from tasc_engine.drafting.neural.tree import NeuralSettings
from tasc_engine.drafting.neural.vocabulary import (
    ActiveSizes,
    FullVocabulary,
    RankedVocabulary,
    Vocabulary,
)
from tasc_engine.drafting.safe_proposer import DraftLimit, Reason
from tasc_engine.layout import Int32
from tasc_runtime.errors import ServiceError
from tasc_store import ArtifactStore, NeuralDrafting, TaskRecord
from tasc_text import TaskTokenizer, resolve_folder


def current_ranking(store: ArtifactStore) -> Ranking | None:
    """Returns the current ranking in a store of kind VOCABULARY; None if no ranking is current.

    Raises:
        RankingError: The ranking is damaged, or for another tokenizer.
        StoreError: Redis fails.
    """
    artifact = store.current()
    if artifact is None:
        return None
    with tempfile.TemporaryDirectory(prefix="tasc-vocabulary-") as folder:
        path = Path(folder) / "vocabulary.npz"
        store.download(artifact, path)
        return Ranking.load(path, store.fingerprint)


SIZES = (64, 256, 1024, 4096, 16384, 65536, 262144)


class NeuralMetrics:
    """The metrics of one replica whose task has a drafter.

    Args:
        labels: Labels of the replica's task and model.

    Raises:
        ValueError: The registry already holds these series.
    """

    def __init__(self, registry: CollectorRegistry, labels: Mapping[str, str]) -> None:
        names, values = tuple(labels), tuple(labels.values())
        self._sizes = Histogram(
            "tasc_active_vocabulary_tokens",
            "Size of the drafter's vocabulary, per drafted step and row.",
            names,
            buckets=SIZES,
            registry=registry,
        ).labels(*values)
        off = Gauge(
            "tasc_neural_drafting_off",
            "1 if the drafter is switched off until a restart, by reason.",
            (*names, "reason"),
            registry=registry,
        )
        self._off = {reason: off.labels(*values, reason) for reason in get_args(Reason)}

    def sizes(self, sizes: Sequence[int]) -> None:
        """Observes the vocabulary size of each row of some steps."""
        for size in sizes:
            self._sizes.observe(size)

    def off(self, reason: Reason) -> None:
        """Publishes that the drafter is off."""
        self._off[reason].set(1)


log = logging.getLogger(__name__)
_MIB = 1 << 20


class TaskDrafter:
    """The drafter of one engine, until it is switched off.

    Args:
        neural: The drafter's settings in the task's record.
        kind: Kind of the drafter, for display.
        limit_s: Maximum seconds of a drafted step, see `DraftLimit`.
        make: Makes the proposer from its limit and the observer of its drafted rows.
    """

    def __init__(
        self,
        neural: NeuralDrafting,
        kind: str,
        limit_s: float,
        make: Callable[[DraftLimit, Callable[[Int32], None]], NeuralProposer],
    ) -> None:
        self._neural, self._kind = neural, kind
        self._metrics: NeuralMetrics | None = None
        self._sizes: ActiveSizes | None = None
        self._off: Reason | None = None
        limit = DraftLimit(limit_s, self._switched_off)
        self._proposer: NeuralProposer | None = make(limit, self._drafted)

    def name(self, ngram: NgramProposer) -> str:
        """The name of the proposer that `beside` returns, for display, such as ``hybrid/eagle``."""
        if not self._drafts_beside(ngram):
            return ngram.settings.mixture
        return f"{self._neural.proposer}/{self._kind}"

    def beside(self, ngram: NgramProposer) -> Proposer:
        """Returns the engine's proposer.

        If ``num_speculative_tokens`` is 0, the drafter drafts nothing either. After the drafter was
        switched off, n-grams draft alone.
        """
        if not self._drafts_beside(ngram) or self._proposer is None:
            return ngram
        if self._neural.proposer == "neural":
            return self._proposer
        return HybridProposer(ngram, self._proposer, self._neural.sure)

    def publish(self, metrics: NeuralMetrics) -> None:
        """Publishes vocabulary sizes from now on, and whether the drafter is switched off."""
        self._metrics = metrics
        if self._proposer is not None:
            self._sizes = ActiveSizes(
                self._proposer.vocabulary, self._proposer.device, metrics.sizes
            )
        if self._off is not None:
            metrics.off(self._off)

    def _drafted(self, rows: Int32) -> None:
        try:
            if self._sizes is not None:
                self._sizes.drafted(rows)
        except Exception as error:  # not the drafter's fault
            log.warning("drafted rows are not counted any more", exc_info=error)
            self._sizes = None

    def _switched_off(self, reason: Reason) -> None:
        self._off, self._proposer, self._sizes = reason, None, None  # which frees their memory
        if self._metrics is not None:
            self._metrics.off(reason)

    def _drafts_beside(self, ngram: NgramProposer) -> bool:
        return ngram.settings.num_speculative_tokens > 0


def load_task_drafter(
    record: TaskRecord,
    neural: NeuralDrafting,
    target: Target,
    source: ModelSource,
    tokenizer: TaskTokenizer,
    config: EngineConfig,
    limit_s: float,
    rankings: ArtifactStore | None = None,
) -> TaskDrafter:
    """Loads the drafter of a task.

    Args:
        neural: The drafter's settings in the record.
        source: The source of the target.
        limit_s: Maximum seconds of a drafted step, see `DraftLimit`.
        rankings: The store of ranked vocabularies; None: no store.

    Raises:
        ServiceError: The drafter needs a ranked vocabulary, and the task has none.
        EngineError: Drafter or ranking is for another tokenizer or target, or damaged.
        ValueError: The tree is too large, or the ranking does not fit the drafter's head.
        StoreError: Redis fails.
        TextError: The drafter does not exist.
    """
    folder = resolve_folder(neural.drafter)
    drafter, head = load_drafter(
        folder, target, source, tokenizer.fingerprint, config.rows, config.max_model_len
    )
    vocabulary = _vocabulary(rankings, record, neural, drafter, head, config.rows)

    def make(limit: DraftLimit, on_drafted: Callable[[Int32], None]) -> NeuralProposer:
        proposer = NeuralProposer(
            drafter,
            vocabulary,
            NeuralSettings(neural.depth, neural.width, neural.nodes),
            rows=config.rows,
            capacity=config.max_model_len,
            vocab_size=target.vocab_size,
            eos_ids=tuple(e for e in tokenizer.eos_ids if e < target.vocab_size),
            chunk=config.prefill_chunk,
            limit=limit,
            on_drafted=on_drafted,
        )
        _log_memory(folder, proposer, target.dtype, config.rows)
        return proposer

    return TaskDrafter(neural, read_card(folder).kind, limit_s, make)


def _log_memory(folder: Path, proposer: NeuralProposer, dtype: torch.dtype, rows: int) -> None:
    log.info(
        "the drafter in %s takes %.1f MiB for its weights, %.1f MiB for the cache of %d rows and "
        "%.1f MiB for the vocabulary it drafts from; engine.kv_cache_bytes does not include them",
        folder,
        _numbers(folder) * dtype.itemsize / _MIB,
        proposer.cache_bytes / _MIB,
        rows,
        proposer.vocabulary.nbytes / _MIB,
    )


def _numbers(folder: Path) -> int:
    """The number of a drafter's own weights."""
    with safe_open(folder / WEIGHTS, framework="pt") as tensors:
        return sum(
            math.prod(tensors.get_slice(name).get_shape())
            for name in tensors.keys()  # noqa: SIM118
        )


def _vocabulary(
    rankings: ArtifactStore | None,
    record: TaskRecord,
    neural: NeuralDrafting,
    drafter: Eagle | Independent,
    head: Tensor,
    rows: int,
) -> Vocabulary:
    """Makes the vocabulary of a record; ``head`` is the weight of the drafter's LM head."""
    if neural.vocabulary == "full":
        return FullVocabulary(drafter.backbone.decoder.head)
    if neural.vocabulary == "recent":
        return RecentVocabulary(head, rows)
    corpus = record.corpus_name
    ranking = current_ranking(rankings) if rankings else None
    if ranking is None:
        raise ServiceError(
            f"task {record.name} drafts from a ranked vocabulary, and the corpus of {corpus} has "
            f"none for tokenizer {record.fingerprint}; run `tasc rank-vocabulary {corpus} "
            f"--from raw`, or `tasc task set {record.name} --draft-vocabulary full`; then a "
            "job that has begun needs --restart, since it keeps its version of the task"
        )
    chosen = ranking.top(neural.ranked_tokens)
    if neural.vocabulary == "ranked":
        return RankedVocabulary(head, chosen)
    return RecentVocabulary(head, rows, base=chosen)
