"""The fields of a request: sampling parameters, guides, stop conditions, adapter and chat messages.

`RuleFields` validates the fields that all generating endpoints share. `GenerationFields` adds the
fields that ``/v1/responses`` lacks or names differently, and `ChatFields` validates conversations.
Unknown fields are refused; None means a field's default. `RuleFields.request` makes the `Request`
that is sent to a replica, where a `RequestReader` fills in the task's values.
"""

import difflib
import functools
import json
import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal, TypeAlias, get_args

from msgspec.structs import replace
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    create_model,
    model_validator,
)
from pydantic_core import PydanticCustomError

from tasc_protocol import PARAMETERS, FieldError, GuideSpec, Parameter, Request
from tasc_protocol.request import MOST_LOGPROBS, GuideKind
from tasc_protocol.sampling import MOST_BIASES
from tasc_store import TaskRecord
from tasc_text import Conversation, Message
from tasc_text.template import Role

SHOWN = 64  # maximum characters of a name or text in a message
_NEAR = 0.7  # minimum similarity of a name that a message proposes
# Types of validation errors.
UNKNOWN = "unknown_field"
UNSUPPORTED = "unsupported_field"
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_ANY: Mapping[str, Any] = {"type": "object"}


def guide_of(record: TaskRecord) -> GuideSpec | None:
    """Returns the guide of a task; None if it has none."""
    if record.choices:
        return _own_guide("choice", record.choices)
    if record.schema:
        return _own_guide("json_schema", text=record.schema)
    return _own_guide("regex", text=record.regex) if record.regex else None


@functools.lru_cache(16)  # with many labels it takes milliseconds
def _own_guide(kind: GuideKind, choices: tuple[str, ...] = (), text: str = "") -> GuideSpec:
    return GuideSpec(kind, choices, text, field="model")


class Body(BaseModel):
    """A JSON object. Unknown fields are refused, and values are not converted to other types.

    Attributes:
        unsupported: Fields of other services that are refused because they would change the answer.
            Each field has values that change nothing, which are accepted.
        unsupported_values: Values of fields for which a message is refused as a whole, before its
            other fields are checked.
        ignored: Fields that do not change answers here; they are accepted and not used.
        nullable: Optional fields for which null has a meaning; for others, null is the default.
    """

    model_config = ConfigDict(extra="forbid", strict=True)
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    unsupported_values: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    ignored: ClassVar[frozenset[str]] = frozenset()
    nullable: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _known_fields(cls, body: Any) -> Any:
        """Stops at the first unknown field, as there may be many. Null means the default."""
        if not isinstance(body, dict):
            return body
        required = _required(cls)
        for name, values in cls.unsupported_values.items():
            if body.get(name) in values:
                others = get_args(cls.model_fields[name].annotation)
                context = {"field": name, "neutral": others, "whole": "the message"}
                raise PydanticCustomError(UNSUPPORTED, "is not supported", context)
        for name, value in body.items():
            if name in required or value is None or name in cls.ignored:
                continue
            if name not in cls.unsupported:
                near = difflib.get_close_matches(name[:SHOWN], required, 1, _NEAR)
                context = {"field": name, "nearest": near[0] if near else ""}
                raise PydanticCustomError(UNKNOWN, "unknown field", context)
            if value not in cls.unsupported[name]:
                context = {"field": name, "neutral": cls.unsupported[name]}
                raise PydanticCustomError(UNSUPPORTED, "is not supported", context)
        return {
            name: value
            for name, value in body.items()
            if name in required and (value is not None or required[name] or name in cls.nullable)
        }


@functools.cache
def _required(model: type[Body]) -> dict[str, bool]:
    """Returns the names of a model's fields, and whether each is required."""
    return {field.alias or name: field.is_required() for name, field in model.model_fields.items()}


def _whole(text: str) -> str:
    if _REPLACEMENT in text:
        raise PydanticCustomError(
            "cut_text",
            "has a replacement character (U+FFFD), which no answer contains: the text was cut "
            "inside a character; cut it between characters",
        )
    return text


def _few(biases: Any) -> Any:
    """Counts biases before validation, so that a million wrong biases give a single error."""
    if isinstance(biases, dict) and len(biases) > MOST_BIASES:
        raise PydanticCustomError(
            "too_many",
            "has {found} tokens; at most {most}",
            {"found": len(biases), "most": MOST_BIASES},
        )
    return biases


StopText = Annotated[str, StringConstraints(min_length=1, max_length=1024), AfterValidator(_whole)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
_TokenIdText = Annotated[str, StringConstraints(pattern=r"^(0|[1-9][0-9]{0,9})$")]
_Bias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]
Biases = Annotated[dict[_TokenIdText, _Bias], BeforeValidator(_few)]
Number = Annotated[float, Field(allow_inf_nan=False)]


class TextFormat(Body):
    type: Literal["text"]


class JsonObjectFormat(Body):
    type: Literal["json_object"]


class JsonSchema(Body):
    name: str = Field(max_length=256)
    schema_: dict[str, Any] = Field(alias="schema", description="the answer always fits this")
    strict: bool | None = Field(
        None, description="false: keywords that cannot be enforced are ignored"
    )
    description: str | None = None


class JsonSchemaFormat(Body):
    type: Literal["json_schema"]
    json_schema: JsonSchema


AnyFormat: TypeAlias = TextFormat | JsonObjectFormat | JsonSchema | JsonSchemaFormat


def _with_guidance(schema: Mapping[str, Any], more: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a schema with further options for how the guide enforces it."""
    own = schema.get("x-guidance", {})
    if not more or not isinstance(own, dict):
        return schema
    return {**schema, "x-guidance": {**own, **more}}


def _parsed_schema(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        found = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise PydanticCustomError("no_json", "is not JSON: {why}", {"why": str(error)}) from error
    if not isinstance(found, dict):
        raise PydanticCustomError(
            "no_object",
            "is JSON but not an object: {shown}; send a schema",
            {"shown": value[:SHOWN]},
        )
    return found


_Schema = Annotated[
    dict[str, Any], BeforeValidator(_parsed_schema, json_schema_input_type=dict[str, Any] | str)
]


def _schema_of(format: AnyFormat | None) -> Mapping[str, Any] | None:
    """Returns the JSON schema of a format; None if the format sets no guide."""
    if isinstance(format, JsonSchemaFormat):
        format = format.json_schema
    if isinstance(format, JsonSchema):
        return _with_guidance(format.schema_, {"lenient": True} if format.strict is False else {})
    return _ANY if isinstance(format, JsonObjectFormat) else None


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")
]


_Choices = Annotated[list[str], Field(fail_fast=True)]


class StructuredOutputs(Body):
    """One guide, in the fields of vLLM."""

    unsupported: ClassVar = {
        "disable_fallback": (False, True),  # there is nothing to fall back to
        "disable_additional_properties": (False,),
        "structural_tag": (),
    }

    choice: _Choices | None = None
    regex: str | None = None
    json_: _Schema | None = Field(None, alias="json")
    json_object: bool = False
    grammar: str | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool = False


_NO_OUTPUTS = StructuredOutputs()  # made once, as validation takes time in each request
Top = Annotated[int, Field(ge=0, le=MOST_LOGPROBS)]


def _field_of(parameter: Parameter) -> tuple[Any, Any]:
    """Returns the type and the field of a sampling parameter."""
    least, most = parameter.request_range or (parameter.minimum, parameter.maximum)
    above = parameter.above_minimum and parameter.request_range is None
    kind: Any = int if parameter.is_integer else Number
    ranged = Annotated[kind, Field(gt=least) if above else Field(ge=least), Field(le=most)]
    unset = f"unset: the task's own, else {parameter.default:g}"
    extension = "extension; " * parameter.is_extension
    return ranged | None, Field(None, description=extension + unset + parameter.request_help)


if TYPE_CHECKING:
    _ParameterFields = Body
else:
    _ParameterFields = create_model(
        "_ParameterFields",
        __base__=Body,
        **{name: _field_of(parameter) for name, parameter in PARAMETERS.items()},
    )


class RuleFields(_ParameterFields):
    """The fields about answers that all generating endpoints share."""

    format_field: ClassVar = "response_format"
    nullable: ClassVar = frozenset(
        {"structured_outputs", "guided_choice", "guided_regex", "guided_json", "guided_grammar"}
    )

    stop: StopText | Annotated[list[StopText], Field(max_length=16)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = Field(
        None,
        description="same seed, same answers, with backend vllm only without drafts; unset: a "
        "random seed",
    )
    logit_bias: Biases | None = Field(None, description="token ids, and an addend for each logit")
    ignore_eos: bool = Field(False, description="extension: continue after an end of sequence")
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64, fail_fast=True)] | None = Field(
        None, description="extension: each ends an answer and is a part of it"
    )
    include_stop_str_in_output: bool = Field(
        False, description="extension: whether a stop string is a part of the answer"
    )
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] = Field(
        0, description="extension: minimum tokens of an answer; not with a guide"
    )
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=2**31)] | None = Field(
        None,
        description="extension: number of last prompt tokens to keep; -1: as many as there "
        "is room for; 0: all",
    )
    structured_outputs: StructuredOutputs | None = Field(
        None, description="extension: the answer's choice, regex, json, json_object or grammar"
    )
    guided_choice: _Choices | None = Field(
        None, description="extension: the answer is one of these"
    )
    guided_regex: str | None = Field(None, description="extension: the whole answer matches it")
    guided_json: _Schema | None = Field(
        None, description="extension: a JSON schema that the answer fits, or its text"
    )
    guided_grammar: str | None = Field(None, description="extension: a grammar in Lark's syntax")
    guided_whitespace_pattern: str | None = Field(
        None,
        description="extension: an expression for the white space at each place of a JSON guide",
    )
    adapter: str | None = Field(
        None,
        max_length=64,
        description="extension: which of the task's adapters answers; unset: the first",
    )
    draft: bool = Field(True, description="extension: whether to draft; the answer is the same")

    @property
    def format(self) -> AnyFormat | None:
        """The value of the field that `format_field` names."""
        return None

    @property
    def stops(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def request(self, logprobs: int | None, seed: int | None = None) -> Request:
        """Returns the request for the first answer, without its id and prompt.

        Args:
            logprobs: How many of the most likely tokens to report at each position; None: none.
            seed: The seed if the request has none; None: a random seed.

        Raises:
            FieldError: Fields contradict each other, or a guide is empty, too large or not JSON.
        """
        if seed is None:  # drawn here, so that a repeated call gets the same answer
            seed = secrets.randbits(64)
        biases = (self.logit_bias or {}).items()
        return Request(
            stop=self.stops,
            draft=self.draft,
            parameters=self._parameters(),
            logit_bias=tuple((int(token), bias) for token, bias in biases),
            seed=seed if self.seed is None else self.seed % 2**64,
            guide=(guide := self._guide()),
            unguided=guide is None and self._drops_guide,
            logprobs=logprobs,
            ignore_eos=self.ignore_eos,
            adapter=self.adapter,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            include_stop_str_in_output=self.include_stop_str_in_output,
            min_tokens=self.min_tokens,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
        )

    def _parameters(self) -> dict[str, int | float]:
        sent = {name: getattr(self, name) for name in PARAMETERS}
        given = {name: value for name, value in sent.items() if value is not None}
        if given.get("top_k") == -1:  # all tokens, as vLLM writes it
            given["top_k"] = 0
        return given

    @property
    def _drops_guide(self) -> bool:
        """Whether the request sends null for a guide.

        A ``response_format`` of null or text does not count: clients send it by default.
        """
        return any(getattr(self, field) is None for field in self.nullable & self.model_fields_set)

    def _guide(self) -> GuideSpec | None:
        own = self.structured_outputs or _NO_OUTPUTS
        fields: Mapping[str, tuple[GuideKind, Any]] = {
            self.format_field: ("json_schema", _schema_of(self.format)),
            "guided_choice": ("choice", self.guided_choice),
            "guided_regex": ("regex", self.guided_regex),
            "guided_json": ("json_schema", self.guided_json),
            "guided_grammar": ("grammar", self.guided_grammar),
            "structured_outputs.choice": ("choice", own.choice),
            "structured_outputs.regex": ("regex", own.regex),
            "structured_outputs.json": ("json_schema", own.json_),
            "structured_outputs.json_object": ("json_schema", _ANY if own.json_object else None),
            "structured_outputs.grammar": ("grammar", own.grammar),
        }
        given = [name for name, (_, value) in fields.items() if value is not None]
        if len(given) > 1:
            raise FieldError(given[1], f"{' and '.join(given)} are sent; an answer has one guide")
        if self.structured_outputs and not (given and given[0].startswith("structured_outputs")):
            message = "structured_outputs sets no guide; set one, or leave it out"
            raise FieldError("structured_outputs", message)
        layout_field, layout = self._layout(own)
        if not given:
            if layout_field:
                message = f"{layout_field} needs a JSON guide; send guided_json, or leave it out"
                raise FieldError(layout_field, message)
            return None
        field, (kind, value) = given[0], fields[given[0]]
        if kind == "json_schema":
            value = _with_guidance(value, layout)
        elif layout_field:
            message = f"{layout_field} needs a JSON guide, but {field} is sent"
            raise FieldError(layout_field, f"{message}; leave {layout_field} out")
        if value in ([], ""):
            message = f"{field} is empty; say what the answer may be, or leave it out"
            raise FieldError(field, message)
        try:
            if kind == "choice":
                return GuideSpec(kind, choices=tuple(value), field=field)
            text = value if isinstance(value, str) else json.dumps(value, allow_nan=False)
            return GuideSpec(kind, text=text, field=field)
        except (ValueError, RecursionError) as error:
            raise FieldError(field, f"{field}: {error}") from error

    def _layout(self, own: StructuredOutputs) -> tuple[str, Mapping[str, Any]]:
        """Returns the field about white space (empty if none is set), and its options."""
        patterns = {
            "guided_whitespace_pattern": self.guided_whitespace_pattern,
            "structured_outputs.whitespace_pattern": own.whitespace_pattern,
            "structured_outputs.disable_any_whitespace": "" if own.disable_any_whitespace else None,
        }
        given = [name for name, pattern in patterns.items() if pattern is not None]
        if len(given) > 1:
            raise FieldError(given[1], f"{' and '.join(given)} are sent; send one of them")
        if not given:
            return "", {}
        pattern = patterns[given[0]]
        compact = {"whitespace_flexible": False, "whitespace_pattern": None}
        return given[0], {"whitespace_pattern": pattern} if pattern else compact


class GenerationFields(RuleFields):
    """`RuleFields`, and the fields that ``/v1/responses`` lacks or names differently."""

    max_tokens: int | None = Field(None, ge=1, description="unset: the task's own")
    n: Annotated[int, Field(ge=1)] | None = Field(
        None, description="answers to the prompt; with temperature 0 they are equal"
    )
    response_format: ResponseFormat | None = None
    add_special_tokens: bool | None = Field(
        None,
        description="extension: whether the tokenizer adds special tokens, such as the beginning "
        "of sequence, to a prompt of text; unset: yes, except for chat templates, which write "
        "them; never twice, and never an end of sequence",
    )

    def request(self, logprobs: int | None, seed: int | None = None) -> Request:
        found = super().request(logprobs, seed)
        return replace(found, add_special_tokens=self.add_special_tokens)

    @property
    def format(self) -> AnyFormat | None:
        return self.response_format


_MOST_PARTS, MOST_MESSAGES = 1024, 4096
# Types of text parts: in chats, and in inputs and outputs of /v1/responses.
_TEXTS = ("text", "input_text", "output_text")
# Fields that client libraries add to the answers that they send back, and hints for the caches of
# other services.
_KEPT = ("annotations", "cache_control", "id", "index", "logprobs", "provider_specific_fields")
IGNORED_OF_PARTS: Final = frozenset((*_KEPT, "citations"))
IGNORED_OF_MESSAGES: Final = frozenset(
    (*_KEPT, "reasoning", "reasoning_content", "reasoning_details", "thinking_blocks")
)


def joined_text(content: Any) -> Any:
    """Joins the text parts of a message's content; a string is returned as it is.

    Raises:
        PydanticCustomError: The content is neither a string nor a list of text parts. The error is
            a ValueError.
    """
    if isinstance(content, str):
        return content
    parts: list[Any] = (
        content if isinstance(content, list) and len(content) <= _MOST_PARTS else [None]
    )
    other = next((part for part in parts if not _is_text(part)), "")
    if other == "":
        return "".join(part["text"] for part in parts)
    wrong = None
    if isinstance(other, dict):
        wrong = other.get("type")
        if wrong in _TEXTS:
            wrong = min(_named(other) - {"type", "text"}, default=None)
    raise PydanticCustomError(
        "no_text",
        'is a string or a list of at most {most} parts {"type": "text", "text": ...}{named}',
        {
            "most": _MOST_PARTS,
            "named": f"; {wrong[:SHOWN]} is not supported" if isinstance(wrong, str) else "",
        },
    )


def _is_text(part: Any) -> bool:
    return (
        isinstance(part, dict)
        and _named(part) == {"type", "text"}
        and part["type"] in _TEXTS
        and isinstance(part["text"], str)
    )


def _named(part: Mapping[str, Any]) -> set[str]:
    """The names of a part's fields, without ignored fields."""
    return {name for name, value in part.items() if value is not None} - IGNORED_OF_PARTS


Content = Annotated[
    str, BeforeValidator(joined_text, json_schema_input_type=str | list[dict[str, str]])
]


class ChatMessage(Body):
    unsupported: ClassVar = {
        "tool_calls": ([],),
        "function_call": (),
        "refusal": ("",),
        "audio": (),
    }
    unsupported_values: ClassVar = {"role": ("tool", "function")}
    ignored: ClassVar = IGNORED_OF_MESSAGES

    role: Role
    content: Content
    name: str | None = Field(None, max_length=256, description="name of the speaker")


def _plain_json(value: dict[str, Any]) -> dict[str, Any]:
    try:
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise PydanticCustomError("no_json", "is not JSON: {why}", {"why": str(error)}) from error
    return value


_Word = Annotated[str, StringConstraints(max_length=256)]


class Reasoning(Body):
    effort: _Word | None = None
    context: _Word | None = Field(None, description="not used")
    generate_summary: _Word | None = Field(None, description="not used")
    mode: _Word | None = Field(None, description="not used")
    summary: _Word | None = Field(None, description="not used")


class TemplateFields(Body):
    """How a prompt is made from a conversation."""

    strict_messages: bool = Field(
        False, description="extension: refuse messages that a format string does not use"
    )
    add_generation_prompt: bool | None = Field(
        None,
        description="extension, for chat templates: whether the prompt ends with the head of an "
        "answer; unset: yes",
    )
    chat_template_kwargs: Annotated[dict[str, Any], AfterValidator(_plain_json)] | None = Field(
        None, description="extension, for chat templates: further variables"
    )
    reasoning_effort: _Word | None = Field(
        None, description="for chat templates: a variable of this name"
    )
    reasoning: Reasoning | None = Field(None, description="its effort is used as reasoning_effort")

    def conversation_of(self, messages: Sequence[ChatMessage]) -> str | Conversation:
        """Returns a conversation, or the text of a single user message, which fits any template."""
        variables = None
        if self.chat_template_kwargs is not None:
            variables = json.dumps(self.chat_template_kwargs)
        turns = tuple(Message(m.role, m.content, m.name) for m in messages)
        named = self.reasoning.effort if self.reasoning else None
        whole = Conversation(
            turns,
            self.strict_messages,
            self.add_generation_prompt,
            variables,
            self.reasoning_effort or named,
        )
        alone = Conversation((Message("user", turns[-1].content),), self.strict_messages)
        return alone.messages[0].content if whole == alone else whole


class ChatFields(TemplateFields):
    """A conversation, and how a prompt is made from it."""

    messages: Annotated[
        list[ChatMessage], Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)
    ] = Field(description="a chat template uses all, a format string only the last user message")

    @property
    def conversation(self) -> str | Conversation:
        return self.conversation_of(self.messages)
