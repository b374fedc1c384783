"""What goes into the engine and what comes out: frozen values, no tensors, no HTTP."""

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "error"]


@dataclass(frozen=True)
class GenerationRequest:
    """One prompt to be answered by greedy decoding.

    Attributes:
        id: Unique among the requests the engine holds.
        prompt: Token ids, without the document mark the drafter adds.
        max_tokens: Most tokens the answer may have, end-of-sequence included; at least 1.
        stop: Strings that end the answer; the text is cut before the first of them.
        draft: Whether drafts may be proposed for this row. The answer is the same either way.
        stream: Whether each step's delta carries its text, rather than the last one all of it.

    Raises:
        ValueError: The prompt is empty, ``max_tokens`` is below 1 or a stop string is empty.
    """

    id: str
    prompt: tuple[int, ...]
    max_tokens: int
    stop: tuple[str, ...] = ()
    draft: bool = True
    stream: bool = False

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ValueError(f"request {self.id}: the prompt has no tokens; send at least one")
        if self.max_tokens < 1:
            raise ValueError(f"request {self.id}: max_tokens is {self.max_tokens}; least is 1")
        if any(not s for s in self.stop):
            raise ValueError(f"request {self.id}: a stop string is empty; leave it out")


@dataclass(frozen=True)
class Timings:
    """Seconds of one request, each measured from its arrival in the engine."""

    queued: float
    first_token: float
    total: float


@dataclass(frozen=True)
class Acceptance:
    """How drafting went for one request.

    Attributes:
        steps: Target forwards of this row that could emit, the last prefill chunk included.
        drafted: Draft tokens proposed at each step.
        accepted: Draft tokens kept at each step; the bonus token is not counted.
    """

    drafted: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()

    @property
    def steps(self) -> int:
        return len(self.drafted)


@dataclass(frozen=True)
class GenerationResult:
    """A finished answer.

    Attributes:
        tokens: Emitted token ids, end-of-sequence included when the model said it.
        text: The decoded answer, without end-of-sequence and cut before a stop string.
        error: Why the answer broke off, where ``finish_reason`` is ``error``.
    """

    id: str
    tokens: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    prompt_tokens: int
    timings: Timings
    acceptance: Acceptance = field(default_factory=Acceptance)
    error: str | None = None


@dataclass(frozen=True)
class Delta:
    """Text and tokens one step added to one row; the last one carries the result."""

    id: str
    tokens: tuple[int, ...]
    text: str
    result: GenerationResult | None = None
