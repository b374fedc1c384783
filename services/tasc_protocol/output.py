"""The outputs of a request: the tokens and texts of each step, and finally the result.

An engine makes an `Output` in each step of a row. A replica adds the tokens' texts as clients see
them, and sends the `Output` to the gateway, which turns it into JSON, an event or a row.
"""

import math
from typing import Any, Final, Literal, TypeAlias

import msgspec

FinishReason = Literal["stop", "length", "error"]
LEAST_LOGPROB: Final = -9999.0  # OpenAI's value for impossible tokens, as JSON has no infinity


def finite(logprob: float) -> float:
    """Returns a log-probability that JSON can express."""
    return max(logprob, LEAST_LOGPROB)


def token_name(utf8: bytes) -> str:
    """Returns a token's text; for a part of a character, its bytes as OpenAI writes them."""
    try:
        return utf8.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in utf8)


def _entry(utf8: bytes, logprob: float) -> dict[str, Any]:
    return {"token": token_name(utf8), "logprob": finite(logprob), "bytes": list(utf8)}


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """The log-probability of an answer's token in the target's logits, before any rule or guide.

    Attributes:
        logprob: Natural logarithm of the token's probability.
        top: The most likely tokens at its position, in descending order: ids and
            log-probabilities.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class TokenText(msgspec.Struct, frozen=True, array_like=True):
    """One emitted token with its text and log-probability, as clients see it.

    Attributes:
        utf8: The bytes that the token adds to a text; they may be a part of a character.
        logprob: Natural logarithm of the token's probability; None for the first prompt token.
        offset: Number of characters of the answer before the token; with ``echo``, the prompt's
            characters count too.
        top: The most likely tokens at its position, in descending order: bytes and
            log-probabilities.
    """

    utf8: bytes
    logprob: float | None
    offset: int
    top: tuple[tuple[bytes, float], ...] = ()

    @property
    def as_json(self) -> dict[str, Any]:
        """The token in OpenAI's format: ``token``, ``logprob``, ``bytes``, ``top_logprobs``."""
        likeliest = [_entry(utf8, logprob) for utf8, logprob in self.top]
        return {**_entry(self.utf8, self.logprob or 0.0), "top_logprobs": likeliest}


class Timings(msgspec.Struct, frozen=True, array_like=True):
    """Seconds of one request, each measured from its arrival in the engine."""

    queued: float
    first_token: float
    total: float


class Acceptance(msgspec.Struct, frozen=True, array_like=True):
    """Draft tokens of one request and how many were accepted.

    Attributes:
        drafted: Number of draft tokens proposed at each step.
        accepted: Number of accepted draft tokens at each step, without the bonus token.
    """

    drafted: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()

    @property
    def steps(self) -> int:
        """Number of target forwards of this row that could emit, including the last prefill."""
        return len(self.drafted)


class LabelScores(msgspec.Struct, frozen=True, array_like=True):
    """The scored choices of a request with `Scoring`, the most likely first.

    Attributes:
        labels: The choices.
        numbers: Their indices among all choices.
        logprobs: Natural logarithm of the probability that the answer is the choice, with its end,
            in the target's own distribution; without the tokens with which all choices begin, whose
            probability is the same for all.
        total: Natural logarithm of the sum for all scored choices, also those that ``top_k`` left
            out, with ``temperature`` and ``biases``.
        unseen: Upper limit of the share of all choices that the choices that were not scored have.
        count: Number of all choices.
        temperature: Divisor of ``logprobs`` for ``probabilities``; 1 unless they are calibrated.
        biases: Added to the quotient of each of ``labels`` for ``probabilities``; empty unless they
            are calibrated with biases.
        mass: Sum of the probabilities of the scored choices in the target's own distribution; None
            unless `Scoring.mass` is set.
    """

    labels: tuple[str, ...]
    numbers: tuple[int, ...]
    logprobs: tuple[float, ...]
    total: float
    unseen: float
    count: int
    temperature: float = 1.0
    biases: tuple[float, ...] = ()
    mass: float | None = None

    @property
    def probabilities(self) -> list[float]:
        """The share of each of ``labels`` among the scored choices.

        The true share, among all choices, differs by at most ``unseen``.
        """
        pairs = zip(self.logprobs, self.biases or (0.0,) * len(self.logprobs), strict=True)
        return [math.exp(each / self.temperature + bias - self.total) for each, bias in pairs]


class GenerationResult(msgspec.Struct, frozen=True, array_like=True):
    """A finished answer.

    Attributes:
        tokens: Emitted token ids, including end-of-sequence if the model emitted it.
        text: The decoded answer, without end-of-sequence and cut before a stop string.
        error: Why the answer broke off, if ``finish_reason`` is ``error``.
        logprobs: One for each token, if requested; committed tokens have none. If the prompt's
            log-probabilities are requested, they come first.
        index_version: Version of the draft index when the answer ended, set by a replica.
        committed: Number of tokens that another engine generated; timings and acceptance describe
            only the other tokens.
        scores: The scored choices of a request with `Scoring`; its ``text`` is the likeliest.
    """

    id: str
    tokens: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    prompt_tokens: int
    timings: Timings
    acceptance: Acceptance = Acceptance()
    error: str | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    index_version: int | None = None
    committed: int = 0
    scores: LabelScores | None = None


class Output(msgspec.Struct, frozen=True, array_like=True):
    """Tokens and text that a step added to one answer; the last output has the result.

    Attributes:
        id: Id of the request.
        tokens: Token ids.
        text: Text; empty until the last output if the request does not stream.
        logprobs: One for each token, set by an engine; a replica replaces them by ``token_texts``.
        token_texts: The tokens as clients see them, if log-probabilities were requested.
        record_version: Version of the task's record with which the answer began.
    """

    id: str
    tokens: tuple[int, ...] = ()
    text: str = ""
    result: GenerationResult | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    token_texts: tuple[TokenText, ...] = ()
    record_version: int | None = None


Whole: TypeAlias = tuple[GenerationResult, tuple[TokenText, ...]]
"""A whole answer, and its tokens as clients see them if log-probabilities were requested."""
