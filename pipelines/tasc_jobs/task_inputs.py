"""The inputs of a job: model, prompt and rows, from options, files and a task of the store.

All commands that run or train a model follow one rule. An option takes precedence over the task's
record, and given files take precedence over the task's corpus. If an option gives a fine-tuned
model, and the model's folder has the prompt of its training, that prompt is used.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Self

from tasc_draft import DraftSettings
from tasc_jobs.errors import EmptyCorpusError, UsageError
from tasc_protocol import GuideSpec
from tasc_runtime.data.rows import BadRow, Fields, read_corpus
from tasc_runtime.models import (
    chat_template,
    dtype_here,
    load_tokenizer,
    template_of,
    trained_prompt,
)
from tasc_runtime.sampling_options import guide_of
from tasc_store import CorpusRow, CorpusStore, TaskRecord, TaskStore, UnknownTask, connect
from tasc_text import ChatTemplate, PromptTemplate, TaskTokenizer, Template, resolve_folder
from tasc_text.template import UnquotedTemplate
from tasc_text.tokenizer import open_tokenizer

if TYPE_CHECKING:
    from tasc_engine import ModelSource

_BATCH = 1000


@dataclass(frozen=True)
class InputOptions:
    """The values of a command's options; None or () if an option was not given.

    Attributes:
        task: Task whose record supplies the values that are not given.
        template: The template as typed; ``\\n`` is a line break.
        chat_template: ``auto`` or a file.
        system_prompt: System prompt of the chat template.
        few_shot: File of rows that are the chat template's examples.
        files: Files of rows; without any, the rows are those of the task's corpus.
        limit: Maximum number of rows.
    """

    task: str | None = None
    model: str | None = None
    adapter: str | None = None
    tokenizer: Path | None = None
    eos: str | None = None
    template: str | None = None
    chat_template: str | None = None
    system_prompt: str | None = None
    few_shot: Path | None = None
    max_tokens: int | None = None
    dtype: str | None = None
    device: str = "auto"
    files: Sequence[Path] = ()
    fields: Fields = Fields()
    limit: int | None = None

    @property
    def names_everything(self) -> bool:
        """Whether neither a task's record nor its corpus is needed."""
        return bool(self.files and self.model and self.names_template)

    @property
    def names_template(self) -> bool:
        return bool(self.template or self.chat_template or self.trained)

    @property
    def trained(self) -> Template | None:
        """The prompt of the fine-tune that made the given model or adapter; None if unknown.

        Raises:
            ServiceError: The prompt cannot be read.
        """
        return trained_prompt(self.adapter, self.model)


@dataclass(frozen=True)
class GenerationSettings:
    """The prompt, the ends of answers and the draft settings.

    Attributes:
        max_tokens: Maximum tokens of an answer; fewer if a prompt leaves less room.
        stop: Strings that end an answer.
        draft: Draft settings.
        guide: The constraint on answers, such as the task's labels.
    """

    template: Template
    max_tokens: int = TaskRecord.max_tokens
    stop: tuple[str, ...] = ()
    draft: DraftSettings = DraftSettings()
    guide: GuideSpec | None = None


@dataclass(frozen=True)
class TaskInputs:
    """Options, the task's record if there is one, and rows.

    Attributes:
        rows: Rows of the given files, or else of the task's corpus, which may have none.
    """

    options: InputOptions
    record: TaskRecord | None
    rows: Sequence[CorpusRow]

    @classmethod
    def read(cls, url: str | None, options: InputOptions, *, with_rows: bool = True) -> Self:
        """Read the rows and, if the URL of a store is given, the task's record.

        The task needs no record if the options give model and template and there are rows.

        Raises:
            FileError, EmptyCorpusError: A file cannot be read, or the files have no rows.
            StoreError: Redis fails, or the task does not exist.
        """
        files = options.files if with_rows else ()
        if url is None or options.task is None:
            return cls(options, None, _file_rows(options) if files else [])
        with connect(url) as client:
            try:
                record = TaskStore(client).get(options.task)
            except UnknownTask:
                if not (options.model and options.names_template):
                    raise
                record = None
            if files or not with_rows:
                return cls(options, record, _file_rows(options) if files else [])
            corpus = CorpusStore(client, record.corpus_name if record else options.task)
            rows = list(islice(corpus_rows(corpus, len(corpus)), options.limit))
            if not rows and record is None:
                TaskStore(client).get(options.task)
            return cls(options, record, rows)

    @property
    def some_rows(self) -> Sequence[CorpusRow]:
        """Returns the rows; raises EmptyCorpusError if there are none."""
        if not self.rows:
            name = self.record.corpus_name if self.record else self.options.task
            raise EmptyCorpusError(
                f"the corpus of task {name} has no rows; run `tasc ingest` first"
            )
        return self.rows

    @property
    def named_model(self) -> tuple[str, str | None]:
        """Returns name and revision of the base model; raises UsageError if none is given."""
        if self.options.model is not None:
            return self.options.model, None
        if self.record is None:
            raise UsageError("no model is given; name a model with --model")
        return self.record.model, self.record.revision

    @property
    def named_template(self) -> Template | None:
        """Returns the template of the options or of a fine-tuned model; None if there is none.

        Raises:
            UsageError: Both kinds of template are given, or a system prompt or examples are given
                without a chat template.
            TemplateError, ServiceError, FileError: The template cannot be used.
        """
        given = self.options
        if given.template is not None:
            if given.chat_template or given.system_prompt or given.few_shot:
                raise UsageError(
                    "--template excludes --chat-template, --system-prompt and --few-shot; leave "
                    "out --template or the others"
                )
            return PromptTemplate(given.template.replace("\\n", "\n"))
        trained = given.trained
        if given.chat_template is None:
            if given.system_prompt is None and given.few_shot is None:
                return trained
            made = trained or (self.record and self.record.chat)
            if not isinstance(made, ChatTemplate):
                raise UsageError("--system-prompt and --few-shot need --chat-template; add it")
        else:
            folder = given.tokenizer or resolve_folder(*self.named_model, weights=False)
            made = chat_template(folder, given.chat_template)
            if isinstance(trained, ChatTemplate):
                made = replace(made, system=trained.system, shots=trained.shots)
        return changed_turns(made, given.system_prompt, given.few_shot)

    @property
    def template(self) -> Template:
        """Returns the template of the prompt.

        Raises:
            UsageError: No template is given, or options contradict each other.
            TemplateError: The template cannot be used.
            ServiceError: transformers cannot read the tokenizer that a chat template needs.
        """
        if named := self.named_template:
            allows = self.record is not None and self.record.allow_special_tokens_in_input
            return UnquotedTemplate(named) if allows else named
        if self.record is None:
            raise UsageError(
                "no prompt is given; name the prompt with --template or --chat-template"
            )
        return template_of(self.record)

    @property
    def generation(self) -> GenerationSettings:
        """Returns the generation settings; raises the same errors as `template`."""
        given, record = self.options.max_tokens, self.record
        if record is None:
            return GenerationSettings(self.template, given or TaskRecord.max_tokens)
        return GenerationSettings(
            self.template,
            given or record.max_tokens,
            record.stop,
            record.draft,
            guide_of(record),
        )

    @property
    def tokenizer(self) -> TaskTokenizer:
        """Returns the given tokenizer, or else that of the task's model.

        Raises:
            UsageError: No tokenizer is given.
            TextError: The tokenizer cannot be loaded.
            ServiceError: The model's tokenizer is not the one the task was registered with.
        """
        if self.options.tokenizer is not None:
            return open_tokenizer(self.options.tokenizer, self.options.eos)
        if self.record is None:
            raise UsageError("no tokenizer is given; name a tokenizer with --tokenizer")
        return load_tokenizer(self.record)

    @property
    def source(self) -> "ModelSource":
        """Returns the folders of model and adapter, the dtype and the device.

        The task's adapter is used only with the task's model, not with a model from the options.

        Raises:
            UsageError: No model is given, the task has several adapters, the dtype does not exist,
                or the device cannot be used.
            TextError: The model does not exist.
        """
        from tasc_runtime.engine.builder import model_source

        given, record = self.options, self.record
        _require_dtype(given.dtype or TaskRecord.dtype)
        if given.adapter and not given.model:
            raise UsageError(
                f"--adapter {given.adapter} is given without its base model; name it with --model"
            )
        name, _ = self.named_model
        if given.model is None:
            assert record is not None  # the model is from the record
            if record.adapters:
                names = ", ".join(record.adapter_names)
                raise UsageError(
                    f"task {record.name} has several adapters ({names}); merge an adapter into "
                    "the model, and name that model with --model"
                )
            found = model_source(record, device_here(given.device))
            return replace(found, dtype=given.dtype or found.dtype)
        dtype = given.dtype or (record.dtype if record else TaskRecord.dtype)
        return named_source(name, given.adapter, dtype, given.device)


def changed_turns(chat: ChatTemplate, system: str | None, few_shot: Path | None) -> ChatTemplate:
    """Returns a chat template with the given system prompt and examples in place of its own.

    An empty system prompt removes that of the template.

    Raises:
        FileError, EmptyCorpusError, TemplateError: The examples cannot be used.
    """
    shots = chat.shots
    if few_shot is not None:
        shots = tuple((r.input, r.output) for r in read_files([few_shot], Fields()).rows)
    return replace(chat, system=chat.system if system is None else system or None, shots=shots)


def named_source(model: str, adapter: str | None, dtype: str, device: str) -> "ModelSource":
    """Returns the source of a model and an adapter, given by folder or hub name.

    For the dtype ``auto``, see `dtype_here`.

    Raises:
        UsageError: The dtype does not exist, or the device cannot be used on this machine.
        TextError: The model or adapter does not exist.
    """
    from tasc_engine import ModelSource

    dtype = dtype_here(dtype, device=device)
    _require_dtype(dtype)
    found = device_here(device)
    adapted = resolve_folder(adapter) if adapter else None
    return ModelSource(resolve_folder(model), adapted, dtype, found)


def _require_dtype(dtype: str) -> None:
    from tasc_engine.model.loading import DTYPES

    if dtype not in DTYPES:
        raise UsageError(f"--dtype is {dtype}; choose one of {', '.join(DTYPES)}")


def device_here(device: str) -> str:
    """Returns a torch device; ``auto`` is a GPU if this process has access to one.

    Raises:
        UsageError: The device cannot be used on this machine.
    """
    import torch

    from tasc_runtime.engine.builder import device_of

    try:
        found = device_of(device, gpus=torch.cuda.device_count())
        torch.empty(0, device=found)
    except (ValueError, RuntimeError, AssertionError) as error:
        why = str(error).splitlines()[0]
        raise UsageError(f"--device {device} cannot be used ({why}); try cpu") from error
    return found


@dataclass(frozen=True)
class FileRows:
    """The rows of files, and the number of invalid lines."""

    rows: list[CorpusRow]
    refused: int


def read_files(paths: Sequence[Path], fields: Fields, limit: int | None = None) -> FileRows:
    """Read the rows of files, in order; at most ``limit`` of them.

    Raises:
        FileError: A file cannot be read.
        EmptyCorpusError: The files have no rows.
    """
    refused: list[BadRow] = []
    rows = list(islice(read_corpus(paths, fields, refused.append), limit))
    if not rows:
        raise EmptyCorpusError(
            f"no rows in {', '.join(map(str, paths))} with fields {fields.input!r} and "
            f"{fields.output!r} ({len(refused)} lines were refused); name other files, or "
            "name the fields with --input-field and --output-field"
        )
    return FileRows(rows, len(refused))


def corpus_rows(store: CorpusStore, rows: int) -> Iterator[CorpusRow]:
    """Yields rows ``[0, rows)`` of a corpus, or as many as exist."""
    for start in range(0, rows, _BATCH):
        yield from store.read(start, min(start + _BATCH, rows))


def served_prefix(task: str) -> str:
    """Returns the key prefix of corpus rows whose outputs are answers of the task's services."""
    return f"served:{task}:"


def served_key(task: str, text: str) -> str:
    """Returns the key of a row collected from a task's service, derived from the row's input."""
    return f"{served_prefix(task)}{hashlib.sha256(text.encode()).hexdigest()[:32]}"


def _file_rows(options: InputOptions) -> list[CorpusRow]:
    return read_files(options.files, options.fields, options.limit).rows
