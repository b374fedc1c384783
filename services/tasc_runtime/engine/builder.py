"""Builds the engine of a task from its record, tokenizer, target, proposers and draft index.

Online replicas and batch actors build their engines with it.
"""

import dataclasses
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypedDict, Unpack

import numpy as np
import redis
import torch
from msgspec import structs

from tasc_draft import DraftIndex, DraftSettings, NgramProposer, Proposer
from tasc_draft.user_folders import cache_folder
from tasc_engine import Engine, EngineConfig, GenerationRequest, ModelSource, StepRecord, Target
from tasc_engine import guided as engine_guides
from tasc_engine.drafting.neural.ranking import Ranking
from tasc_engine.errors import GuideError
from tasc_engine.model.loading import max_positions
from tasc_protocol import FieldError, GuideSpec, Request
from tasc_runtime.engine.drafters import load_task_drafter, ranking_of
from tasc_runtime.engine.indexes import DraftIndexes, empty_index
from tasc_runtime.engine.step_costs import step_costs
from tasc_runtime.engine.versions import Pinned, Records, newest_version
from tasc_runtime.engine_settings import DraftOverrides, EngineSettings
from tasc_runtime.models import load_tokenizer, template_of
from tasc_runtime.sampling_options import (
    SHOWN,
    PromptTooLong,
    adapter_of,
    guide_for,
    guide_of,
    sampling_of,
)
from tasc_store import Artifact, ArtifactCache, ArtifactStore, TaskRecord, TaskStore
from tasc_text import Conversation, MessageError, TaskTokenizer, resolve_folder


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
            "cpu, or look at the driver and CUDA_VISIBLE_DEVICES"
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


def require_stops(tokenizer: TaskTokenizer, stops: Sequence[str]) -> None:
    """Checks that answers can contain stop strings.

    Raises:
        FieldError: A string has a special token and other text, which no answer has.
    """
    for stop in stops:
        if (held := tokenizer.special_in(stop)) not in (None, stop):
            raise FieldError(
                "stop",
                f"stop has {stop[:SHOWN]!r}, which is in no answer: {held!r} is a special token, "
                f"which has no text there; give {held!r} alone, or stop_token_ids: "
                f"[{tokenizer.special_tokens[held]}]",
            )


log = logging.getLogger(__name__)

DEFAULT_MODEL_LEN = 1024  # tokens of a row, unless the model has fewer positions
_ANY_INPUT = "a"  # its prompt begins like those of other inputs
_LONG_TEXT = 16_384  # characters; encoding it takes some milliseconds


@dataclass(frozen=True)
class Ready:
    """A request that the engine can accept at once.

    Attributes:
        record_version: Version of the task's record that it was read by.
        guide: The compiled guide of the request, if it has one.
    """

    request: GenerationRequest
    record_version: int
    guide: engine_guides.Guide | None = None


class BuilderOptions(TypedDict, total=False):
    """Options of building an engine that do not depend on its task.

    Attributes:
        draft: The service's own drafting settings.
        gpus: Number of GPUs this process was given; without any, ``auto`` means the CPU.
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


class EngineBuilder:
    """Builds the engine of one task, and reads requests for it.

    Args:
        tokenizer: The model's tokenizer; unset: it is loaded.
        index: The index that n-grams draft from; unset: only prompts and answers.
        artifact: The source of the index, if it comes from a store.
        ranking: Finds the task's ranked vocabulary, if it has one.

    Raises:
        ServiceError: The model folder's tokenizer differs from the one of the registered task.
        EngineError: The task's drafter is for another tokenizer or target.

    Attributes:
        proposer: The n-grams; a drafter may draft beside or instead of them.
        drafter: The drafter of the record that the engine was built from, if it names one.
        indexes: The indexes of a task in a store, see `of_task`.
        positions: Maximum tokens of a row of the model, regardless of ``max_model_len``.
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
        ranking: Callable[[], Ranking | None] = lambda: None,
        **options: Unpack[BuilderOptions],
    ) -> None:
        self.records = Records(record, version)
        self.tokenizer = tokenizer = tokenizer or load_tokenizer(record)
        self.template = template_of(record)
        self.artifact = artifact
        torch.set_num_threads(settings.torch_threads)
        source = model_source(record, device_of(settings.device, options.get("gpus", 0.0)))
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
        )
        target = Target.load(source, config)
        draft = options.get("draft")
        self._overrides = draft.model_dump(exclude_none=True) if draft else {}
        self._config, self._vocab_size = config, target.vocab_size
        self.proposer = self._made_proposer(record, index or empty_index(tokenizer))
        costs = keep = None
        if settings.cost_aware:
            say, folder = options.get("say", log.info), options.get("cost_dir")
            costs, keep = step_costs(target, source, folder, say, settings.cost_seconds)
        limit_s = settings.neural_draft_limit_s
        self.drafter = load_task_drafter(
            record, target, source, tokenizer, config, limit_s, ranking
        )
        on_step = options.get("on_step", lambda record: None)
        drafted_by = self._drafted_by(self.proposer)
        self.engine = Engine(target, tokenizer, drafted_by, config, on_step, costs, keep)
        with suppress(MessageError):  # a template may need more than one message
            prompt = np.array(self.template.encode(tokenizer, _ANY_INPUT), np.int32)
            self.engine.scheduler.prefixes.expect(prompt)

    @classmethod
    def of_task(
        cls,
        client: redis.Redis,
        task: str,
        settings: EngineSettings,
        *,
        pinned: Pinned | None = None,
        digest: str | None = None,
        cache_dir: Path | None = None,
        **options: Unpack[BuilderOptions],
    ) -> Self:
        """Builds the engine of a registered task, with its announced index.

        Args:
            pinned: Versions to use instead of the newest.
            digest: The `engine_digest` of the version to use instead of the newest; live changes of
                that version still apply.
            cache_dir: Folder of indexes on this node.

        Raises:
            IndexRefused: The current index was built with another tokenizer.
            StoreError: Redis fails, or the task does not exist.
        """
        store = TaskStore(client)
        if pinned:
            version = pinned.record_version
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
            ranking=lambda: ranking_of(client, record),
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

    def waits_to_render(self, asked: Request) -> bool:
        """Whether `read` may block on another process or a long text; not for event loops."""
        if asked.templated and self.has_chat_template:
            return True
        return not isinstance(asked.prompt, tuple) and len(str(asked.prompt)) > _LONG_TEXT

    def with_row(self, asked: Request) -> Request:
        """Replaces a conversation by the row's input if the template is a format string."""
        if isinstance(asked.prompt, Conversation) and not self.has_chat_template:
            return structs.replace(asked, prompt=asked.prompt.input)
        return asked

    @property
    def drafts_by(self) -> str:
        """The name of the proposer: a mixture of n-grams, alone or combined with a drafter."""
        mixture = self.proposer.settings.mixture
        return self.drafter.name(self.proposer) if self.drafter else mixture

    @property
    def index_bytes(self) -> int:
        return self.proposer.index.nbytes if self.artifact else 0

    def draft_from(self, index: DraftIndex | None, settings: DraftSettings | None = None) -> None:
        """Restarts drafting without the learning from past answers; call it between two steps.

        Args:
            index: The index; None to draft only from prompts and answers.
            settings: Draft settings; unset: those of the index or the record.

        Raises:
            ValueError: These settings cannot draft from this index.
        """
        index = index or empty_index(self.tokenizer)
        self.proposer = self._made_proposer(self.record, index, settings)
        self.engine.draft_by(self._drafted_by(self.proposer))

    def proposer_for(self, record: TaskRecord, index: DraftIndex) -> NgramProposer | None:
        """Makes the proposer for record and index on any thread; None if the current one fits.

        The result is valid while neither changes: install one change before preparing the next.

        Raises:
            ValueError: These settings cannot draft from this index.
        """
        if self._draft_settings(record, index) == self.proposer.settings:
            return None
        return self._made_proposer(record, index)

    def swap(
        self, artifact: Artifact, index: DraftIndex, proposer: NgramProposer | None = None
    ) -> None:
        """Drafts from another index, with its tuned settings; call it between two steps.

        Args:
            proposer: The result of `proposer_for` for it.
        """
        self._draft(index, proposer)
        self.artifact = artifact

    def take(self, record: TaskRecord, version: int, proposer: NgramProposer | None = None) -> None:
        """Adds a version of the record to answer by; call it between two steps.

        Args:
            proposer: The result of `proposer_for` for it.
        """
        self._draft(self.proposer.index, proposer)
        self.records.add(record, version)

    def request(self, asked: Request) -> GenerationRequest:
        """Reads a request and compiles its guide for the engine, which takes time the first time.

        Raises:
            FieldError: A field of the request other than the prompt cannot be met.
            ValueError: The prompt has no tokens, or a limit is out of range.
        """
        version = asked.record_version or self.record_version
        request = self.read(asked, version, asked.id)
        self.guide(request.guide)
        return request

    def read(self, asked: Request, version: int, id: str) -> GenerationRequest:
        """Makes the engine's request, with the task's values for those that it does not set.

        Any thread may call it.

        Args:
            version: Version of the task's record that answers.
            id: The request's id in the engine; it must be unique there.

        Raises:
            FieldError: A field is wrong.
            PromptTooLong: The prompt leaves no room for an answer in a row.
            ValueError: The prompt has no tokens, or a limit is out of range.
        """
        record = self.records.of(version)
        guide = None if asked.max_tokens == 0 else guide_for(asked, record)
        if guide:
            apart = self.tokenizer.special_ids.union(self.tokenizer.eos_ids)
            guide.require_whole(asked.stop, {*asked.stop_token_ids} - apart)
        prompt = self._truncated(self._prompt(asked), asked, record)
        self._require_tokens(asked)
        room, most = self._room(asked, prompt), asked.max_tokens
        most = min(record.max_tokens, room) if most is None else max(most, 1)
        if asked.min_tokens > most:
            message = f"min_tokens is {asked.min_tokens}; the answer has at most {most}"
            raise FieldError("min_tokens", f"{message}: lower it, or raise max_tokens")
        request = GenerationRequest(
            id=id,
            prompt=prompt,
            max_tokens=most,
            stop=(*record.stop, *asked.stop),
            keep_stop=asked.include_stop_str_in_output,
            stop_ids=asked.stop_token_ids + self._special_stops(record, asked),
            min_tokens=asked.min_tokens,
            draft=asked.draft,
            stream=asked.stream,
            sampling=sampling_of(asked, record.sampling),
            guide=guide,
            logprobs=asked.logprobs,
            prompt_logprobs=asked.echo and asked.logprobs is not None and not asked.committed_ids,
            ignore_eos=asked.ignore_eos,
            adapter=adapter_of(asked, record),
            committed_ids=asked.committed_ids,
        )
        self.engine.require_fit(request)
        return request

    def guide(self, guide: GuideSpec | None) -> engine_guides.Guide | None:
        """Returns the compiled guide of a request; compiles it here unless it is known.

        Raises:
            FieldError: The guide cannot be followed.
        """
        if guide is None:
            return None
        try:
            return self.engine.guides.of(guide)
        except GuideError as error:
            raise FieldError(guide.field, f"{guide.name}: {error}") from error

    def compile_own_guide(self) -> None:
        """Compiles the task's own guide before the first request comes."""
        guide = guide_of(self.record)
        try:
            if guide:
                self.engine.guides.of(guide)
        except GuideError as error:
            log.error("task %s: %s: %s", self.record.name, guide.name if guide else "", error)

    def _prompt(self, asked: Request) -> tuple[int, ...]:
        add = asked.add_special_tokens
        if isinstance(asked.prompt, tuple):
            return asked.prompt
        if isinstance(asked.prompt, str) and not asked.templated:
            return tuple(self.tokenizer.encode_prompt(asked.prompt, add is not False))
        try:
            return tuple(self.template.encode(self.tokenizer, asked.prompt, add))
        except MessageError as error:
            raise FieldError(error.field, str(error)) from error

    def _truncated(
        self, prompt: tuple[int, ...], asked: Request, record: TaskRecord
    ) -> tuple[int, ...]:
        """Returns the prompt, or its last tokens according to ``truncate_prompt_tokens``."""
        most, longest = asked.truncate_prompt_tokens, self.engine.longest
        if most == -1:
            own = min(record.max_tokens, longest // 2)
            most = max(longest - (own if asked.max_tokens is None else asked.max_tokens or 1), 1)
        return prompt[-most:] if most else prompt

    def _room(self, asked: Request, prompt: tuple[int, ...]) -> int:
        """Returns how many tokens a prompt leaves for its answer; raises PromptTooLong if none."""
        longest = self.engine.longest
        if len(prompt) >= longest:
            raise PromptTooLong(asked.prompt_field, len(prompt), longest)
        return longest - len(prompt)

    def _special_stops(self, record: TaskRecord, asked: Request) -> tuple[int, ...]:
        """Returns the stop strings that are special tokens, as ids: answers' texts lack them.

        Raises:
            FieldError: See `require_stops`; those of the task were checked when it was made.
        """
        require_stops(self.tokenizer, asked.stop)
        special = self.tokenizer.special_tokens
        found = (special.get(stop) for stop in (*asked.stop, *record.stop))
        return tuple(id_ for id_ in found if id_ is not None and id_ < self.engine.vocab_size)

    def _require_tokens(self, asked: Request) -> None:
        size = self.engine.vocab_size
        biased = [token for token, _ in asked.logit_bias]
        for field, tokens in (("logit_bias", biased), ("stop_token_ids", asked.stop_token_ids)):
            if unknown := [token for token in tokens if token >= size]:
                message = f"{field} has token {unknown[0]}; the task's model has {size}"
                raise FieldError(field, message)

    def _draft_settings(self, record: TaskRecord, index: DraftIndex) -> DraftSettings:
        """The settings tuned with the index, or the record's, overridden by the service's own."""
        return dataclasses.replace(index.settings or record.draft, **self._overrides)

    def _made_proposer(
        self, record: TaskRecord, index: DraftIndex, settings: DraftSettings | None = None
    ) -> NgramProposer:
        """Makes a proposer without rows; allocates memory and compiles new code on this thread."""
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
        )

    def _draft(self, index: DraftIndex, made: NgramProposer | None) -> None:
        if made:
            self.engine.draft_by(self._drafted_by(made))
            self.proposer = made
        elif index is not self.proposer.index:
            self.proposer.set_index(index)

    def _drafted_by(self, ngram: NgramProposer) -> Proposer:
        return self.drafter.beside(ngram) if self.drafter else ngram
