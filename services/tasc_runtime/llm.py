"""`LLM`: a model, its adapters and its task's corpus behind one call, in this process.

`LLM` runs the engine, sampling, guides and drafts of the service, without Ray, Redis or HTTP.
"""

import json
import os
import re
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import partial
from inspect import getfullargspec
from numbers import Integral
from pathlib import Path
from shlex import quote
from typing import Any, Self, TypeVar

import numpy as np
import torch
from msgspec import structs
from numpy.typing import NDArray
from pydantic import ValidationError

from tasc_draft import SOURCES, DraftIndex, DraftSettings
from tasc_engine import (
    EngineTotals,
    FinishReason,
    GenerationResult,
    GuideSpec,
    Request,
    StepRecord,
)
from tasc_engine.batch_engine import BatchEngine
from tasc_engine.model.folder import require_model
from tasc_engine.model.loading import Quantization
from tasc_protocol import FieldError, LabelScores, Scoring, TokenText
from tasc_runtime.data.local_corpus import Corpus, local_index, rows_of
from tasc_runtime.data.saved_task import SavedTask
from tasc_runtime.engine.builder import EngineBuilder
from tasc_runtime.engine.calibration import (
    Calibration,
    Prior,
    Scored,
    calibrated,
    labels_of,
    require_fitting,
)
from tasc_runtime.engine.reader import RequestReader, require_stops
from tasc_runtime.engine_settings import DraftOverrides, EngineSettings, fault_of
from tasc_runtime.errors import FileError, ServiceError
from tasc_runtime.models import chat_template as read_chat
from tasc_runtime.models import dtype_here, template_of, trained_prompt
from tasc_runtime.progress import Progress, note, show_progress
from tasc_runtime.protocol import TokenTexts
from tasc_runtime.sampling_options import (
    UNKNOWN,
    Body,
    ChatFields,
    ChatMessage,
    GenerationFields,
    TemplateFields,
    Top,
    guide_of,
)
from tasc_store import TaskRecord, connect
from tasc_store.indexes import require_own
from tasc_text import (
    ChatTemplate,
    Conversation,
    PromptTemplate,
    TaskTokenizer,
    resolve_folder,
)
from tasc_text.template import FIELD

_PROGRESS_ROWS = 100  # calls with at least this many answers show their progress
# Fields of HTTP requests that are not options here, and the replacement of each.
_INSTEAD = {
    "best_of": "give n",
    "choices": "give guided_choice",
    "schema": "give guided_json",
    "regex": "give guided_regex",
    "echo": "put the prompt in front yourself, as in text + answer.text",
    "max_completion_tokens": "give max_tokens",
    "max_output_tokens": "give max_tokens",
    "messages": "give the messages to LLM.chat as its first argument",
    "model": "the LLM itself is the model; make one for each model",
    "prompt": "give the prompt as the first argument",
    "stream": "call LLM.stream",
    "timeout": "a call ends with its last answer or Ctrl-C",
    "top_logprobs": "give the number as logprobs",
}

Input = str | Sequence[int]
_Fields = TypeVar("_Fields", bound=Body)


class Options(GenerationFields):
    """Keyword arguments of `LLM.generate`, which are named like the fields of HTTP requests."""

    logprobs: Top | None = None


class ChatOptions(TemplateFields, Options):
    """Keyword arguments of `LLM.chat`."""


@dataclass(frozen=True)
class Completion:
    """One answer.

    Attributes:
        index: Position of the input in the call, from 0.
        choice: Index among the ``n`` answers to that input, from 0.
        text: The answer, without end-of-sequence and cut before a stop string.
        tokens: Token ids, including end-of-sequence if the model ended the answer.
        finish_reason: ``stop`` (end-of-sequence, a stop string or the end of a guide), ``length``
            (``max_tokens``) or ``error``.
        prompt_tokens: Number of tokens of the prompt.
        steps: Number of forward passes of the model for this answer.
        drafted: Number of proposed draft tokens.
        accepted: Number of draft tokens that the model accepted.
        seconds: Seconds from arrival in the engine to the last token.
        queued: Seconds of waiting for a row, which are part of ``seconds``.
        logprobs: One entry per token with ``utf8``, ``logprob``, ``offset`` and the likeliest
            tokens ``top``; none for the end-of-sequence, and empty unless ``logprobs`` was given.
        error: Why the answer broke off, if ``finish_reason`` is ``error``.
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
    queued: float
    logprobs: tuple[TokenText, ...] = ()
    error: str | None = None

    @property
    def acceptance(self) -> float:
        """Accepted draft tokens / proposed draft tokens; 0 if nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0


class Completions(list[Completion]):
    """A list of answers in the order of their inputs, ``n`` for each input.

    Attributes:
        interrupted: Whether Ctrl-C ended the call. The list then lacks incomplete answers, even in
            the middle. `Completion.index` gives the input of each answer.
    """

    interrupted = False


@dataclass(frozen=True)
class Classification:
    """The labels of one input, with their probabilities.

    Attributes:
        index: Position of the input in the call, from 0.
        label: The most likely label; None if scoring failed, or its probability is below
            ``abstain_below``.
        probability: Its probability among all labels.
        probabilities: The probability of each label that was scored, the most likely first. They
            sum to 1. The true probabilities differ from them by at most ``unseen_mass``.
        unseen_mass: Upper limit of the share of the labels that were not scored; 0 with ``exact``.
        prompt_tokens: Number of tokens of the prompt.
        steps: Number of forward passes of the model for this input, after which logits were read.
        seconds: Seconds from arrival in the engine to the last forward.
        queued: Seconds of waiting for a row, which are part of ``seconds``.
        error: Why scoring failed.
    """

    index: int
    label: str | None
    probability: float
    probabilities: Mapping[str, float]
    unseen_mass: float
    prompt_tokens: int
    steps: int
    seconds: float
    queued: float
    error: str | None = None

    @property
    def margin(self) -> float:
        """The probability of the label minus that of the second label."""
        first, second, *_ = (*self.probabilities.values(), 0.0, 0.0)
        return first - second


class Classifications(list[Classification]):
    """A list of classifications in the order of their inputs; see `Completions`."""

    interrupted = False


@dataclass(frozen=True)
class Summary:
    """The work of an `LLM` since it was created.

    Attributes:
        tokens: Number of emitted tokens, including ends of sequence.
        steps: Number of forward passes of rows that could emit.
        forced: Number of tokens that needed no forward pass, because a guide allowed no other.
        acceptance_by_position: Accepted draft tokens at position i / drafts that reach i.
        accepted_by_source: Number of accepted draft tokens by the source that proposed them.
        draft_seconds: Time to make drafts.
        verify_seconds: Time of the target's forwards.
    """

    answers: int
    tokens: int
    steps: int
    forced: int
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

    @property
    def plain_steps(self) -> int:
        """Number of forward passes that the same answers take without drafts."""
        return self.tokens - self.forced

    def __str__(self) -> str:
        answers = max(self.answers, 1)
        sources = ", ".join(f"{name} {count:,}" for name, count in self.accepted_by_source.items())
        by_position = " ".join(f"{share:.2f}" for share in self.acceptance_by_position[:8])
        return (
            f"{self.answers:,} answers, {self.tokens:,} tokens in {self.steps:,} forward passes: "
            f"{self.steps / answers:.2f} an answer; without drafts {self.plain_steps / answers:.2f}"
            f"{f'; guides forced {self.forced:,} tokens' if self.forced else ''}\n"
            f"accepted {self.accepted:,} of {self.drafted:,} draft tokens: {sources or 'none'}\n"
            f"acceptance by position: {by_position or 'nothing was drafted'}\n"
            f"{self.verify_seconds:.2f} s verifying, {self.draft_seconds:.2f} s drafting"
        )


class LLM:
    r"""Answers inputs with a causal LM in this process, several tokens per forward pass.

    Give it a model that was fine-tuned for one task, and rows of that task. N-grams of the rows
    propose tokens (drafts), and the model verifies many of them at once. Drafts change the speed,
    but never the answer. No server, Redis or Ray is needed.

    ```python
    from tasc_serve import LLM

    llm = LLM("./my-model", adapter="./my-lora", corpus="train.jsonl", template="label: {input}\n")
    for answer in llm.generate(["wake me up at nine", "play some jazz"], max_tokens=64):
        print(answer.text)
    print(llm.summary())  # what drafting gained
    ```

    Each line of ``train.jsonl`` is an object such as ``{"input": "wake me up", "output":
    "alarm_set"}``. Without a corpus, drafts come from the prompt and from earlier answers.

    Compared with vLLM:

    - The fields of ``SamplingParams`` are keyword arguments: ``llm.generate(texts, temperature=0.8,
      max_tokens=64)``. The defaults are temperature 0, which takes the likeliest token, and the
      ``max_tokens`` of this object, 256.
    - An input is put into ``template``, which should be the prompt that the model was fine-tuned
      with. The default is the prompt that ``tasc finetune`` keeps in its models' folders; for other
      models, including hub models, the prompt is the input itself. `generate` and `chat` use
      a chat template only if ``chat_template`` is given, or the model was fine-tuned with one.
    - `generate` returns one flat list of `Completion`: ``answer.text`` replaces
      ``output.outputs[0].text``.
    - Weights have ``dtype``, float32 by default. A prompt and its answer have up to 1024 tokens
      together, unless ``max_model_len`` is larger.
    - Any thread may call an `LLM`, but a call is refused while another one runs. Give many inputs
      to one call, which decodes up to ``rows`` inputs together.

    The first start with a model on a machine measures for up to 15 seconds how long forward passes
    take, so that drafts are made only where they pay. Later starts read the times from a file. With
    ``cost_aware=False``, nothing is measured, and drafts are always made.

    Args:
        model: Folder or hub name of a Hugging Face causal LM with weights in safetensors.
        adapter: Folder or hub name of a PEFT LoRA adapter that is merged into the model.
        adapters: Names and folders of LoRA adapters. Each call uses one of them
            (``adapter=name``), by default the first one.
        corpus: Rows of the task: JSONL or Parquet files with fields ``input`` and ``output``, a
            table (pandas, Polars, Arrow, ``datasets.Dataset``) with these columns, objects with
            these fields, or pairs of input and output. Values that are not texts become JSON, and
            ``messages`` are read too. The index is built once for the same content and kept in
            ``cache_dir``.
        revision: Branch, tag or commit of a model on the hub.
        template: The prompt, with ``{input}`` once; unset: see above.
        chat_template: Instead of ``template``: ``auto`` for the model's own chat template, a file
            with a template, or the text of a template. An input is then the user message of a
            conversation.
        system_prompt: System prompt for conversations without one; needs a chat template. Unset:
            the system prompt of the fine-tune, if any. An empty text: no system prompt.
        few_shot: Example inputs and answers for every prompt, in any form of a corpus, such as
            pairs or a JSONL file; needs a chat template. Unset: the examples of the fine-tune, if
            any. An empty list: no examples.
        allow_special_tokens_in_input: Whether spellings of special tokens, such as ``<|im_end|>``,
            become these tokens in texts that are put into a template; else they are ordinary text.
            With the template ``{input}``, an input is a whole prompt and may always spell them.
        stop: A string that ends an answer, or several.
        max_tokens: Maximum number of tokens of an answer, unless a call sets another.
        choices: Labels; the answer is one of them. Only one of choices, schema and regex may be
            set.
        schema: JSON schema that every answer fits.
        regex: Regular expression that every whole answer matches.
        dtype: float32, bfloat16, float16 or float64; ``auto`` is the fastest one of this machine,
            which `save` keeps.
        quantization: nf4 or int8, by bitsandbytes; or int8-dynamic, exact int8 products on a CPU,
            or int8-dynamic-float-head, the same with a float32 LM head.
        draft: How drafts are made, such as ``tasc_draft.DraftSettings(num_speculative_tokens=8)``.
        cache_dir: Folder of indexes; unset: ``tasc-serve/local-indexes`` in
            ``XDG_CACHE_HOME``, by default ``~/.cache``.
        engine: Fields of ``tasc_runtime.engine_settings.EngineSettings``: ``rows`` decoded together
            (8), ``max_model_len``, the maximum number of tokens of prompt and answer (up to 1024),
            ``device`` (``auto``: a GPU if there is one), ``torch_threads`` (1), the number of CPU
            threads of torch in this whole process, ``cost_aware``, ``backend`` (``vllm`` answers by
            vLLM, where it is installed) and others.

    Raises:
        EngineError: The model cannot be decoded exactly, or the adapter is for another model.
        FileError: A file of the corpus cannot be read, or one of its lines is not a row.
        ServiceError: A chat template is used, but transformers cannot read the tokenizer.
        TextError: Model, adapter, tokenizer or chat template cannot be found, read or used.
        TypeError: The corpus is none of the kinds above.
        ValueError: A value is of the wrong kind or outside its range, or the device does not exist.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        adapter: str | Path | None = None,
        adapters: Mapping[str, str | Path] | None = None,
        corpus: Corpus | None = None,
        revision: str | None = None,
        template: str | None = None,
        chat_template: str | Path | None = None,
        system_prompt: str | None = None,
        few_shot: Corpus | None = None,
        allow_special_tokens_in_input: bool = False,
        stop: str | Sequence[str] = (),
        max_tokens: int = TaskRecord.max_tokens,
        choices: Sequence[str] | None = None,
        schema: Mapping[str, Any] | None = None,
        regex: str | None = None,
        dtype: str = TaskRecord.dtype,
        quantization: Quantization | None = None,
        draft: DraftSettings | None = None,
        cache_dir: str | Path | None = None,
        **engine: Any,
    ) -> None:
        settings = settings_of(engine, getfullargspec(LLM).kwonlyargs)
        _require("draft", draft, DraftSettings | None, "a DraftSettings")
        _require("adapters", adapters, Mapping | None, "names, and a folder for each")
        if isinstance(choices, str | Path):
            raise ValueError(
                f"choices is {str(choices)!r:.80}; give a list of labels, as in "
                "Path('labels.txt').read_text('utf-8-sig').splitlines() for one label per line"
            )
        if isinstance(choices, Sequence) and not choices:
            raise ValueError("choices is empty; give at least one label, or leave it out")
        home = resolve_folder(str(model), revision, weights=False)
        if settings.backend == "tasc":  # vLLM reads more
            require_model(home)
        tokenizer, shots = TaskTokenizer.from_folder(home), _shots(few_shot)
        trained = trained_prompt(adapter, model) if template is None else None
        chat = trained if isinstance(trained, ChatTemplate) else None
        if chat_template is not None:
            own = read_chat(home, str(chat_template))
            chat = replace(chat or own, source=own.source, tokens=own.tokens)
        if chat is not None:
            system = chat.system if system_prompt is None else system_prompt or None
            chat = replace(chat, system=system, shots=chat.shots if shots is None else shots)
        elif system_prompt or shots:
            raise ValueError("system_prompt and few_shot need a chat template; give chat_template")
        if template is None:
            own_text = chat is None and isinstance(trained, PromptTemplate) and trained.text
            template = own_text or FIELD
        record = TaskRecord(
            name=_name_of(model),
            model=_place(model),
            fingerprint=tokenizer.fingerprint,
            template=template,
            revision=revision,
            adapter=None if adapter is None else _place(adapter),
            adapters=tuple((name, _place(place)) for name, place in (adapters or {}).items()),
            dtype=dtype_here(dtype, quantization, settings.device),
            stop=_tupled(stop),
            max_tokens=max_tokens,
            draft=draft or DraftSettings(),
            quantization=quantization,
            choices=() if choices is None else _tupled(choices),
            schema=None if schema is None else json.dumps(schema),
            regex=regex,
            chat=chat,
            allow_special_tokens_in_input=allow_special_tokens_in_input,
        )
        require_stops(tokenizer, record.stop)
        index = None
        if corpus is not None:
            rows = list(rows_of(corpus))
            prompts = template_of(record)
            folder = None if cache_dir is None else Path(cache_dir).expanduser()
            index = local_index(rows, tokenizer, prompts, record.draft, folder)
        self._open(settings, partial(EngineBuilder, record, 1, tokenizer=tokenizer, index=index))

    @classmethod
    def _of(cls, settings: EngineSettings, build: Callable[..., EngineBuilder]) -> Self:
        llm = cls.__new__(cls)
        llm._open(settings, build)
        return llm

    def _open(self, settings: EngineSettings, build: Callable[..., EngineBuilder]) -> None:
        """Builds the engine. All constructors call this method.

        Args:
            build: A constructor of `EngineBuilder` that still needs the settings and
                `BuilderOptions`.
        """
        self._totals: EngineTotals | None = None
        self._answers = 0
        self._lock = threading.Lock()
        gpus = float(torch.cuda.device_count())
        self._builder = build(settings, gpus=gpus, on_step=self._count, say=note)
        self._engine, self._settings = self._builder.engine, settings

    @classmethod
    def load(cls, folder: str | Path, **engine: Any) -> Self:
        """Opens a folder that `save` wrote, such as ``LLM.load("./ticket-task")``.

        Args:
            engine: Fields of `EngineSettings` that replace the saved ones.

        Raises:
            ServiceError: The folder was not written by `save` of this version, or is damaged; the
                task drafts from a ranking, which only a store has; or the model has another
                tokenizer now.
            EngineError, TextError, ValueError: See the class.
        """
        saved = SavedTask.read(folder)
        if saved.record.neural and saved.record.neural.is_ranked:
            raise ServiceError(
                f"the task in {folder} drafts from a ranked vocabulary, which is in its store; "
                f"`tasc task create NAME --from {quote(str(folder))}` registers it, and then "
                "LLM.from_task opens it"
            )
        settings = settings_of({**saved.engine.model_dump(), **engine})
        return cls._of(settings, partial(EngineBuilder, saved.record, 1, index=saved.index))

    @classmethod
    def from_task(
        cls,
        task: str,
        redis_url: str | None = None,
        *,
        version: int | None = None,
        draft: DraftOverrides | None = None,
        **engine: Any,
    ) -> Self:
        """Opens a task that `tasc task create` registered, with its current index.

        Args:
            redis_url: The store; unset: ``REDIS_URL`` of the environment.
            version: Version of the task's record; unset: the newest.
            draft: A ``tasc_runtime.engine_settings.DraftOverrides``, whose values replace the
                task's own drafting settings.
            engine: Fields of `EngineSettings`.

        Raises:
            ServiceError: No store is named, or model, task and index have different tokenizers.
            StoreError: Redis fails, or there is no such task or version.
            EngineError, TextError, ValueError: See the class.
        """
        _require("draft", draft, DraftOverrides | None, "a DraftOverrides")
        url = redis_url or os.environ.get("REDIS_URL")
        if not url:
            raise ServiceError("no store is named; give redis_url, or set REDIS_URL")
        settings = settings_of(engine)
        with connect(url) as client:
            build = partial(EngineBuilder.of_task, client, task, version=version, draft=draft)
            return cls._of(settings, build)

    def save(self, folder: str | Path) -> None:
        """Writes the task, the engine's settings and the draft index to a folder.

        `load` opens the folder, and ``tasc task create NAME --from FOLDER`` registers the task with
        its index, so that ``tasc serve`` can serve it. The folder names the model, but has no copy:
        both uses need the model at the same path or on the hub. Rows of the corpus are not in the
        folder.

        Raises:
            OSError: The folder cannot be written.
        """
        record, index = self.record, self.index
        if index.settings:  # an index's settings take precedence over the record's
            index = replace(index, settings=record.draft)
        SavedTask(record, self._settings, index).write(folder)

    def generate(
        self, inputs: Input | Iterable[Input], *, progress: bool | None = None, **options: Any
    ) -> Completions:
        """Answers inputs, in their order.

        All inputs are checked before the first one is answered. Ctrl-C ends the call and returns
        the answers that are complete. The list is then shorter than the inputs, and its attribute
        ``interrupted`` is true: check it before you pair inputs and answers by position.

        ```python
        llm.generate("play some jazz")[0].text
        llm.generate(texts, guided_choice=["alarm", "music"])  # each answer is one of these
        llm.generate(texts, temperature=0.8, top_p=0.95, seed=7, n=3)  # three for each text
        ```

        Args:
            inputs: One input or several: texts that are put into the template, or token ids of
                whole prompts.
            progress: Whether to show progress on stderr; unset: from 100 answers on.
            options: Options with the names and meanings of HTTP request fields.
                Length: ``max_tokens``, ``min_tokens``, ``stop`` (a string or a list),
                ``include_stop_str_in_output``, ``stop_token_ids``, ``ignore_eos``,
                ``truncate_prompt_tokens`` (number of last prompt tokens to keep),
                ``add_special_tokens`` (whether the tokenizer adds special tokens to a text prompt).
                Sampling: ``temperature`` (0: greedy), ``top_p``, ``top_k``, ``min_p``, ``seed``,
                ``presence_penalty``, ``frequency_penalty``, ``repetition_penalty``, ``logit_bias``.
                Form: ``guided_choice``, ``guided_regex``, ``guided_json``, ``guided_grammar``,
                ``guided_whitespace_pattern``, ``structured_outputs`` (as vLLM has it),
                ``response_format``. None for a ``guided_`` field or ``structured_outputs`` drops
                the task's own choices, schema or regex.
                Others: ``n`` answers to each input, ``logprobs`` (how many of the likeliest tokens
                    to return), ``adapter`` (a name), ``draft`` (False: plain decoding).

        Returns:
            A list of `Completion`, ``n`` for each input: ``text``, ``tokens``, ``finish_reason``,
            ``logprobs``, and the numbers of ``drafted`` and ``accepted`` tokens and of ``steps``.
            An answer that broke off has an ``error``, and does not end the call.

        Raises:
            FieldError: An option is unknown or cannot be met, or an input is not a text, has no
                tokens, is too long, or has ids that the model does not have. The message names the
                option or the input. FieldError is a ValueError.
            RuntimeError: Another call is running.
            KeyboardInterrupt: Ctrl-C was pressed twice.
        """
        return self._answered(_listed(inputs), parsed(Options, options), progress)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        *,
        progress: bool | None = None,
        **options: Any,
    ) -> Completions:
        """Answers conversations, in their order; all are checked before the first is answered.

        ```python
        llm = LLM("./my-chat-model", chat_template="auto", system_prompt="Label the ticket.")
        llm.chat([{"role": "user", "content": "my card is gone"}])[0].text
        ```

        Without a chat template, the last user message is the input; other messages are not used.

        Args:
            messages: One conversation or several, each a list of messages with ``role`` (system,
                developer, user or assistant) and ``content``.
            progress: See `generate`.
            options: The options of `generate`, ``add_generation_prompt``, ``chat_template_kwargs``,
                ``reasoning_effort``, and ``strict_messages`` to refuse messages that are not used.

        Raises:
            FieldError: See `generate`; also if a message cannot be used, or the template refuses
                the conversation.
            KeyboardInterrupt, RuntimeError: See `generate`.
        """
        asked = parsed(ChatOptions, options)
        given = enumerate(_conversations(messages))
        talks = [asked.conversation_of(_messages(i, each)) for i, each in given]
        return self._answered(talks, asked, progress)

    def classify(
        self,
        inputs: Input | Iterable[Input],
        labels: Sequence[str] | None = None,
        *,
        end: str | None = None,
        exact: bool = False,
        tolerance: float = Scoring.tolerance,
        max_steps: int = Scoring.max_steps,
        abstain_below: float | None = None,
        abstain_label: str | None = None,
        prior: Prior = "uniform",
        multi: bool = False,
        adapter: str | None = None,
        truncate_prompt_tokens: int | None = None,
        progress: bool | None = None,
    ) -> Classifications:
        """Returns the probabilities of labels for inputs, in their order.

        The probability of a label is the probability that the model answers with its tokens, as the
        tokenizer encodes them, and then ends; divided by the sum for all labels. The model's
        likeliest prefixes of labels are looked at first, until labels that were not looked at have
        a share of at most ``tolerance``.

        ```python
        (found,) = llm.classify("wake me up at nine", ["alarm", "music", "news"])
        found.label, found.probability
        ```

        Args:
            inputs: See `generate`.
            labels: The labels; unset: the task's ``choices``.
            end: The text behind each label, for models whose answers go on there. Unset: a label
                ends with an end of sequence. Empty: only the label's own tokens count.
            exact: Whether every label is scored.
            tolerance: Without ``exact``, the share of all labels that may be left out.
            max_steps: Without ``exact``, the maximum number of forward passes for one input, after
                which ``unseen_mass`` may exceed ``tolerance``.
            abstain_below: The probability of the likeliest label below which there is no label.
            abstain_label: The label in place of none.
            prior: With ``empty``, probabilities are divided by those that the model gives for an
                empty input, and a fitted calibration is not used. This helps models that were not
                fine-tuned, which prefer some labels whatever the input is (contextual calibration:
                Zhao et al. 2021, arXiv 2102.09690). Each call scores every label of the empty input
                once; `calibrate` with a prior keeps the result.
            multi: Several labels at once are refused; see the error.
            adapter: The name of an adapter.
            truncate_prompt_tokens: Number of last prompt tokens to keep; -1: as many as there is
                room for.
            progress: See `generate`.

        Returns:
            A list of `Classification`, one for each input. An input that failed has an ``error``.

        Raises:
            FieldError: Labels are missing, empty, equal in their tokens, or too many or too long; a
                value is out of its range; or see `generate`.
            KeyboardInterrupt, RuntimeError: See `generate`.
        """
        if multi:
            raise FieldError(
                "multi",
                "multi is set, but the labels of a set exclude each other: their probabilities sum "
                'to 1. Call classify with labels such as ["yes", "no"] once for each label, with '
                "prompts that ask for it; or let a model generate the list of labels",
            )
        guide = None if labels is None else label_guide(labels)
        texts = _listed(inputs)
        how = Scoring(end, exact, tolerance, max_steps, abstain_below, abstain_label=abstain_label)
        shared = Request(
            guide=guide,
            scoring=how,
            adapter=adapter,
            truncate_prompt_tokens=truncate_prompt_tokens,
        )
        classified = Classifications()
        try:
            base = self._prior(prior, shared)
        except KeyboardInterrupt:
            classified.interrupted = True
            return classified
        if base is not None:
            how = replace(how, biases=tuple((-base).tolist()))
            shared = structs.replace(shared, scoring=how)
        requests = [self._request(i, given, shared) for i, given in enumerate(texts)]
        found = self._run(requests, "classified", progress)
        classified += map(_classification, found.in_order)
        classified.interrupted = found.interrupted
        return classified

    def _prior(self, prior: Prior, shared: Request) -> NDArray[np.float64] | None:
        """Returns ``float64[labels]``, log-probabilities behind an empty input; None if uniform.

        Raises:
            FieldError: The prior is unknown, or the empty input cannot be scored.
        """
        if prior == "uniform":
            return None
        if prior != "empty":
            raise FieldError("prior", f"prior is {prior!r:.80}; it is uniform or empty")
        end = shared.scoring.end if shared.scoring else None
        asked = structs.replace(shared, scoring=Scoring(end, exact=True))
        try:
            (result,) = self._run([self._request(0, "", asked)], "prior", False).in_order or (None,)
        except FieldError as error:
            reason = str(error).rpartition(": ")[2]
            message = f"prior is empty, and an empty input cannot be scored: {reason}"
            raise FieldError("prior", message) from error
        if result is None:
            raise KeyboardInterrupt
        if result.scores is None:
            raise FieldError("prior", f"prior is empty: {result.error}")
        found = np.empty(result.scores.count)
        found[list(result.scores.numbers)] = result.scores.logprobs
        if np.isneginf(found).any():
            message = f"prior is empty, and {result.scores.labels[-1]!r:.80} is impossible there"
            raise FieldError("prior", f"{message}; leave the label out, or use prior uniform")
        return found

    def calibrate(
        self,
        rows: Corpus,
        *,
        end: str | None = None,
        prior: Prior = "uniform",
        progress: bool | None = None,
    ) -> Calibration:
        """Fits a temperature, so that probabilities of the task's choices can be trusted.

        From now on, `classify` without ``labels`` divides log-probabilities by the temperature, and
        `save` keeps it. It is only for this model, adapter, dtype, prompt and these choices. Biases
        of the choices are fitted, too, if they help rows that were not fitted on.

        ```python
        llm = LLM("./my-model", choices=["alarm", "music", "news"])
        print(llm.calibrate("held-out.jsonl").after.error)
        ```

        Args:
            rows: Rows that the model was not trained with, in any form of a corpus. Each output is
                one of the choices, or begins with a choice and ``end``.
            end: See `classify`; the task keeps it.
            prior: See `classify`; the task keeps it as biases.
            progress: See `generate`.

        Raises:
            FieldError: The task has no choices, an output is none of them, or see ``prior``.
            ValueError: There are too few rows, a row cannot be scored, or the rows do not determine
                a temperature.
            KeyboardInterrupt: Ctrl-C was pressed; nothing changes.
        """
        end = self.record.label_end if end is None else end
        record = replace(self.record, label_end=end, label_temperature=None)
        if not record.choices:
            raise FieldError("labels", "the task has no choices to calibrate; give choices")
        listed = list(rows_of(rows))
        labels = labels_of([row.output for row in listed], record.choices, end)
        require_fitting(len(listed), len(record.choices))
        # Every label is scored, since a fit without the right label would trust wrong ones.
        how = Scoring(end, exact=True)
        shared = Request(scoring=how)
        base = self._prior(prior, shared)
        requests = [self._request(i, row.input, shared) for i, row in enumerate(listed)]
        found = self._run(requests, "scored", progress)
        if found.interrupted:
            raise KeyboardInterrupt
        scores = list[LabelScores]()
        for at, result in enumerate(found.in_order):
            if result.scores is None:
                raise ValueError(f"row {at} cannot be scored: {result.error}; leave it out")
            scores.append(result.scores)
        fit = calibrated(Scored.of(scores, labels), base)
        record = replace(
            record,
            label_temperature=fit.temperature,
            label_biases=fit.biases,
            calibrated_for=record.scoring_fingerprint,
        )
        with self._running():
            self._builder.take(record, self._builder.record_version + 1)
        return fit

    def _answered(
        self, inputs: Sequence[Input | Conversation], asked: Options, progress: bool | None
    ) -> Completions:
        requests = list(self._requests(inputs, asked))
        found = self._run(requests, "answers", progress)
        answers = Completions(self._completion(result, asked) for result in found.in_order)
        answers.interrupted = found.interrupted
        return answers

    def _run(self, requests: Sequence[Request], name: str, progress: bool | None) -> "_Found":
        """Answers requests until Ctrl-C; progress is shown under ``name``."""
        found = _Found([request.id for request in requests])
        show = len(requests) >= _PROGRESS_ROWS if progress is None else progress
        shown: Progress | nullcontext[None] = (
            show_progress(name, len(requests)) if show else nullcontext()
        )
        with self._running(), _interrupts() as interrupted, shown as bar:
            drafted = accepted = 0
            for result in self._engine.generate(requests, interrupted.is_set):
                found.results[result.id] = result
                self._answers += result.scores is None
                drafted += sum(result.acceptance.drafted)
                accepted += sum(result.acceptance.accepted)
                if bar:
                    bar.advance()
                    if drafted:
                        bar.set_suffix(f"acceptance {accepted / drafted:.2f}")
            found.interrupted = interrupted.is_set()
            if bar and found.interrupted:
                count = f"{len(found.results)} of {len(requests)}"
                bar.set_suffix(f"interrupted: the list has {count} answers")
        return found

    def stream(self, text: Input, **options: Any) -> Iterator[str]:
        """Yields the answer to one input, piece by piece. Closing the iterator ends the answer.

        ```python
        for piece in llm.stream("play some jazz", max_tokens=64):
            print(piece, end="", flush=True)
        ```

        Args:
            options: The options of `generate`, except ``n``.

        Raises:
            FieldError: See `generate`.
            RuntimeError: Another call is running; raised at the first piece.
            ServiceError: The answer broke off.
            KeyboardInterrupt: Ctrl-C was pressed; the answer ends.
        """
        asked = parsed(Options, options)
        if asked.n not in (None, 1):
            raise FieldError("n", f"n is {asked.n}; a stream has one answer")
        if len(inputs := _listed(text)) != 1:
            raise FieldError("inputs", f"{len(inputs)} inputs are given; a stream has one")
        (request,) = self._requests(inputs, asked)
        return self._stream(structs.replace(request, stream=True))

    def summary(self) -> Summary:
        """Returns counts of the work so far and the gain of drafting, for printing."""
        totals = self._totals or EngineTotals(len(SOURCES), 1)
        by_source = zip(SOURCES, totals.accepted.sum(1).tolist(), strict=True)
        return Summary(
            answers=self._answers,
            tokens=totals.emitted_tokens,
            steps=totals.row_steps,
            forced=totals.forced_tokens,
            drafted=int(totals.drafted.sum()),
            accepted=int(totals.accepted.sum()),
            acceptance_by_position=tuple(totals.acceptance_by_position()),
            accepted_by_source={name: count for name, count in by_source if count},
            draft_seconds=totals.draft_seconds,
            verify_seconds=totals.verify_seconds,
        )

    @property
    def record(self) -> TaskRecord:
        """The task as `tasc task create` would register it, with the current draft settings."""
        return replace(self._builder.record, draft=self._builder.proposer.settings)

    @property
    def tokenizer(self) -> TaskTokenizer:
        """The model's tokenizer; ``encode_prompt`` returns the token ids of a whole prompt."""
        return self._builder.tokenizer

    @property
    def engine(self) -> BatchEngine:
        """The engine, for measurements of its steps and for direct requests.

        Requests submitted to the engine are dropped when a call of this `LLM` begins.
        """
        return self._engine

    @property
    def reader(self) -> RequestReader:
        """Fills in the task's values in requests for the engine, and checks them."""
        return self._builder.reader

    @property
    def index(self) -> DraftIndex:
        """The index to draft from, in addition to prompts and answers; empty without a corpus."""
        return self._builder.proposer.index

    def draft_from(self, index: DraftIndex | None, settings: DraftSettings | None = None) -> None:
        """Drafts from another index from now on, and forgets what was learnt from past answers.

        `summary` counts from 0 again.

        Args:
            index: The index; None to draft only from prompts and answers.
            settings: How drafts are made; unset: the settings of the index or the task.

        Raises:
            IndexRefused: The index is for another tokenizer.
            RuntimeError: A call is running.
            ValueError: These settings do not fit this index, or a value is of the wrong kind.
        """
        _require("index", index, DraftIndex | None, "a DraftIndex, or None")
        _require("settings", settings, DraftSettings | None, "a DraftSettings")
        if index:
            require_own(index, self.tokenizer, "the index", "build it with the model's tokenizer")
        with self._running():
            self._builder.draft_from(index, settings)
            self._totals, self._answers = None, 0

    def _count(self, record: StepRecord) -> None:
        if self._totals is None:
            self._totals = EngineTotals(*record.drafted.shape)
        self._totals.add(record)

    def _requests(
        self, inputs: Sequence[Input | Conversation], asked: Options
    ) -> Iterator[Request]:
        """Makes the requests for all inputs; their shared guide is compiled once."""
        builder, shared = self._builder, asked.request(asked.logprobs)
        shared = structs.replace(
            shared, guide=shared.guided_by(guide_of(builder.record)), max_tokens=asked.max_tokens
        )
        for index, given in enumerate(inputs):
            first = self._request(index, given, shared)
            yield first
            for choice in range(1, asked.n or 1):
                yield structs.replace(first, id=f"{index}.{choice}", choice_index=choice)

    def _request(self, index: int, given: Input | Conversation, shared: Request) -> Request:
        """Makes the request for one input; the first one compiles the guide of all."""
        builder = self._builder
        one = structs.replace(shared, id=f"{index}.0", prompt_index=index)
        try:
            if isinstance(given, str | Conversation):
                str(given).encode()  # raises UnicodeEncodeError
                add = shared.add_special_tokens
                ids = tuple(builder.template.encode(self.tokenizer, given, add))
            else:
                ids = tuple(given)
            one = structs.replace(one, prompt=ids)
            made = builder.reader.read(one, one.id, builder.record_version)
            if index == 0:
                builder.reader.guide(made.guide)
        except UnicodeEncodeError as error:
            half = f"input {index} has half of a character (a lone surrogate)"
            way_out = f"at position {error.start}; decode the input with errors='replace'"
            raise FieldError("inputs", f"{half} {way_out}") from error
        except ValueError as error:
            field = getattr(error, "field", one.prompt_field)
            raise FieldError(field, f"input {index}: {error}") from error
        return made

    def _completion(self, result: GenerationResult, asked: Options) -> Completion:
        index, _, choice = result.id.partition(".")
        logprobs: tuple[TokenText, ...] = ()
        if asked.logprobs is not None:
            ends = () if asked.ignore_eos else self.tokenizer.eos_ids
            logprobs = TokenTexts(self.tokenizer, ends).of(result.logprobs)
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
            queued=result.timings.queued,
            logprobs=logprobs,
            error=result.error,
        )

    def _stream(self, request: Request) -> Iterator[str]:
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
        """Allows one call at a time. However a call ends, the engine is free for the next one."""
        if not self._lock.acquire(blocking=False):
            raise RuntimeError(
                "another call of this LLM is running; wait for it, or close its stream"
            )
        try:
            self._engine.cancel_all()
            yield
        finally:
            try:
                self._engine.cancel_all()
            finally:
                self._lock.release()


@dataclass
class _Found:
    """The results of one call.

    Attributes:
        ids: Ids of all requests, in the order of their inputs.
        results: Results so far, by request id.
        interrupted: Whether Ctrl-C ended the call.
    """

    ids: Sequence[str]
    results: dict[str, GenerationResult] = field(default_factory=dict)
    interrupted: bool = False

    @property
    def in_order(self) -> list[GenerationResult]:
        return [self.results[id] for id in self.ids if id in self.results]


def label_guide(labels: Sequence[str]) -> GuideSpec:
    """Makes the guide of a call's own labels; raises FieldError if they cannot be labels."""
    texts = _items("labels", labels, "labels", "a list of texts")
    if wrong := [text for text in texts if not isinstance(text, str)]:
        raise FieldError("labels", f"labels has {wrong[0]!r:.80}; give texts")
    if not texts:
        raise FieldError("labels", "labels is empty; give at least one")
    try:
        return GuideSpec("choice", tuple(texts), field="labels")
    except ValueError as error:
        raise FieldError("labels", f"labels: {error}") from error


def _classification(result: GenerationResult) -> Classification:
    probabilities, unseen = dict[str, float](), 1.0
    if scores := result.scores:
        probabilities = dict(zip(scores.labels, scores.probabilities, strict=True))
        unseen = scores.unseen
    return Classification(
        index=int(result.id.partition(".")[0]),
        label=result.text or None,
        probability=next(iter(probabilities.values()), 0.0),
        probabilities=probabilities,
        unseen_mass=unseen,
        prompt_tokens=result.prompt_tokens,
        steps=result.acceptance.steps,
        seconds=result.timings.total,
        queued=result.timings.queued,
        error=result.error,
    )


def settings_of(engine: Mapping[str, Any], own: Iterable[str] = ()) -> EngineSettings:
    """Makes settings from keywords; ``own`` are the caller's other keywords.

    Raises:
        ValueError: A keyword is unknown, or its value is out of range.
    """
    try:
        return EngineSettings(**engine)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        name = str(fault["loc"][0])
        if fault["type"] != "extra_forbidden":
            raise ValueError(fault_of(error)) from None
        known = [*own, *EngineSettings.model_fields]
        near = get_close_matches(name, known, 1)
        way_out = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
        raise ValueError(f"unknown keyword {name}; {way_out}") from None


def parsed(model: type[_Fields], options: Mapping[str, Any]) -> _Fields:
    """Validates options; raises FieldError if one is unknown or of the wrong kind."""
    given = dict(options)
    if isinstance(biases := given.get("logit_bias"), Mapping):  # JSON has only text keys
        given["logit_bias"] = {str(token): bias for token, bias in biases.items()}
    try:
        return model.model_validate(given, strict=False)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        context = fault.get("ctx", {})
        if fault["type"] == UNKNOWN:
            name, nearest = context["field"], context["nearest"]
            way_out = f"did you mean {nearest}?" if nearest else "help(LLM.generate) lists them"
            if name in _INSTEAD and not fault["loc"]:
                raise FieldError(name, f"{name} is for HTTP requests; {_INSTEAD[name]}") from None
            raise FieldError(name, f"unknown option {name}; {way_out}") from None
        name = str(fault["loc"][0]) if fault["loc"] else "options"
        raise FieldError(name, fault_of(error)) from None


def _shots(few_shot: Corpus | None) -> tuple[tuple[str, str], ...] | None:
    if few_shot is None:
        return None
    try:
        return tuple((row.input, row.output) for row in rows_of(few_shot))
    except (FileError, TypeError, ValueError) as error:
        raise type(error)(f"few_shot: {error}") from error


def _messages(index: int, messages: list[Any]) -> list[ChatMessage]:
    """Validates messages; raises FieldError, see `parsed`, naming the conversation at fault."""
    try:
        return parsed(ChatFields, {"messages": messages}).messages
    except FieldError as error:
        raise FieldError(error.field, f"conversation {index}: {error}") from None


def _listed(inputs: Input | Iterable[Input]) -> list[Input]:
    """Makes a list of inputs; a list of numbers is the token ids of one prompt."""
    if isinstance(inputs, str):
        return [inputs]
    listed = _items("inputs", inputs)
    if listed and all(isinstance(item, Integral) for item in listed):
        return [_ids("inputs", listed)]
    return [
        item if isinstance(item, str) else _ids(f"input {i}", _items(f"input {i}", item))
        for i, item in enumerate(listed)
    ]


def _conversations(messages: Any) -> list[list[Any]]:
    """Makes a list of conversations; a list of messages is one conversation."""
    form = 'a list of messages such as {"role": "user", "content": "..."}, or several such lists'
    given = _items("messages", messages, "messages", form)
    if given and isinstance(given[0], Mapping):
        return [given]
    return [_items(f"conversation {i}", each, "messages", form) for i, each in enumerate(given)]


def _items(
    name: str,
    value: Any,
    field: str = "inputs",
    form: str = "a text or a list of token ids for each input",
) -> list[Any]:
    """Lists items, also of an array of numpy, pandas, torch or Arrow, and of a table column."""
    if hasattr(value, "columns") or hasattr(value, "column_names"):
        raise FieldError(field, f"{name} is a table; give a column of it, as in table['input']")
    listed = getattr(value, "to_pylist", None) or getattr(value, "tolist", None)
    found = listed() if listed else value
    if isinstance(found, str | bytes | Mapping) or not isinstance(found, Iterable):
        raise FieldError(field, f"{name} is {found!r:.80}; give {form}")
    return list(found)


def _ids(name: str, items: Sequence[Any]) -> list[int]:
    if wrong := [i for i in items if isinstance(i, bool) or not isinstance(i, Integral)]:
        raise FieldError(
            "inputs", f"{name} has {wrong[0]!r:.80} among its token ids; give integers, or a text"
        )
    return [int(item) for item in items]


def _require(name: str, value: object, kind: Any, way_out: str) -> None:
    if not isinstance(value, kind):
        raise ValueError(f"{name} is {value!r:.80}; give {way_out}")


def _tupled(value: Any) -> Any:
    """Makes a tuple of one text or several; the record refuses other values."""
    if isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, Iterable) else value


def _name_of(model: str | Path) -> str:
    """Derives a task's name from the last part of the model's name."""
    name = re.sub(r"[^a-zA-Z0-9._-]+", "-", Path(model).expanduser().name).lstrip("._-")
    return name[:64] or "model"


def _place(folder: str | Path) -> str:
    """Returns a folder's absolute path, or a hub name unchanged."""
    path = Path(folder).expanduser()
    return str(path.resolve()) if path.is_dir() else str(folder)


@contextmanager
def _interrupts() -> Iterator[threading.Event]:
    """Yields an event that Ctrl-C sets, so that no step is interrupted.

    A second Ctrl-C raises KeyboardInterrupt. The event is never set on other threads than the main
    thread, or if the program has a signal handler of its own.
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
