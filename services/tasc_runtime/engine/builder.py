"""Builds the engine of a task from its record, tokenizer, target, proposers and draft index.

Online replicas and batch actors build their engines with `EngineBuilder`.
"""

import dataclasses
import logging
import tempfile
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Self, TypeAlias, TypedDict, Unpack

import numpy as np
import redis
import torch

from tasc_draft import DraftIndex, DraftSettings, NgramProposer, Proposer, write_index
from tasc_draft.files import cache_folder
from tasc_engine import Engine, EngineConfig, ModelSource, StepRecord, Target
from tasc_engine.batch_engine import BatchEngine
from tasc_engine.model.loading import max_positions
from tasc_runtime.engine.reader import RequestReader
from tasc_runtime.engine.step_costs import step_costs
from tasc_runtime.engine.versions import Pinned, Records, newest_version
from tasc_runtime.engine_settings import DraftOverrides, EngineSettings
from tasc_runtime.models import load_tokenizer, template_of
from tasc_store import Artifact, ArtifactCache, ArtifactStore, TaskRecord, TaskStore
from tasc_store.artifacts import VOCABULARY
from tasc_store.indexes import DraftIndexes, empty_index
from tasc_text import MessageError, TaskTokenizer, resolve_folder

if TYPE_CHECKING:  # loads torch modules of neural drafters, which most tasks do without
    from tasc_runtime.engine.drafters import TaskDrafter


def device_of(device: str, gpus: float) -> str:
    """Resolves ``auto``: a GPU only if this process was given one, even if others are visible.

    Raises:
        ValueError: The device does not exist.
    """
    if device == "auto":
        return "cuda" if gpus > 0 and torch.cuda.is_available() else "cpu"
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device is {device!r}; use auto, cpu, cuda, cuda:0 ...") from error
    visible = torch.cuda.device_count()
    if found.type == "cuda" and (found.index or 0) >= visible:
        raise ValueError(
            f"device is {device!r}, and torch {torch.__version__} sees {visible} GPUs; use auto or "
            "cpu, or check the driver and CUDA_VISIBLE_DEVICES"
        )
    return device


def model_source(record: TaskRecord, device: str) -> ModelSource:
    """Local folders of a task's model and adapters."""
    return ModelSource(
        folder=resolve_folder(record.model, record.revision),
        adapter=resolve_folder(record.adapter) if record.adapter else None,
        dtype=record.dtype,
        device=device,
        quantization=record.quantization,
        adapters=tuple((name, resolve_folder(place)) for name, place in record.adapters),
    )


log = logging.getLogger(__name__)

DEFAULT_MODEL_LEN = 1024  # tokens of a row, unless the model has fewer positions
_ANY_INPUT = "a"  # its prompt begins like the prompts of other inputs


class BuilderOptions(TypedDict, total=False):
    """Options for building an engine that do not depend on its task.

    Attributes:
        draft: The service's own drafting settings.
        gpus: Number of GPUs this process was given; without any, ``auto`` means the CPU. A number
            below 1 is a part of a GPU, and limits the memory that the process takes of it.
        max_waiting: Maximum number of requests that wait for a row.
        cost_dir: Folder of step costs.
        say: Called with a line for waiting users about work that takes seconds.
    """

    draft: DraftOverrides | None
    gpus: float
    max_waiting: int
    cost_dir: Path | None
    on_step: Callable[[StepRecord], None]
    say: Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class IndexFile:
    """The index that vLLM drafts from, in a file in ``folder``.

    It is written at once. vLLM's proposer takes it over between two steps, within half a second.
    """

    folder: Path
    settings: DraftSettings
    index: DraftIndex

    def __post_init__(self) -> None:
        write_index(
            dataclasses.replace(self.index, settings=self.settings), self.folder / "index.tasc"
        )


Drafting: TypeAlias = NgramProposer | IndexFile


class EngineBuilder:
    """The engine of one task, and its parts.

    Args:
        tokenizer: The model's tokenizer; unset: it is loaded.
        index: The index that n-grams draft from; unset: only prompts and answers.
        artifact: The source of the index, if it comes from a store.
        rankings: The store of ranked vocabularies for a drafter; unset: no store.

    Raises:
        ServiceError: The model folder's tokenizer differs from the one of the registered task.
        EngineError: The task's drafter is for another tokenizer or target.

    Attributes:
        reader: Fills in the task's values in requests for this engine.
        engine: Our engine, or vLLM by ``settings.backend``.
        proposer: The n-gram proposer, or with vLLM the file that its proposer drafts from. A
            drafter may draft with our proposer or instead of it.
        drafter: The drafter; None if the record that the engine was built from names none.
        indexes: The indexes of a task in a store, see `of_task`.
        positions: Maximum tokens per row that the model supports, regardless of ``max_model_len``.
    """

    indexes: DraftIndexes

    def __init__(
        self,
        record: TaskRecord,
        version: int,
        settings: EngineSettings,
        *,
        tokenizer: TaskTokenizer | None = None,
        index: DraftIndex | None = None,
        artifact: Artifact | None = None,
        rankings: ArtifactStore | None = None,
        **options: Unpack[BuilderOptions],
    ) -> None:
        self.records = Records(record, version)
        self.tokenizer = tokenizer = tokenizer or load_tokenizer(record)
        self.template = template_of(record)
        self.artifact = artifact
        torch.set_num_threads(settings.torch_threads)
        gpus = options.get("gpus", 0.0)
        source = model_source(record, device_of(settings.device, gpus))
        self.positions = max_positions(source.folder)
        length = settings.max_model_len or min(DEFAULT_MODEL_LEN, self.positions)
        config = EngineConfig(
            rows=settings.rows,
            max_model_len=length,
            prefill_chunk=settings.prefill_chunk,
            max_waiting=options.get("max_waiting", 1024),
            max_draft_tokens=settings.max_draft_tokens,
            prefix_cache_bytes=settings.prefix_cache_bytes,
            kv_cache_bytes=settings.kv_cache_bytes,
            gpu_memory_share=settings.gpu_memory_share,
            gpu_part=min(gpus, 1.0) or 1.0,
        )
        draft = options.get("draft")
        self._overrides = draft.model_dump(exclude_none=True) if draft else {}
        self._config = config
        self.drafter: TaskDrafter | None = None
        self.engine: BatchEngine
        self.proposer: Drafting
        index = index or empty_index(tokenizer)
        if settings.backend == "vllm":
            self._start_vllm(source, settings, index, options)
        else:
            self._load_own(source, settings, index, rankings, options)
        self.reader = RequestReader(self.engine, tokenizer, self.template, self.records)

    def _load_own(
        self,
        source: ModelSource,
        settings: EngineSettings,
        index: DraftIndex,
        rankings: ArtifactStore | None,
        options: BuilderOptions,
    ) -> None:
        config, record, tokenizer = self._config, self.record, self.tokenizer
        target = Target.load(source, config)
        self._vocab_size = target.vocab_size
        # On a GPU, the proposer works ahead while the target's forward runs.
        self._spare = 0 if target.device.type == "cpu" else NgramProposer.spare_lanes(settings.rows)
        self.proposer = ngram = self._made_ngrams(record, index)
        costs = keep = None
        if settings.cost_aware:
            say, folder = options.get("say", log.info), options.get("cost_dir")
            costs, keep = step_costs(target, source, folder, say, settings.cost_seconds)
        if record.neural:
            from tasc_runtime.engine.drafters import load_task_drafter

            limit_s = settings.neural_draft_limit_s
            self.drafter = load_task_drafter(
                record, record.neural, target, source, tokenizer, config, limit_s, rankings
            )
        on_step = options.get("on_step", lambda record: None)
        drafted_by = self._drafted_by(ngram)
        self.engine = engine = Engine(target, tokenizer, drafted_by, config, on_step, costs, keep)
        with suppress(MessageError):  # a template may need more than one message
            prompt = np.array(self.template.encode(tokenizer, _ANY_INPUT), np.int32)
            engine.scheduler.prefixes.expect(prompt)

    def _start_vllm(
        self,
        source: ModelSource,
        settings: EngineSettings,
        index: DraftIndex,
        options: BuilderOptions,
    ) -> None:
        from tasc_runtime.engine import vllm_backend

        folder = tempfile.TemporaryDirectory(prefix="tasc-vllm-")
        weakref.finalize(self, folder.cleanup)
        self._index_folder = Path(folder.name)
        self.proposer = made = self._made_file(self.record, index)
        # vLLM's proposer learns min_prob from vLLM's steps, unless someone has set it. The one of a
        # tuned index follows from the step costs of our engine.
        own = self.record.draft.min_prob
        recorded = None if own == DraftSettings().min_prob else own
        self.engine = vllm_backend.open_engine(
            self.record,
            source,
            self.tokenizer,
            self._config,
            settings,
            self._index_folder,
            min(self._config.max_draft_tokens, made.settings.num_speculative_tokens),
            self.positions,
            self._overrides.get("min_prob", recorded),
            options.get("on_step", lambda record: None),
        )

    @classmethod
    def of_task(
        cls,
        client: redis.Redis,
        task: str,
        settings: EngineSettings,
        *,
        pinned: Pinned | None = None,
        version: int | None = None,
        digest: str | None = None,
        cache_dir: Path | None = None,
        **options: Unpack[BuilderOptions],
    ) -> Self:
        """Builds the engine of a registered task, with its current index.

        Args:
            pinned: Versions to use instead of the newest ones.
            version: Version of the record to use, with the current index.
            digest: The newest of the record versions with this `engine_digest` is used; unset: the
                newest of all.
            cache_dir: Folder of indexes on this node.

        Raises:
            IndexRefused: The current index was built with another tokenizer.
            StoreError: Redis fails, or the task does not exist.
        """
        store = TaskStore(client)
        version = pinned.record_version if pinned else version
        if version is not None:
            record = store.get(task, version)
        else:
            record, version = newest_version(store, task, digest)
        tokenizer = load_tokenizer(record)
        artifacts = ArtifactStore(client, record.corpus_name, record.fingerprint)
        cache = ArtifactCache(cache_dir or cache_folder() / "indexes")
        indexes = DraftIndexes(task, artifacts, cache, tokenizer)
        artifact, index = indexes.pinned(pinned.index_version) if pinned else indexes.current()
        built = cls(
            record,
            version,
            settings,
            tokenizer=tokenizer,
            index=index,
            artifact=artifact,
            rankings=ArtifactStore(client, record.corpus_name, record.fingerprint, kind=VOCABULARY),
            **options,
        )
        built.indexes = indexes
        return built

    @property
    def record(self) -> TaskRecord:
        """The newest version of the task's record that this engine can use."""
        return self.records.newest[0]

    @property
    def record_version(self) -> int:
        return self.records.newest[1]

    @property
    def has_chat_template(self) -> bool:
        return self.record.chat is not None

    @property
    def drafts_by(self) -> str:
        """The name of the proposer: a mixture of n-grams, alone or combined with a drafter."""
        ngrams = self.proposer
        if self.drafter and isinstance(ngrams, NgramProposer):
            return self.drafter.name(ngrams)
        return ngrams.settings.mixture

    @property
    def index_bytes(self) -> int:
        return self.proposer.index.nbytes if self.artifact else 0

    def draft_from(self, index: DraftIndex | None, settings: DraftSettings | None = None) -> None:
        """Restarts drafting, without what was learnt from past answers. Call it between two steps.

        Args:
            index: The index; None to draft only from prompts and answers.
            settings: Draft settings; unset: the settings of the index or the record.

        Raises:
            ValueError: These settings cannot draft from this index.
        """
        index = index or empty_index(self.tokenizer)
        self._draft(index, self._made(self.record, index, settings))

    def proposer_for(self, record: TaskRecord, index: DraftIndex) -> Drafting | None:
        """Makes a proposer for a record and an index on any thread; None if none is needed.

        The result is valid until the engine's record or index changes, so install one change before
        preparing the next. vLLM drafts from a new file soon after this call.

        Raises:
            ValueError: These settings cannot draft from this index.
        """
        if self._draft_settings(record, index) == self.proposer.settings and (
            isinstance(self.proposer, NgramProposer) or index is self.proposer.index
        ):
            return None
        return self._made(record, index)

    def swap(self, artifact: Artifact, index: DraftIndex, proposer: Drafting | None = None) -> None:
        """Drafts from another index, with its tuned settings. Call it between two steps.

        Args:
            proposer: The result of `proposer_for` for this index.
        """
        self._draft(index, proposer)
        self.artifact = artifact

    def take(self, record: TaskRecord, version: int, proposer: Drafting | None = None) -> None:
        """Adds a version of the record to answer with. Call it between two steps.

        Args:
            proposer: The result of `proposer_for` for this record.
        """
        self._draft(self.proposer.index, proposer)
        self.records.add(record, version)

    def _draft_settings(self, record: TaskRecord, index: DraftIndex) -> DraftSettings:
        """The index's tuned settings, else the record's settings, with the service's overrides."""
        return dataclasses.replace(index.settings or record.draft, **self._overrides)

    def _made(
        self, record: TaskRecord, index: DraftIndex, settings: DraftSettings | None = None
    ) -> Drafting:
        if isinstance(self.engine, Engine):
            return self._made_ngrams(record, index, settings)
        return self._made_file(record, index, settings)

    def _made_file(
        self, record: TaskRecord, index: DraftIndex, settings: DraftSettings | None = None
    ) -> IndexFile:
        return IndexFile(self._index_folder, settings or self._draft_settings(record, index), index)

    def _made_ngrams(
        self, record: TaskRecord, index: DraftIndex, settings: DraftSettings | None = None
    ) -> NgramProposer:
        """Makes a proposer with empty rows; allocates memory and compiles code on this thread."""
        settings = settings or self._draft_settings(record, index)
        of_row = settings.num_speculative_tokens
        if of_row and record.neural:  # a drafter fills its trees in all rows at once
            of_row = max(of_row, record.neural.nodes)
        return NgramProposer(
            settings,
            rows=self._config.rows,
            capacity=self._config.max_model_len,
            vocab_size=self._vocab_size,
            eos_ids=self.tokenizer.eos_ids,
            index=index,
            nodes=self._config.rows * of_row,
            spare=self._spare,
        )

    def _draft(self, index: DraftIndex, made: Drafting | None) -> None:
        if isinstance(made, NgramProposer) and isinstance(self.engine, Engine):
            self.engine.draft_by(self._drafted_by(made))
        if made:
            self.proposer = made
        elif isinstance(self.proposer, NgramProposer) and index is not self.proposer.index:
            self.proposer.set_index(index)

    def _drafted_by(self, ngram: NgramProposer) -> Proposer:
        return self.drafter.beside(ngram) if self.drafter else ngram
