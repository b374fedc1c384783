"""``POST /v1/classify``: labels with their probabilities, in the shape of vLLM's clients."""

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from tasc_protocol import FieldError, GenerationResult, GuideSpec, Request, Scoring, Whole
from tasc_protocol.request import MOST_CHOICES, MOST_SCORING_STEPS
from tasc_runtime.sampling_options import Number
from tasc_serve.http.schemas import HarmlessFields
from tasc_serve.http_errors import ApiError


def _listed(sent: Any) -> Any:
    return [sent] if isinstance(sent, str) else sent


_Texts = Annotated[
    list[str],
    Field(min_length=1, fail_fast=True),
    BeforeValidator(_listed, json_schema_input_type=str | list[str]),
]
_Share = Annotated[Number, Field(ge=0, le=1)]


class ClassifyRequest(HarmlessFields):
    """Each input is put into the task's template, like a user message."""

    unsupported: ClassVar = {
        "multi": (False,),
        "prior": ("uniform",),
    }  # only calibrations have priors

    model: str = Field(max_length=256, description="the task's name")
    input: _Texts = Field(description="one or several texts")
    labels: Annotated[list[str], Field(min_length=1, max_length=MOST_CHOICES, fail_fast=True)] | (
        None
    ) = Field(None, description="extension: unset: the task's choices")
    end: str | None = Field(
        None,
        max_length=1024,
        description="extension: the text behind each label, for models whose answers go on there; "
        "empty: nothing; unset: the task's label_end, else an end of sequence",
    )
    exact: bool = Field(False, description="extension: whether every label is scored")
    tolerance: Annotated[Number, Field(ge=0, lt=1)] = Field(
        Scoring.tolerance,
        description="extension: without exact, the share of all labels that may be left out",
    )
    max_steps: Annotated[int, Field(ge=1, le=MOST_SCORING_STEPS)] = Field(
        Scoring.max_steps, description="extension: without exact, maximum forward passes of a text"
    )
    top_k: Annotated[int, Field(ge=1)] | None = Field(
        None, description="extension: number of likeliest labels to report; unset: all"
    )
    abstain_below: _Share | None = Field(
        None,
        description="extension: the label is null if the likeliest has a lower probability; unset: "
        "the task's abstain_below",
    )
    abstain_label: str | None = Field(
        None,
        max_length=1024,
        description="extension: the label in place of null; unset: the task's abstain_label",
    )
    adapter: str | None = Field(
        None, max_length=64, description="extension: which of the task's adapters; unset: the first"
    )
    draft: bool = Field(
        True,
        description="extension: whether drafts say where to begin; without them, equal requests "
        "score the same labels",
    )
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=2**31)] | None = Field(
        None, description="extension: number of last prompt tokens to keep"
    )
    timeout: Annotated[Number, Field(gt=0)] | None = Field(
        None, description="extension: maximum seconds, up to the service's limit"
    )
    stream: Literal[False] = False

    n: ClassVar[None] = None
    limit: ClassVar[None] = None
    limit_field: ClassVar = "labels"
    logprob_count: ClassVar[None] = None

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        return [*self.input]

    @property
    def prompt_count(self) -> int:
        return len(self.input)

    def request(self, logprobs: int | None, seed: int | None = None) -> Request:
        """Returns the request for the first input, without its id and prompt.

        Raises:
            FieldError: There are too many labels, or they are too large.
        """
        guide = None
        if self.labels is not None:
            try:
                guide = GuideSpec("choice", tuple(self.labels), field="labels")
            except ValueError as error:
                raise FieldError("labels", f"labels: {error}") from error
        return Request(
            draft=self.draft,
            seed=secrets.randbits(64) if seed is None else seed,
            guide=guide,
            adapter=self.adapter,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            scoring=Scoring(
                end=self.end,
                exact=self.exact,
                tolerance=self.tolerance,
                max_steps=self.max_steps,
                abstain_below=self.abstain_below,
                top_k=self.top_k,
                abstain_label=self.abstain_label,
            ),
        )


@dataclass(frozen=True)
class ClassifyReply:
    """Formats the classifications of one request."""

    body: ClassifyRequest
    task: str
    requests: Sequence[Request]
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, answers: Sequence[Whole]) -> dict[str, Any]:
        """The body of the response, with one entry for each input, in order."""
        results = [result for result, _ in answers]
        prompts = sum(result.prompt_tokens for result in results)
        return {
            "id": f"classify-{self.requests[0].response_id}",
            "object": "list",
            "created": self.created,
            "model": self.task,
            "data": [{"index": at, **self._entry(result)} for at, result in enumerate(results)],
            "usage": {"prompt_tokens": prompts, "completion_tokens": 0, "total_tokens": prompts},
        }

    def _entry(self, result: GenerationResult) -> dict[str, Any]:
        scores = result.scores
        if scores is None:
            raise ApiError(503, "a replica is too old to score labels; try again after its upgrade")
        probabilities = probs = scores.probabilities
        if self.body.top_k is None:
            probs = [0.0] * scores.count
            for at, probability in zip(scores.numbers, probabilities, strict=True):
                probs[at] = probability
        pairs = zip(scores.labels, probabilities, strict=True)
        return {
            "label": result.text or None,
            "probs": probs,
            "num_classes": scores.count,
            "probabilities": [{"label": label, "probability": p} for label, p in pairs],
            "unseen_mass": scores.unseen,
            "calibrated": scores.temperature != 1 or bool(scores.biases),
        }
