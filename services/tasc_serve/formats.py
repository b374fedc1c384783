"""Kinds of values in request bodies that need a rule of their own. It answers nothing."""

from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
)
from pydantic_core import PydanticCustomError

from tasc_engine.sampling import MOST_BIASES

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Body(BaseModel):
    """A JSON object whose fields are all known and of the very type they say."""

    model_config = ConfigDict(extra="forbid", strict=True)


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
