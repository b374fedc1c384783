"""What a request asks for beside its prompt, on its way to a replica, and over what its task says.

Values only: it reads no HTTP, compiles no guide and samples nothing.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

from tasc_engine import GuideSpec, Sampling
from tasc_store import SamplingDefaults, TaskRecord

_SHOWN = 64  # characters of a text in an error
_OWN = {"choice": "choices", "json_schema": "schema", "regex": "regex", "grammar": "grammar"}
_DEFAULTED = tuple(field.name for field in dataclasses.fields(SamplingDefaults))


class FieldError(ValueError):
    """A request cannot be answered as it is.

    Attributes:
        field: The request field at fault.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


@dataclass(frozen=True)
class AnswerGuide:
    """What an answer may be.

    Attributes:
        field: The request field that says so; ``model`` for the guide of the task itself.
    """

    spec: GuideSpec
    field: str

    @property
    def name(self) -> str:
        """What messages call it."""
        return f"the task's {_OWN[self.spec.kind]}" if self.is_tasks else self.field

    @property
    def is_tasks(self) -> bool:
        return self.field == "model"

    def require_whole(self, stops: tuple[str, ...]) -> None:
        """Raise FieldError where a stop string would cut a choice."""
        for stop in stops:
            if cut := next((choice for choice in self.spec.choices if stop in choice), None):
                raise FieldError(
                    "stop",
                    f"stop has {stop[:_SHOWN]!r}, which is in {cut[:_SHOWN]!r} of {self.name} and "
                    "would cut it; leave it out",
                )


@dataclass(frozen=True)
class SamplingOptions:
    """How one answer is wanted; None leaves a value to the task.

    Attributes:
        seed: Same seed, same answer.
        prompt: Which of the prompts with this seed it is.
        choice: Which of the answers to one prompt this is.
        guide: What the answer may be.
        logprobs: How many of the likeliest tokens to tell at each place; unset: no logprobs.
        adapter: Which of the task's adapters answers; unset: its first.

    Raises:
        FieldError: A guide meets ``ignore_eos``.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    prompt: int = 0
    choice: int = 0
    guide: AnswerGuide | None = None
    logprobs: int | None = None
    ignore_eos: bool = False
    adapter: str | None = None

    def __post_init__(self) -> None:
        if self.guide and self.ignore_eos:
            raise FieldError(
                "ignore_eos",
                f"ignore_eos meets {self.guide.name}, whose guide ends the answer; leave it out",
            )

    def guided(self, record: TaskRecord) -> "SamplingOptions":
        """With the task's own guide, where the request brings none.

        Raises:
            FieldError: It meets ``ignore_eos``.
        """
        return self if self.guide else dataclasses.replace(self, guide=guide_of(record))

    def adapter_of(self, record: TaskRecord) -> str | None:
        """The name of the adapter that answers; None for a task without several.

        Raises:
            FieldError: The task has none of that name.
        """
        known = record.adapter_names
        if self.adapter is None:
            return known[0] if known else None
        if self.adapter not in known:
            if known:
                way_out = f"has {', '.join(known)}: name one of them"
            else:
                way_out = "has no adapters to choose from: leave it out"
            message = f"adapter is {self.adapter!r}; task {record.name} {way_out}"
            raise FieldError("adapter", message)
        return self.adapter

    def sampling(self, task: SamplingDefaults) -> Sampling:
        """The rule for this answer: what the request leaves open is the task's, else neutral.

        Raises:
            ValueError: A value is out of its range.
        """
        asked = {name: getattr(self, name) for name in _DEFAULTED}
        rule: dict[str, Any] = task.given | {k: v for k, v in asked.items() if v is not None}
        own = {name: getattr(self, name) for name in ("logit_bias", "seed", "prompt", "choice")}
        return Sampling(**rule, **own)


def guide_of(record: TaskRecord) -> AnswerGuide | None:
    """What a task's own answers may be; None for anything."""
    if record.choices:
        return AnswerGuide(GuideSpec("choice", choices=record.choices), "model")
    if record.schema:
        return AnswerGuide(GuideSpec("json_schema", text=record.schema), "model")
    return AnswerGuide(GuideSpec("regex", text=record.regex), "model") if record.regex else None
