"""Kinds of values in request bodies that need a rule of their own. It answers nothing."""

import difflib
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

from tasc_engine.sampling import MOST_BIASES

SHOWN = 64  # characters of a name that a message shows
UNKNOWN = "unknown_field"
_MOST_PARTS = 1024
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


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


def _joined(content: Any) -> Any:
    """One text of OpenAI's parts."""
    if isinstance(content, str):
        return content
    few = isinstance(content, list) and len(content) <= _MOST_PARTS
    if few and all(_is_text(part) for part in content):
        return "".join(part["text"] for part in content)
    raise PydanticCustomError(
        "no_text",
        'is a string or a list of at most {most} parts {{"type": "text", "text": ...}}',
        {"most": _MOST_PARTS},
    )


def _is_text(part: Any) -> bool:
    return (
        isinstance(part, dict)
        and part.keys() == {"type", "text"}
        and part["type"] == "text"
        and isinstance(part["text"], str)
    )


Content = Annotated[
    str, BeforeValidator(_joined, json_schema_input_type=str | list[dict[str, str]])
]


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
