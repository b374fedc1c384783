"""`LLM`: a model, its adapters and its task's corpus behind one call, in this process.

It runs the engine, sampling, guides and drafts of the service, without Ray, Redis or HTTP.
"""

import json
import os
import re
import signal
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from numbers import Integral
from pathlib import Path
from typing import Any, Literal, Self

import torch
from pydantic import ValidationError

from tasc_draft import SOURCES, DraftSettings, read_index, write_index
from tasc_engine import EngineTotals, FinishReason, GenerationRequest, GenerationResult, StepRecord
from tasc_runtime.data.local_corpus import Corpus, local_index, rows_of
from tasc_runtime.data.rows import whole_file
from tasc_runtime.engine.builder import EngineBuilder
from tasc_runtime.engine_settings import EngineSettings
from tasc_runtime.errors import ServiceError
from tasc_runtime.progress import Progress
from tasc_runtime.protocol import Call, TokenText, TokenTexts
from tasc_runtime.sampling_options import UNKNOWN, FieldError, GenerationFields, Top
from tasc_store import TaskRecord, connect
from tasc_text import PromptTemplate, TaskTokenizer, resolve_folder

_SAVED, _INDEX, _FORMAT = "llm.json", "index.tasc", 1
_PROGRESS_ROWS = 100  # a call with more shows its progress

Input = str | Sequence[int]


class Options(GenerationFields):
    """Keyword arguments of `LLM.generate`: the fields of an HTTP request of the same names."""

    logprobs: Top | None = None


@dataclass(frozen=True)
class Completion:
    """One answer.

    Attributes:
        index: Place of its input among those given.
        choice: Which of the ``n`` answers to that input.
        text: The answer, without end-of-sequence and cut before a stop string.
        tokens: Its token ids, end-of-sequence included where the model ended it.
        finish_reason: ``stop``, ``length`` or ``error``.
        prompt_tokens: Tokens of its prompt.
        steps: Forwards of the target that its tokens took.
        drafted: Draft tokens that were proposed.
        accepted: Draft tokens that were kept.
        seconds: From its arrival in the engine to its last token.
        logprobs: One entry a token, where they were asked for.
        error: Why it broke off, where ``finish_reason`` is ``error``.
    """

    index: int
    choice: int
    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    prompt_tokens: int
    steps: int
    drafted: int
    accepted: int
    seconds: float
    logprobs: tuple[TokenText, ...] = ()
    error: str | None = None

    @property
    def acceptance(self) -> float:
        """Accepted draft tokens / proposed ones; 0 where nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0


class Completions(list[Completion]):
    """Answers in the order of their inputs, ``n`` for each.

    Attributes:
        interrupted: Whether Ctrl-C ended the call. Answers that were not complete are missing.
    """

    interrupted = False


@dataclass(frozen=True)
class Summary:
    """What an `LLM` has done since it was made.

    Attributes:
        tokens: Emitted tokens, ends of sequence included.
        steps: Forwards of rows that could emit. Plain decoding needs one a token.
        acceptance_by_position: Accepted at position i / drafts that reach i.
        accepted_by_source: Accepted draft tokens, by the source that proposed them.
        draft_seconds: Time spent proposing.
        verify_seconds: Time spent in the target's forwards.
    """

    answers: int
    tokens: int
    steps: int
    drafted: int
    accepted: int
    acceptance_by_position: tuple[float, ...]
    accepted_by_source: Mapping[str, int]
    draft_seconds: float
    verify_seconds: float

    @property
    def tokens_per_step(self) -> float:
        """Block efficiency: emitted tokens / forwards of rows that could emit; 0 before any."""
        return self.tokens / self.steps if self.steps else 0.0

    def __str__(self) -> str:
        sources = ", ".join(f"{name} {count:,}" for name, count in self.accepted_by_source.items())
        by_position = " ".join(f"{share:.2f}" for share in self.acceptance_by_position[:8])
        return (
            f"{self.answers:,} answers, {self.tokens:,} tokens in {self.steps:,} forwards of rows: "
            f"{self.tokens_per_step:.2f} tokens a forward, where plain decoding has 1\n"
            f"accepted {self.accepted:,} of {self.drafted:,} draft tokens: {sources or 'none'}\n"
            f"acceptance by position: {by_position or 'nothing was drafted'}\n"
            f"{self.verify_seconds:.2f} s verifying, {self.draft_seconds:.2f} s drafting"
        )


class LLM:
    r"""A task-specific model that drafts from its task's corpus.

    ```python
    llm = LLM("./my-model", adapter="./my-lora", corpus="train.jsonl", template="label: {input}\n")
    for answer in llm.generate(["wake me up at nine"], max_tokens=64):
        print(answer.text, answer.acceptance)
    ```

    The model verifies every draft token, so answers are those of plain decoding. Without a corpus
    it drafts from the prompt and from its own answers. One call runs at a time.

    Args:
        model: Folder or hub name of a Hugging Face causal LM.
        adapter: Folder or hub name of a LoRA adapter that is merged into the model.
        adapters: Names and folders of LoRA adapters of which each call uses one (``adapter=name``).
        corpus: Rows of the task: JSONL or Parquet files, a table (pandas, Polars, Arrow,
            ``datasets.Dataset``) with columns ``input`` and ``output``, or pairs of both. The index
            is kept in ``cache_dir`` and built once for the same content.
        revision: Branch, tag or commit of a model on the hub.
        template: The prompt, with ``{input}`` once.
        stop: Strings any of which ends an answer.
        max_tokens: Most tokens of an answer where a call does not say.
        choices: Labels, one of which is the answer. One of choices, schema and regex may be set.
        schema: JSON schema that the answer fits.
        regex: Regular expression that the whole answer matches.
        dtype: float32, bfloat16, float16 or float64.
        quantization: nf4 or int8, by bitsandbytes.
        draft: How it drafts.
        cache_dir: Folder of indexes.
        engine: Fields of `EngineSettings`, such as ``rows``, ``max_model_len`` and ``device``.

    Raises:
        EngineError: The model cannot be decoded exactly here.
        FileError: A file of the corpus cannot be read, or a line of it gives no row.
        TextError: Model, adapter or tokenizer cannot be found or read.
        ValueError: A value is of the wrong kind or outside its range.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        adapter: str | Path | None = None,
        adapters: Mapping[str, str | Path] | None = None,
        corpus: Corpus | None = None,
        revision: str | None = None,
        template: str = "{input}",
        stop: Sequence[str] = (),
        max_tokens: int = TaskRecord.max_tokens,
        choices: Sequence[str] = (),
        schema: Mapping[str, Any] | None = None,
        regex: str | None = None,
        dtype: str = TaskRecord.dtype,
        quantization: Literal["nf4", "int8"] | None = None,
        draft: DraftSettings | None = None,
        cache_dir: Path | None = None,
        **engine: Any,
    ) -> None:
        settings = EngineSettings(**engine)
        tokenizer = TaskTokenizer.from_folder(resolve_folder(str(model), revision, weights=False))
        record = TaskRecord(
            name=_name_of(model),
            model=_place(model),
            fingerprint=tokenizer.fingerprint,
            template=template,
            revision=revision,
            adapter=None if adapter is None else _place(adapter),
            adapters=tuple((name, _place(place)) for name, place in (adapters or {}).items()),
            dtype=dtype,
            stop=tuple(stop),
            max_tokens=max_tokens,
            draft=draft or DraftSettings(),
            quantization=quantization,
            choices=tuple(choices),
            schema=None if schema is None else json.dumps(schema),
            regex=regex,
        )
        index = None
        if corpus is not None:
            rows = list(rows_of(corpus))
            prompt = PromptTemplate(template)
            index = local_index(rows, tokenizer, prompt, record.draft, cache_dir)
        built = EngineBuilder(
            record, 1, settings, tokenizer=tokenizer, index=index, **self._options()
        )
        self._begin(built, settings)

    @classmethod
    def load(cls, folder: str | Path, **engine: Any) -> Self:
        """Open what `save` wrote.

        Args:
            engine: Fields of `EngineSettings` that replace those saved.

        Raises:
            ServiceError: It is no such folder, or one of another version of this program.
            EngineError, TextError, ValueError: See the class.
        """
        path = Path(folder).expanduser() / _SAVED
        try:
            saved = json.loads(path.read_text(encoding="utf-8"))
            if saved.get("format") != _FORMAT:
                raise ValueError(f"format is {saved.get('format')!r}, this program reads {_FORMAT}")
            record = TaskRecord.from_json(json.dumps(saved["record"]))
            before = EngineSettings(**saved["engine"])
            index = read_index(path.with_name(_INDEX))
            index.check_integrity()
            if index.fingerprint != record.fingerprint:
                raise ValueError(f"its index is for the tokenizer {index.fingerprint}")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ServiceError(
                f"{path} is not what LLM.save writes ({error}); save the model again"
            ) from error
        settings = EngineSettings(**{**before.model_dump(), **engine})
        llm = cls.__new__(cls)
        llm._begin(EngineBuilder(record, 1, settings, index=index, **llm._options()), settings)
        return llm

    @classmethod
    def from_task(cls, task: str, redis_url: str | None = None, **engine: Any) -> Self:
        """A registered task with its announced index.

        Args:
            redis_url: The store; unset: ``REDIS_URL`` of the environment.
            engine: Fields of `EngineSettings`.

        Raises:
            ServiceError: No store is named, or model and task have different tokenizers.
            StoreError: Redis fails, or there is no such task.
            EngineError, TextError, ValueError: See the class.
        """
        url = redis_url or os.environ.get("REDIS_URL")
        if not url:
            raise ServiceError("no store is named; give redis_url, or set REDIS_URL")
        settings, llm = EngineSettings(**engine), cls.__new__(cls)
        with connect(url) as client:
            built = EngineBuilder.of_task(client, task, settings, **llm._options())
        llm._begin(built, settings)
        return llm

    def save(self, folder: str | Path) -> None:
        """Write the task's record, the engine's settings and the draft index to a folder.

        The model is named, not copied: `load` needs it at the same place or on the hub.
        """
        path = Path(folder).expanduser()
        path.mkdir(parents=True, exist_ok=True)
        write_index(self._builder.proposer.index, path / _INDEX)
        saved = {
            "format": _FORMAT,
            "record": json.loads(self._builder.record.to_json()),
            "engine": self._settings.model_dump(exclude_defaults=True),
        }
        with whole_file(path / _SAVED) as file:
            file.write(json.dumps(saved, indent=2).encode())

    def generate(
        self, inputs: Input | Iterable[Input], *, progress: bool | None = None, **options: Any
    ) -> Completions:
        """Answer inputs, ``n`` times each.

        All of them are checked before the first one is answered. Ctrl-C ends the call between two
        steps and gives the answers that are complete.

        Args:
            inputs: One or several: texts that are put into the template, or token ids of prompts.
            progress: Whether to show progress on stderr; unset: from 100 inputs on.
            options: Fields of a request over HTTP: ``max_tokens``, ``temperature``, ``top_p``,
                ``seed``, ``stop``, ``n``, ``logprobs``, ``guided_choice``, ``adapter``, ``draft``
                and the others of `Options`.

        Raises:
            FieldError: An option is unknown or cannot be met, or an input has no tokens or is too
                long; the message says which.
            RuntimeError: Another call is running.
        """
        asked = _parsed(options)
        texts = _listed(inputs)
        requests = [
            request for i, text in enumerate(texts) for request in self._read(i, text, asked)
        ]
        found: dict[str, Completion] = {}
        answers = Completions()
        show = len(requests) >= _PROGRESS_ROWS if progress is None else progress
        with self._running(), _interrupts() as interrupted, _progress(show, len(requests)) as bar:
            drafted = accepted = 0
            for result in self._engine.generate(requests, interrupted.is_set):
                answer = found[result.id] = self._completion(result, asked)
                drafted, accepted = drafted + answer.drafted, accepted + answer.accepted
                if bar:
                    bar.advance()
                    bar.tell(f"acceptance {accepted / max(drafted, 1):.2f}")
            answers.interrupted = interrupted.is_set()
        answers.extend(found[request.id] for request in requests if request.id in found)
        return answers

    def stream(self, text: Input, **options: Any) -> Iterator[str]:
        """The answer to one input, piece by piece. Closing the iterator ends the answer.

        Raises:
            ServiceError: The answer broke off.
            FieldError, RuntimeError: See `generate`.
        """
        asked = _parsed(options)
        if asked.n not in (None, 1):
            raise FieldError("n", f"n is {asked.n}; a stream has one answer")
        (request,) = self._read(0, text, asked)
        return self._stream(replace(request, stream=True))

    def summary(self) -> Summary:
        """What has been done so far, and what drafting gained. ``print`` shows it in four lines."""
        totals = self._totals or EngineTotals(len(SOURCES), 1)
        by_source = zip(SOURCES, totals.accepted.sum(1).tolist(), strict=True)
        return Summary(
            answers=self._answers,
            tokens=totals.emitted_tokens,
            steps=totals.row_steps,
            drafted=int(totals.drafted.sum()),
            accepted=int(totals.accepted.sum()),
            acceptance_by_position=tuple(totals.acceptance_by_position()),
            accepted_by_source={name: count for name, count in by_source if count},
            draft_seconds=totals.draft_seconds,
            verify_seconds=totals.verify_seconds,
        )

    @property
    def record(self) -> TaskRecord:
        """The task, as `tasc task create` would register it."""
        return self._builder.record

    @property
    def tokenizer(self) -> TaskTokenizer:
        return self._builder.tokenizer

    def _options(self) -> Any:
        return {"gpus": float(torch.cuda.device_count()), "on_step": self._count}

    def _begin(self, builder: EngineBuilder, settings: EngineSettings) -> None:
        self._builder, self._engine, self._settings = builder, builder.engine, settings
        self._totals: EngineTotals | None = None
        self._answers = 0
        self._lock = threading.Lock()

    def _count(self, record: StepRecord) -> None:
        if self._totals is None:
            self._totals = EngineTotals(*record.drafted.shape)
        self._totals.add(record)

    def _read(self, index: int, text: Input, asked: Options) -> Iterator[GenerationRequest]:
        """Requests of the answers to one input."""
        options = replace(asked.options(asked.logprobs), prompt=index)
        template = self._builder.template
        call = Call(
            id=f"{index}.0",
            prompt=template.render(text) if isinstance(text, str) else tuple(text),
            templated=False,
            max_tokens=asked.max_tokens,
            stop=asked.stops,
            draft=asked.draft,
            options=options,
        )
        try:
            first = self._builder.request(call)
        except ValueError as error:
            field = error.field if isinstance(error, FieldError) else call.prompt_field
            raise FieldError(field, f"input {index}: {error}") from error
        yield first
        for choice in range(1, asked.n or 1):
            sampling = replace(first.sampling, choice=choice)
            yield replace(first, id=f"{index}.{choice}", sampling=sampling)

    def _completion(self, result: GenerationResult, asked: Options) -> Completion:
        self._answers += 1
        index, _, choice = result.id.partition(".")
        logprobs: tuple[TokenText, ...] = ()
        if asked.logprobs is not None:
            logprobs = TokenTexts(self.tokenizer, self.tokenizer.eos_ids).of(result.logprobs)
        return Completion(
            index=int(index),
            choice=int(choice),
            text=result.text,
            tokens=result.tokens,
            finish_reason=result.finish_reason,
            prompt_tokens=result.prompt_tokens,
            steps=result.acceptance.steps,
            drafted=sum(result.acceptance.drafted),
            accepted=sum(result.acceptance.accepted),
            seconds=result.timings.total,
            logprobs=logprobs,
            error=result.error,
        )

    def _stream(self, request: GenerationRequest) -> Iterator[str]:
        with self._running():
            self._engine.submit(request)
            while True:
                for delta in self._engine.step():
                    if delta.text:
                        yield delta.text
                    if delta.result:
                        self._answers += 1
                        if delta.result.error:
                            raise ServiceError(f"the answer broke off: {delta.result.error}")
                        return

    @contextmanager
    def _running(self) -> Iterator[None]:
        """One call at a time; whatever ends it, the engine is free for the next one."""
        if not self._lock.acquire(blocking=False):
            raise RuntimeError(
                "another call of this LLM is running; wait for it, or close its stream"
            )
        try:
            yield
        finally:
            self._engine.cancel_all()
            self._lock.release()


def _parsed(options: Mapping[str, Any]) -> Options:
    """Raises FieldError: an option is unknown or of the wrong kind."""
    given = dict(options)
    if isinstance(biases := given.get("logit_bias"), Mapping):  # JSON has no other keys
        given["logit_bias"] = {str(token): bias for token, bias in biases.items()}
    try:
        return Options.model_validate(given, strict=False)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        context = fault.get("ctx", {})
        if fault["type"] == UNKNOWN:
            name, nearest = context["field"], context["nearest"]
            way_out = f"did you mean {nearest}?" if nearest else "leave it out"
            raise FieldError(name, f"unknown option {name}; {way_out}") from None
        name = str(fault["loc"][0]) if fault["loc"] else "options"
        raise FieldError(name, f"{name} is {fault['input']!r:.80}: {fault['msg']}") from None


def _listed(inputs: Input | Iterable[Input]) -> list[Input]:
    """Several inputs; a list of numbers is the token ids of one prompt."""
    if isinstance(inputs, str):
        return [inputs]
    listed = list(inputs)
    ids = [int(item) for item in listed if isinstance(item, Integral)]
    if not ids:
        return [item if isinstance(item, str) else list(item) for item in listed]  # type: ignore[arg-type]
    if len(ids) < len(listed):
        raise FieldError("inputs", "inputs mix token ids with other inputs; give one kind")
    return [ids]


def _name_of(model: str | Path) -> str:
    """A task's name, from the last part of the model's."""
    name = re.sub(r"[^a-zA-Z0-9._-]+", "-", Path(model).expanduser().name).lstrip("._-")
    return name[:64] or "model"


def _place(folder: str | Path) -> str:
    """A folder's whole path; a hub name as it is."""
    path = Path(folder).expanduser()
    return str(path.resolve()) if path.is_dir() else str(folder)


@contextmanager
def _interrupts() -> Iterator[threading.Event]:
    """Set by Ctrl-C in the block, so that no step is cut in two. The second Ctrl-C raises.

    Handlers that are not Python's own stay, and other threads get no signals.
    """
    pressed = threading.Event()
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield pressed
        return

    def press(number: int, frame: object) -> None:
        pressed.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    signal.signal(signal.SIGINT, press)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def _progress(show: bool, total: int) -> Iterator[Progress | None]:
    if not show:
        yield None
        return
    with Progress("answers", total) as bar:
        yield bar
