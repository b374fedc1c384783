"""Builds an engine for a task: record, tokenizer, target, proposer, current draft index.

Online replicas and batch actors use it alike. It knows the store; it knows no HTTP and no Ray.
"""

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path

import redis
import torch

from tasc_draft import CorpusIndex, DraftSettings, TascProposer, read_index
from tasc_engine import Engine, EngineConfig, GenerationRequest, ModelSource, StepRecord, Target
from tasc_engine.target import max_positions
from tasc_serve.calls import Call
from tasc_serve.errors import IndexRefused, ServeError
from tasc_serve.settings import DraftOverrides, EngineSettings
from tasc_store import Artifact, ArtifactCache, ArtifactStore, TaskRecord, TaskStore
from tasc_text import PromptTemplate, TaskTokenizer, resolve_folder

log = logging.getLogger(__name__)

DEFAULT_MODEL_LEN = 1024  # tokens of a row, unless the model has fewer positions


def default_cache_dir() -> Path:
    return Path.home() / ".cache" / "tasc-serve" / "indexes"


class Worker:
    """One task, ready to answer.

    Raises:
        ServeError: The model folder's tokenizer is not the one the task was registered with.
        IndexRefused: The current index was built with another tokenizer.
    """

    def __init__(
        self,
        client: redis.Redis,
        task: str,
        settings: EngineSettings,
        *,
        draft: DraftOverrides | None = None,
        max_waiting: int = 1024,
        cache_dir: Path | None = None,
        on_step: Callable[[StepRecord], None] = lambda record: None,
    ) -> None:
        store = TaskStore(client)
        self.record: TaskRecord = store.get(task)
        self.record_version = store.versions(task)[-1]
        self.tokenizer = load_tokenizer(self.record)
        self.template = PromptTemplate(self.record.template)
        self.indexes = ArtifactStore(client, self.record.corpus_name, self.record.fingerprint)
        self._cache = ArtifactCache(cache_dir or default_cache_dir())
        self.artifact: Artifact | None = None
        torch.set_num_threads(settings.torch_threads)
        source = model_source(self.record, settings.device)
        length = settings.max_model_len or min(DEFAULT_MODEL_LEN, max_positions(source.folder))
        config = EngineConfig(settings.rows, length, settings.prefill_chunk, max_waiting)
        target = Target.load(source, config)
        self.proposer = self._new_proposer(target.vocab_size, config, draft)
        self.engine = Engine(target, self.tokenizer, self.proposer, config, on_step)

    @property
    def index_bytes(self) -> int:
        return self.proposer.index.nbytes if self.artifact else 0

    def fetch(self, artifact: Artifact) -> CorpusIndex:
        """Download an index to this node if need be, map it and check whose tokens it holds."""
        index = read_index(self._cache.fetch(self.indexes, artifact))
        if index.fingerprint != self.tokenizer.fingerprint:
            raise IndexRefused(
                f"task {self.record.name}: index version {artifact.version} was built with "
                f"tokenizer {index.fingerprint}, the model's is {self.tokenizer.fingerprint}; "
                "run `tasc build-index` for this task"
            )
        return index

    def swap(self, artifact: Artifact, index: CorpusIndex) -> None:
        """Draft from another index; call it between two steps."""
        self.proposer.set_index(index)
        self.artifact = artifact

    def request(self, call: Call) -> GenerationRequest:
        """Turn a call into token ids and limits.

        Raises:
            ValueError: The prompt has no tokens, or a limit is out of range.
        """
        prompt = call.prompt
        if isinstance(prompt, str):
            text = self.template.render(prompt) if call.templated else prompt
            prompt = tuple(self.tokenizer.encode_prompt(text))
        room = self.engine.config.max_model_len - len(prompt)
        asked = call.max_tokens
        return GenerationRequest(
            id=call.id,
            prompt=prompt,
            max_tokens=asked if asked is not None else max(min(self.record.max_tokens, room), 1),
            stop=(*self.record.stop, *call.stop),
            draft=call.draft,
            stream=call.stream,
        )

    def _new_proposer(
        self, vocab_size: int, config: EngineConfig, overrides: DraftOverrides | None
    ) -> TascProposer:
        changes = overrides.model_dump(exclude_none=True) if overrides else {}
        settings: DraftSettings = dataclasses.replace(self.record.draft, **changes)
        self.artifact = self.indexes.current()
        if self.artifact is None:
            self._warn_without_index()
            index = CorpusIndex.empty(self.tokenizer.fingerprint, self.tokenizer.vocab_size)
        else:
            index = self.fetch(self.artifact)
        return TascProposer(
            settings,
            rows=config.rows,
            capacity=config.max_model_len,
            vocab_size=vocab_size,
            eos_ids=self.tokenizer.eos_ids,
            index=index,
        )

    def _warn_without_index(self) -> None:
        others = self.indexes.other_fingerprints()
        found = f"; there are some for tokenizers {', '.join(others)}" if others else ""
        log.warning(
            "task %s has no draft index for tokenizer %s%s; drafting from prompts only until "
            "`tasc build-index %s` has run",
            self.record.name, self.record.fingerprint, found, self.record.name,
        )  # fmt: skip


def load_tokenizer(record: TaskRecord) -> TaskTokenizer:
    """The tokenizer of a task's model, refused when it is not the registered one."""
    folder = resolve_folder(record.model, record.revision, weights=False)
    tokenizer = TaskTokenizer.from_folder(folder)
    if tokenizer.fingerprint != record.fingerprint:
        raise ServeError(
            f"task {record.name} was registered with tokenizer {record.fingerprint}, {folder} has "
            f"{tokenizer.fingerprint}; register the task again"
        )
    return tokenizer


def model_name(record: TaskRecord) -> str:
    """A target's name for people: a hub name as it is, a folder's last part."""
    return Path(record.model).name if Path(record.model).is_absolute() else record.model


def model_source(record: TaskRecord, device: str) -> ModelSource:
    """Local folders of a task's model and adapter; ``auto`` takes a GPU where there is one."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return ModelSource(
        folder=resolve_folder(record.model, record.revision),
        adapter=resolve_folder(record.adapter) if record.adapter else None,
        dtype=record.dtype,
        device=device,
    )
