"""Requests to the engine: frozen values without tensors or HTTP."""

from dataclasses import dataclass, field

from tasc_protocol import GuideSpec, Sampling
from tasc_protocol.request import MOST_LOGPROBS


@dataclass(frozen=True)
class GenerationRequest:
    """One prompt to answer.

    Attributes:
        id: Id, unique among the requests that the engine holds.
        prompt: Token ids, without the document mark that the drafter adds.
        max_tokens: Maximum number of tokens of the answer, including the end of sequence; at least
            1.
        stop: Strings that end the answer; the text is cut before the first of them.
        keep_stop: Whether the text is cut after that string instead.
        stop_ids: Tokens that end the answer and belong to it, as an end of sequence does.
        min_tokens: Minimum number of tokens of the answer; only the guide may end it earlier.
        draft: Whether drafts may be proposed for this row. The answer is the same either way.
            Answers without drafts are not used for drafts of other rows.
        stream: Whether each step's delta has its text; otherwise the last one has all of it.
        sampling: The rule by which tokens are chosen.
        guide: Limits of the answer; unset: none.
        logprobs: Number of the likeliest tokens to return at each place, with their
            log-probabilities and that of the chosen token; unset: no log-probabilities.
        prompt_logprobs: Whether to return these also for the prompt's tokens, from the second one
            on.
        ignore_eos: Whether the answer continues after an end of sequence.
        adapter: Name of the target's adapter that answers; unset: none.
        committed_ids: Tokens of the answer that another engine has already given. The rest is what
            that engine would have generated, and only the rest is returned.

    Raises:
        ValueError: The prompt is empty, ``max_tokens`` is below 1, a stop string is empty, a guide
            is combined with ``ignore_eos`` or ``min_tokens``, or nothing is left to generate.
    """

    id: str
    prompt: tuple[int, ...]
    max_tokens: int
    stop: tuple[str, ...] = ()
    keep_stop: bool = False
    stop_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    draft: bool = True
    stream: bool = False
    sampling: Sampling = field(default_factory=Sampling)
    guide: GuideSpec | None = None
    logprobs: int | None = None
    prompt_logprobs: bool = False
    ignore_eos: bool = False
    adapter: str | None = None
    committed_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ValueError(f"request {self.id}: the prompt has no tokens; send at least one")
        if self.max_tokens < 1:
            raise ValueError(f"request {self.id}: max_tokens is {self.max_tokens}; least is 1")
        if len(self.committed_ids) >= self.max_tokens:
            raise ValueError(
                f"request {self.id}: {len(self.committed_ids)} tokens are committed and max_tokens "
                f"is {self.max_tokens}; nothing is left to generate"
            )
        if any(not s for s in self.stop):
            raise ValueError(f"request {self.id}: a stop string is empty; leave it out")
        if self.logprobs is not None and not 0 <= self.logprobs <= MOST_LOGPROBS:
            raise ValueError(
                f"request {self.id}: logprobs is {self.logprobs}; it goes from 0 to {MOST_LOGPROBS}"
            )
        if self.prompt_logprobs and self.logprobs is None:
            raise ValueError(f"request {self.id}: prompt_logprobs needs logprobs; say how many")
        if self.guide and (self.ignore_eos or self.min_tokens):
            field = "ignore_eos" if self.ignore_eos else "min_tokens"
            raise ValueError(
                f"request {self.id}: a guided answer ends with its guide; leave {field} out"
            )

    def require_ids(self, size: int) -> None:
        """Raises ValueError for an id outside a vocabulary of this size."""
        for name, ids in (
            ("the prompt", self.prompt),
            ("committed_ids", self.committed_ids),
            ("stop_ids", self.stop_ids),
            ("logit_bias", tuple(i for i, _ in self.sampling.logit_bias)),
        ):
            ends = max(ids, default=0), min(ids, default=0)
            if unknown := [i for i in ends if not 0 <= i < size]:
                raise ValueError(f"{name} has id {unknown[0]}; ids go from 0 to {size - 1}")
