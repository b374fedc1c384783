"""``POST /v1/decisions``: typed questions about one input, in the shape of OpenAI's clients.

The answers are probabilities of labels. Nothing is generated.
"""

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import BeforeValidator, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from tasc_protocol import GuideSpec, LabelScores, Request, Scoring, Whole
from tasc_runtime import sampling_options as fields
from tasc_serve.http import responses_api
from tasc_serve.http.schemas import HarmlessFields, Label
from tasc_serve.http_errors import ApiError
from tasc_text import Conversation, Message


class _InputMessage(fields.ChatMessage):
    ignored: ClassVar = fields.IGNORED_OF_MESSAGES | {"phase"}

    type: Literal["message"] = "message"
    role: Literal["user", "assistant"]


def _messages(sent: Any) -> Any:
    return [{"role": "user", "content": sent}] if isinstance(sent, str) else sent


def _value(sent: Any) -> Any:
    if not isinstance(sent, str | bool) or sent == "":
        raise PydanticCustomError("no_value", "is a non-empty string, true or false")
    return sent


class _Choice(fields.Body):
    value: Annotated[str | bool, BeforeValidator(_value, json_schema_input_type=str | bool)]
    description: str | None = None

    @property
    def label(self) -> str:
        return str(self.value).lower() if isinstance(self.value, bool) else self.value


class _Level(fields.Body):
    label: str = Field(min_length=1)
    description: str | None = None


_YES_NO: Final = (_Level(label="yes"), _Level(label="no"))


class _Question(fields.Body):
    type: Literal["choice", "predicate", "score"]
    instructions: fields.Content = Field(description="empty: the prompt has only the input")
    name: Label | None = None
    choices: list[_Choice] = Field([], min_length=2, max_length=255, fail_fast=True)
    levels: list[_Level] = Field([], min_length=2, max_length=10, fail_fast=True)

    @property
    def options(self) -> Sequence[_Choice | _Level]:
        return self.choices or self.levels or _YES_NO

    @cached_property
    def guide(self) -> GuideSpec:
        """The labels; raises ValueError if they are too large."""
        return GuideSpec("choice", tuple(option.label for option in self.options))

    @property
    def system(self) -> tuple[Message, ...]:
        """The system message of the prompt; empty if there is none."""
        lines = [": ".join(filter(None, (f"- {o.label}", o.description))) for o in self.options]
        asked = (self.instructions, "", "Answer with one of these options:", *lines)
        return (Message("system", "\n".join(asked)),) if self.instructions else ()

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if (bool(self.choices), bool(self.levels)) != (self.type == "choice", self.type == "score"):
            raise PydanticCustomError("options", "choices go with type choice, levels with score")
        if len({*self.guide.choices}) < len(self.options):
            raise PydanticCustomError("options", "two options are equal; true counts as 'true'")
        if not self.instructions and any(option.description for option in self.options):
            raise PydanticCustomError("options", "descriptions need instructions; write some")
        return self


class DecisionsRequest(HarmlessFields):
    """Each question makes one prompt, with the whole input."""

    model: str = Field(max_length=256, description="the task's name")
    input: Annotated[
        list[_InputMessage],
        Field(min_length=1, max_length=fields.MOST_MESSAGES, fail_fast=True),
        BeforeValidator(_messages, json_schema_input_type=str | list[_InputMessage]),
    ]
    questions: list[_Question] = Field(min_length=1, max_length=400, fail_fast=True)
    adapter: str | None = Field(None, max_length=64, description="extension; unset: the first")
    timeout: Annotated[fields.Number, Field(gt=0)] | None = Field(None, description="extension")
    stream: Literal[False] = False

    n: ClassVar[None] = None
    limit: ClassVar[None] = None
    limit_field: ClassVar = "questions"
    logprob_count: ClassVar[None] = None

    @property
    def prompts(self) -> Sequence[Conversation]:
        turns = tuple(Message(turn.role, turn.content, turn.name) for turn in self.input)
        return [Conversation((*asked.system, *turns), strict=True) for asked in self.questions]

    @property
    def prompt_count(self) -> int:
        return len(self.questions)

    @property
    def guides(self) -> Sequence[GuideSpec]:
        """The labels of each question."""
        return [replace(q.guide, field=f"questions.{at}") for at, q in enumerate(self.questions)]

    def request(self, logprobs: int | None, seed: int | None = None) -> Request:
        """Returns the request for a question, without its id, prompt and guide."""
        scoring = Scoring(exact=True, abstain_below=0.0, mass=True)
        return Request(adapter=self.adapter, scoring=scoring)


def about_questions(error: ApiError) -> ApiError:
    """Converts an error about a prompt to one about the questions and the input that make it."""
    place, message = error.param or "", error.message
    name, _, number = place.partition(".")
    if isinstance(error.__cause__, ValidationError) or name not in ("messages", "input"):
        return error
    if name == "messages" and not number:
        return responses_api.in_its_words(error)
    if name == "input":
        message = message.replace(place, f"the prompt of question {number or 0}", 1)
        message = re.sub(",( or)? have it cut by truncate_prompt_tokens", "", message)
    else:  # a format string takes one user message
        name = "questions" if f"{place} (system)" in message else "input"
        message = f"{name}: the task has no chat template; send one user message, no instructions"
    return ApiError(error.status, message, name, error.code)


@dataclass(frozen=True)
class DecisionsReply:
    """Formats the answers to one request."""

    body: DecisionsRequest
    task: str
    requests: Sequence[Request]

    def whole(self, answers: Sequence[Whole]) -> dict[str, Any]:
        """The body of the response, with one answer for each question, in order."""
        tokens = sum(result.prompt_tokens for result, _ in answers)
        asked = zip(self.body.questions, answers, strict=True)
        return {
            "id": f"decision_{self.requests[0].response_id}",
            "object": "decision",
            "created": int(time.time()),
            "model": self.task,
            "answers": [_answer(question, result.scores) for question, (result, _) in asked],
            "usage": {
                "input_tokens": tokens,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": 0,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": tokens,
            },
        }


def _answer(question: _Question, scores: LabelScores | None) -> dict[str, Any]:
    if scores is None or scores.mass is None:
        raise ApiError(503, "a replica is too old for decisions; try again after its upgrade")
    shares = [p for _, p in sorted(zip(scores.numbers, scores.probabilities, strict=True))]
    answer: dict[str, Any] = {"type": question.type, "name": question.name}
    if question.type == "predicate":
        return answer | {"probability": shares[0]}
    listed: list[dict[str, Any]] = [
        {"value": at, **option.model_dump(exclude={"description"}), "probability": p}
        for at, (option, p) in enumerate(zip(question.options, shares, strict=True))
    ]
    likeliest, mean = listed[scores.numbers[0]]["value"], sum(i * p for i, p in enumerate(shares))
    answer[question.type] = likeliest if question.type == "choice" else mean
    return answer | {"probabilities": listed, "confidence": max(shares) * scores.mass}
