"""A request for one answer, as the parts of the service pass it on."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, Literal, TypeAlias, get_args

import msgspec

from tasc_protocol.sampling import Sampling
from tasc_text import Conversation

GuideKind = Literal["choice", "labels", "json_schema", "regex", "grammar"]
Prompt: TypeAlias = str | tuple[int, ...] | Conversation
MOST_LOGPROBS = 20  # maximum alternatives reported for each token
MOST_CHOICES = 20_000  # maximum choices of one guide
MOST_CHOICE_BYTES = 2_000_000  # maximum size of one guide's choices together, in UTF-8
MOST_PROBABILITIES = 200_000  # of one response without ``top_k``; about 4 MB of JSON
MOST_SCORING_STEPS = 10_000  # maximum forwards for the labels of one row, unless all are scored
MOST_GUIDE_BYTES = 64 * 1024  # maximum size of a JSON schema, a regular expression or a grammar
_OWN = {
    "choice": "choices",
    "labels": "choices",
    "json_schema": "schema",
    "regex": "regex",
    "grammar": "grammar",
}


class FieldError(ValueError):
    """A field of a request is wrong.

    Attributes:
        field: The request field at fault.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


@dataclass(frozen=True)
class GuideSpec:
    """A constraint on an answer.

    Attributes:
        kind: ``choice``: the answer is one of ``choices``, as the tokenizer encodes it, and then
            ends. ``labels``: the ``choices`` are scored, see `Scoring`. For other kinds, ``text``
            is a JSON schema, a regular expression, or a Lark grammar.
        field: The request field that sets the guide; ``model`` for the task's own guide. Guides
            that differ only in ``field`` are equal.
        end: For ``labels``, see `Scoring`.

    Raises:
        ValueError: The guide has no choices, no text or a lone surrogate, or is too large.
    """

    kind: GuideKind
    choices: tuple[str, ...] = ()
    text: str = ""
    field: str = field(default="model", compare=False)
    end: str | None = None

    def __post_init__(self) -> None:
        if self.kind not in get_args(GuideKind):
            kinds = ", ".join(get_args(GuideKind))
            raise ValueError(f"a guide's kind is {self.kind!r}; it is one of {kinds}")
        has_choices = self.kind in ("choice", "labels")
        if has_choices and not self.choices:
            raise ValueError("a guide of choices is empty; give at least one")
        if has_choices and self.text:
            raise ValueError("a guide of choices also has a text; leave the text out")
        if not has_choices and (not self.text or self.choices):
            raise ValueError(f"a guide by {self.kind} needs its text, and nothing else")
        _require_at_most(len(self.choices), "choices", MOST_CHOICES)
        most = MOST_CHOICE_BYTES if self.choices else MOST_GUIDE_BYTES
        _require_at_most(self.size_bytes, "bytes", most)

    @cached_property
    def size_bytes(self) -> int:
        """Size of the text, or of all choices together, in bytes of UTF-8."""
        choices = (_size_of(f"choice {at}", choice) for at, choice in enumerate(self.choices))
        return _size_of(self.kind, self.text) + _size_of("end", self.end or "") + sum(choices)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:  # kept, as a guide of 20,000 choices is looked up often
        return hash((self.kind, self.choices, self.text, self.end))

    def __reduce__(self) -> tuple[type["GuideSpec"], tuple[Any, ...]]:
        # The hash is left out, since it differs between processes.
        return GuideSpec, (self.kind, self.choices, self.text, self.field, self.end)

    @property
    def name(self) -> str:
        """The guide's name in messages."""
        return f"the task's {_OWN[self.kind]}" if self.is_tasks else self.field

    @property
    def is_tasks(self) -> bool:
        """Whether this is the task's own guide."""
        return self.field == "model"

    def require_whole(self, stops: tuple[str, ...], stop_ids: Collection[int]) -> None:
        """Raises FieldError if a stop string or a stop token could cut a choice.

        Args:
            stop_ids: Stop tokens, except special tokens and ends of sequence, which no choice has.
        """
        if self.choices and stop_ids:
            message = f"stop_token_ids has {min(stop_ids)}, which could cut a choice of {self.name}"
            raise FieldError("stop_token_ids", f"{message}; leave it out")
        for stop in stops:
            if cut := next((choice for choice in self.choices if stop in choice), None):
                raise FieldError(
                    "stop",
                    f"stop has {stop!r:.300}, which is in {cut!r:.300} of {self.name} and would "
                    "cut it; leave it out",
                )


@dataclass(frozen=True)
class Scoring:
    """Asks for the probabilities of the choices of a request's guide, instead of an answer.

    Attributes:
        end: The text behind each choice, for models whose answers go on there; empty: nothing.
            None: the task's value or, in a filled-in request, an end of sequence.
        exact: Whether every choice is scored.
        tolerance: Without ``exact``, forwards end when the choices that were not scored have at
            most this share of the probability of all choices; from 0 to below 1.
        max_steps: Without ``exact``, the maximum number of forwards; more only until a choice is
            scored.
        abstain_below: If the likeliest choice has a lower probability, the answer is empty; None:
            the task's value.
        top_k: Number of likeliest choices to report; None: all that were scored.
        temperature: Divisor of log-probabilities, which calibrates them; filled in by a replica.
        biases: Added to the quotient of each choice, which calibrates it; empty: nothing is added;
            filled in by a replica.
        abstain_label: The answer if no choice is probable enough; None: the task's value, else an
            empty one.
        mass: Whether `LabelScores.mass` is computed. The tokens with which all choices begin are
            then scored, too.

    Raises:
        FieldError: A value is out of its range.
    """

    end: str | None = None
    exact: bool = False
    tolerance: float = 0.001
    max_steps: int = 64
    abstain_below: float | None = None
    top_k: int | None = None
    temperature: float = 1.0
    biases: tuple[float, ...] = ()
    abstain_label: str | None = None
    mass: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.end, str | None):
            raise FieldError("end", f"end is {self.end!r:.80}; give a text, or leave it out")
        if not isinstance(self.exact, bool):
            raise FieldError("exact", f"exact is {self.exact!r:.80}; it is true or false")
        if not _is_number(self.tolerance) or not 0 <= self.tolerance < 1:
            message = f"tolerance is {self.tolerance!r:.80}; it is at least 0 and below 1"
            raise FieldError("tolerance", message)
        if type(self.max_steps) is not int or not 1 <= self.max_steps <= MOST_SCORING_STEPS:
            message = f"max_steps is {self.max_steps!r:.80}; it goes from 1 to {MOST_SCORING_STEPS}"
            raise FieldError("max_steps", message)
        if self.top_k is not None and self.top_k < 1:
            raise FieldError("top_k", f"top_k is {self.top_k}; it is at least 1")
        below = 0 if self.abstain_below is None else self.abstain_below
        if not _is_number(below) or not 0 <= below <= 1:
            message = f"abstain_below is {below!r:.80}; it goes from 0 to 1"
            raise FieldError("abstain_below", message)
        if not isinstance(self.abstain_label, str | None):
            message = f"abstain_label is {self.abstain_label!r:.80}; give a text, or leave it out"
            raise FieldError("abstain_label", message)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _require_at_most(found: int, what: str, most: int) -> None:
    if found > most:
        raise ValueError(f"a guide has {found} {what}; at most {most} are allowed: send fewer")


def _size_of(what: str, text: str) -> int:
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        raise ValueError(
            f"a guide's {what} has the lone surrogate {text[error.start]!r} at character "
            f"{error.start}, which no text has; leave it out"
        ) from error


@lru_cache(1024, typed=True)  # a rule checks its values, and most requests have equal rules
def _sampling(
    names: tuple[str, ...],
    logit_bias: tuple[tuple[int, float], ...],
    seed: int,
    prompt: int,
    choice: int,
    *values: Any,
) -> Sampling:
    parameters: dict[str, Any] = dict(zip(names, values, strict=True))
    return Sampling(**parameters, logit_bias=logit_bias, seed=seed, prompt=prompt, choice=choice)


class Request(msgspec.Struct, frozen=True, omit_defaults=True, dict=True):
    """A request for one answer.

    A request is made where the service receives it. A replica fills in the task's values
    (`RequestReader`). The engine takes requests whose prompt is token ids and whose values are
    complete.

    Attributes:
        id: Id of the answer. A client's retry and a failover to another replica keep it.
        prompt: The prompt as text or token ids or, with ``templated``, a row's input or a
            conversation.
        max_tokens: Maximum tokens of the answer, including end of sequence; may be 0 with
            ``echo``; None: the task's value.
        stop: Strings that end the answer, in addition to the task's. The text is cut before the
            first of them.
        templated: Whether the task's template makes the prompt.
        draft: Whether drafts may be used; the answer is the same. Answers without drafts are not
            a source of drafts for other rows.
        stream: Whether each step's output has its text; otherwise the last output has all text.
        parameters: Sampling parameters by name; for absent parameters, the task's values are used.
        seed: Equal requests with the same seed get the same answer.
        prompt_index: Index of the prompt in its HTTP request.
        choice_index: Index of the answer among the answers to its prompt.
        guide: The constraint on the answer.
        unguided: Whether the task's own guide is ignored if ``guide`` is None.
        logprobs: How many of the most likely tokens to report at each position; None: no logprobs.
        adapter: Name of the adapter; None: the task's first adapter, or no adapter in a filled-in
            request.
        echo: Whether the prompt is returned before the answer, with log-probabilities if they are
            requested.
        stop_token_ids: Tokens that end the answer and are a part of it.
        include_stop_str_in_output: Whether a stop string is a part of the answer.
        min_tokens: Minimum number of tokens of the answer; nothing ends it earlier.
        truncate_prompt_tokens: Number of last tokens of the prompt to keep; None or 0: all; -1: as
            many as a row has room for.
        add_special_tokens: Whether the tokenizer adds its special tokens to a prompt of text; None:
            the template decides, and a prompt without a template gets them.
        n: Number of answers to this prompt in the HTTP request.
        prompts: Number of prompts of the HTTP request.
        timeout_s: Seconds that the answer may take; None: the service's limit.
        committed_ids: Token ids of the answer that another replica has already generated. Only the
            tokens after these are returned. They are the tokens that the other replica would have
            generated.
        record_version: Version of the task's record that must answer; None: any.
        scoring: How to score the choices of the guide; None: an answer is generated.

    Raises:
        FieldError: A guide is combined with ``ignore_eos`` or ``min_tokens``.
    """

    id: str = ""
    prompt: Prompt = ""
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    templated: bool = False
    draft: bool = True
    stream: bool = False
    parameters: Mapping[str, int | float] = {}
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    prompt_index: int = 0
    choice_index: int = 0
    guide: GuideSpec | None = None
    unguided: bool = False
    logprobs: int | None = None
    ignore_eos: bool = False
    adapter: str | None = None
    echo: bool = False
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    min_tokens: int = 0
    truncate_prompt_tokens: int | None = None
    add_special_tokens: bool | None = None
    n: int = 1
    prompts: int = 1
    timeout_s: float | None = None
    committed_ids: tuple[int, ...] = ()
    record_version: int | None = None
    scoring: Scoring | None = None

    def __post_init__(self) -> None:
        self.guided_by(None)

    def guided_by(self, own: GuideSpec | None) -> GuideSpec | None:
        """Returns the request's guide, or else the task's guide unless ``unguided`` is set.

        Args:
            own: The task's guide.

        Raises:
            FieldError: ``ignore_eos`` or ``min_tokens`` is set, although the guide ends the answer.
        """
        guide = self.guide or (None if self.unguided else own)
        for name in ("ignore_eos", "min_tokens"):
            if guide and getattr(self, name):
                message = f"{name} contradicts {guide.name}, which ends the answer; leave it out"
                raise FieldError(name, message)
        return guide

    @cached_property
    def sampling(self) -> Sampling:
        """The rule by which tokens are chosen; the task's values must be filled in.

        Raises:
            ValueError: A value is out of its range.
        """
        place = self.seed, self.prompt_index, self.choice_index
        names, values = tuple(self.parameters), self.parameters.values()
        return _sampling(names, tuple(self.logit_bias), *place, *values)

    @property
    def is_plain(self) -> bool:
        """Whether the likeliest token is taken at each position, without a guide or logprobs."""
        guided = self.guide is not None or self.min_tokens > 0
        return self.sampling.plain and not guided and self.logprobs is None

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """The prompt's token ids; raises ValueError if the prompt is not encoded yet."""
        if isinstance(self.prompt, tuple):
            return self.prompt
        raise ValueError(f"request {self.id}: the prompt is not encoded; give its token ids")

    @property
    def answer_limit(self) -> int:
        """The value of ``max_tokens``; raises ValueError if it is not filled in yet."""
        if self.max_tokens is not None:
            return self.max_tokens
        raise ValueError(f"request {self.id}: max_tokens is missing; set it")

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of the prompt's tokens are returned, from the second on."""
        return self.echo and self.logprobs is not None and not self.committed_ids

    @property
    def response_id(self) -> str:
        """The id of the HTTP response, which several answers may share."""
        return self.id.rpartition("-c")[0] if self.n * self.prompts > 1 else self.id

    @property
    def prompt_field(self) -> str:
        """The request field of the prompt."""
        if self.scoring is not None:
            return f"input.{self.prompt_index}" if self.prompts > 1 else "input"
        if isinstance(self.prompt, Conversation):
            return "messages"
        if self.templated:
            return "messages.0.content"
        return f"prompt.{self.prompt_index}" if self.prompts > 1 else "prompt"

    @property
    def is_acknowledged(self) -> bool:
        """Whether the stream begins with an empty output as soon as the request is admitted.

        The client then gets the status code and headers before a row is free. No part of an answer
        is sent before all requests of an HTTP request are admitted.
        """
        return self.stream and not self.committed_ids
