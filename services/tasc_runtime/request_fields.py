"""What a request says of how its answers are made, over HTTP and from Python alike.

Unknown fields are refused, never dropped; None means a field's default.
"""

import difflib
import json
import secrets
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    model_validator,
)
from pydantic_core import PydanticCustomError

from tasc_engine.request import MOST_LOGPROBS, GuideSpec
from tasc_engine.sampling.parameters import MOST_BIASES
from tasc_runtime.sampling_options import AnswerGuide, FieldError, SamplingOptions

SHOWN = 64  # characters of a name that a message shows
UNKNOWN = "unknown_field"  # the type of a validation error
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_ANY_OBJECT = '{"type":"object"}'


class Body(BaseModel):
    """A JSON object whose fields are all known and of the very type they say."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _known(cls, body: Any) -> Any:
        """Stops at the first unknown field, of a million; null leaves a field to its default."""
        if not isinstance(body, dict):
            return body
        fields = {field.alias or name: field for name, field in cls.model_fields.items()}
        for name in body:
            if name not in fields:
                near = difflib.get_close_matches(name[:SHOWN], fields, 1)
                context = {"field": name, "nearest": near[0] if near else ""}
                raise PydanticCustomError(UNKNOWN, "unknown field", context)
        return {k: v for k, v in body.items() if v is not None or fields[k].is_required()}


def _whole(text: str) -> str:
    if _REPLACEMENT in text:
        raise PydanticCustomError(
            "cut_text",
            "has a replacement character (U+FFFD), which no answer contains: it was cut inside a "
            "character; cut it between two",
        )
    return text


def _few(biases: Any) -> Any:
    """Counted before they are looked at: a million wrong ones must not become a million errors."""
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
    """Whatever the task says."""

    type: Literal["text"]


class JsonObjectFormat(Body):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchema(Body):
    name: str = Field(max_length=256)
    schema_: dict[str, Any] = Field(alias="schema", description="what the answer always fits")
    strict: bool | None = Field(None, description="the schema is kept to either way")
    description: str | None = None


class JsonSchemaFormat(Body):
    """JSON that fits a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")
]


Top = Annotated[int, Field(ge=0, le=MOST_LOGPROBS)]
Penalty = Annotated[Number, Field(ge=-2, le=2)]
_DEFAULT = "unset: the task's own, else {0}"


class GenerationFields(Body):
    """What a request says of how its answers are made; unset fields are the task's own."""

    max_tokens: int | None = Field(None, ge=1, description="unset: the task's own")
    stop: StopText | Annotated[list[StopText], Field(max_length=16)] | None = None
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = Field(
        None,
        description=_DEFAULT.format("0: most tasks are classifications")
        + "; 0 takes the likeliest token, the first of equal ones",
    )
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = Field(
        None, description=_DEFAULT.format("1")
    )
    n: Annotated[int, Field(ge=1)] | None = Field(
        None, description="answers to the prompt; with temperature 0 they are equal"
    )
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = Field(
        None, description="same seed, same answers; unset: a drawn one"
    )
    logit_bias: Biases | None = Field(None, description="token ids and what their logits get")
    presence_penalty: Penalty | None = Field(None, description=_DEFAULT.format("0"))
    frequency_penalty: Penalty | None = Field(None, description=_DEFAULT.format("0"))
    response_format: ResponseFormat | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = Field(
        None, description=f"extension; 0 or -1: all tokens; {_DEFAULT.format('0')}"
    )
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = Field(
        None, description=f"extension; {_DEFAULT.format('0')}"
    )
    repetition_penalty: Annotated[Number, Field(gt=0, le=100)] | None = Field(
        None, description=f"extension; {_DEFAULT.format('1')}"
    )
    ignore_eos: bool = Field(False, description="extension: go on behind an end of sequence")
    guided_choice: Annotated[list[str], Field(fail_fast=True)] | None = Field(
        None, description="extension: the answer is one of these"
    )
    guided_regex: str | None = Field(None, description="extension: the whole answer matches it")
    guided_json: dict[str, Any] | None = Field(
        None, description="extension: a JSON schema that the answer fits"
    )
    guided_grammar: str | None = Field(None, description="extension: a grammar in Lark's syntax")
    adapter: str | None = Field(
        None,
        max_length=64,
        description="extension: which of the task's adapters answers; unset: its first",
    )
    draft: bool = Field(True, description="extension: whether to draft; the answer is the same")

    @property
    def stops(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def options(self, logprobs: int | None, seed: int | None = None) -> SamplingOptions:
        """Sampling and output options of the first answer.

        Args:
            logprobs: How many of the likeliest tokens to report at each place; None: no logprobs.
            seed: Where the request has none; unset: a random one.

        Raises:
            FieldError: Fields contradict each other, or a guide is empty or no JSON.
        """
        if seed is None:  # drawn here, so that a call that is made again gets the same answer
            seed = secrets.randbits(64)
        biases = (self.logit_bias or {}).items()
        return SamplingOptions(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=None if self.top_k is None else max(self.top_k, 0),
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=tuple((int(token), bias) for token, bias in biases),
            seed=seed if self.seed is None else self.seed % 2**64,
            guide=self._guide(),
            logprobs=logprobs,
            ignore_eos=self.ignore_eos,
            adapter=self.adapter,
        )

    def _guide(self) -> AnswerGuide | None:
        fields = {
            "response_format": isinstance(
                self.response_format, JsonObjectFormat | JsonSchemaFormat
            ),
            "guided_choice": self.guided_choice is not None,
            "guided_regex": self.guided_regex is not None,
            "guided_json": self.guided_json is not None,
            "guided_grammar": self.guided_grammar is not None,
        }
        given = [name for name, is_given in fields.items() if is_given]
        if len(given) > 1:
            raise FieldError(given[1], f"{' and '.join(given)} are sent; an answer has one guide")
        if not given:
            return None
        field = given[0]
        if getattr(self, field) in ([], ""):
            message = f"{field} is empty; say what the answer may be, or leave it out"
            raise FieldError(field, message)
        try:
            return AnswerGuide(self._guide_spec(), field)
        except (ValueError, RecursionError) as error:
            raise FieldError(field, f"{field}: {error}") from error

    def _guide_spec(self) -> GuideSpec:
        if self.guided_choice is not None:
            return GuideSpec("choice", choices=tuple(self.guided_choice))
        if self.guided_regex is not None:
            return GuideSpec("regex", text=self.guided_regex)
        if self.guided_grammar is not None:
            return GuideSpec("grammar", text=self.guided_grammar)
        if isinstance(self.response_format, JsonSchemaFormat):
            schema = self.response_format.json_schema.schema_
        elif self.guided_json is not None:
            schema = self.guided_json
        else:
            return GuideSpec("json_schema", text=_ANY_OBJECT)
        return GuideSpec("json_schema", text=json.dumps(schema, allow_nan=False))
