"""Sampling parameters of one request, and the random numbers that they determine.

`compiled_sampler` applies the parameters on a CPU, and `tensor_sampler` on a GPU.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MOST_BIASES = 1024  # of one request
MOST_BIAS = 10_000.0  # enough to force or forbid a token; sums stay finite
_MOST_SEED = 2**64
_BLOCK = 4  # numbers that Philox generates per counter value


@dataclass(frozen=True)
class Sampling:
    """The rule by which the target's token is chosen at each position of an answer.

    Applied in this order to the logits: ``logit_bias``, penalties, what a guide allows,
    ``temperature``, ``min_p``, ``top_k``, ``top_p``.

    Attributes:
        temperature: 0 takes the greatest logit, the first of equal ones. Above 0, tokens are drawn
            from the softmax of the logits divided by the temperature.
        top_p: Draw from the smallest set of the most likely tokens whose probabilities sum to this
            value (Holtzman et al. 2020, arXiv 1904.09751).
        top_k: Draw from this many of the most likely tokens; 0 for all.
        min_p: Draw from tokens with at least this fraction of the highest probability (Nguyen et
            al. 2024, arXiv 2407.01082).
        repetition_penalty: Divides positive and multiplies negative logits of tokens that are in
            the prompt or the answer so far (Keskar et al. 2019, arXiv 1909.05858).
        presence_penalty: Subtracted from logits of tokens that are in the answer so far.
        frequency_penalty: Subtracted once for each occurrence of a token in the answer so far.
        logit_bias: Token ids, and the number added to the logit of each.
        seed: Equal requests with the same seed get the same answer.
        prompt: Index of the prompt in its request.
        choice: Index of the answer among the ``n`` answers to its prompt.

    Raises:
        ValueError: A value is out of its range, or not a number.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    prompt: int = 0
    choice: int = 0

    def __post_init__(self) -> None:
        for name in ("top_k", "seed", "prompt", "choice"):
            if type(getattr(self, name)) is not int:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be an integer")
        for name, least, most in (
            ("temperature", 0.0, 100.0),
            ("top_p", 0.0, 1.0),
            ("min_p", 0.0, 1.0),
            ("top_k", 0, 2**31 - 1),
            ("repetition_penalty", 0.0, 100.0),
            ("presence_penalty", -100.0, 100.0),
            ("frequency_penalty", -100.0, 100.0),
            ("seed", 0, _MOST_SEED - 1),
            ("prompt", 0, 2**32 - 1),
            ("choice", 0, 2**32 - 1),
        ):
            value = getattr(self, name)
            if not least <= value <= most:
                raise ValueError(f"{name} is {value}; it goes from {least} to {most}")
        for name in ("top_p", "repetition_penalty"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be above 0")
        if len(self.logit_bias) > MOST_BIASES:
            raise ValueError(f"logit_bias has {len(self.logit_bias)} tokens; at most {MOST_BIASES}")
        if len({token for token, _ in self.logit_bias}) < len(self.logit_bias):
            raise ValueError("logit_bias has a token twice; add its values up")
        for token, value in self.logit_bias:
            if not abs(value) <= MOST_BIAS:
                raise ValueError(
                    f"logit_bias of token {token} is {value}; it goes from -{MOST_BIAS:g} to "
                    f"{MOST_BIAS:g}"
                )

    @property
    def penalises(self) -> bool:
        """Whether earlier tokens change the choice of later ones."""
        off = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return off != (1.0, 0.0, 0.0)

    @property
    def plain(self) -> bool:
        """Whether the greatest of the target's unchanged logits is taken."""
        return self.temperature == 0 and not self.penalises and not self.logit_bias


def uniforms(sampling: Sampling, begin: int, n: int) -> NDArray[np.float64]:
    """Returns ``float64[n]`` random numbers in [0, 1) for output positions from ``begin`` on.

    They depend only on seed, prompt, choice and position: a counter-based generator (Philox; Salmon
    et al. 2011) has no state that drafts or other requests could change.
    """
    key = np.array([sampling.seed, sampling.prompt << 32 | sampling.choice], np.uint64)
    stream = np.random.Philox(key=key)
    block, skip = divmod(begin, _BLOCK)
    stream.advance(block)
    raw = stream.random_raw(skip + n)[skip:]
    return (raw >> np.uint64(11)).astype(np.float64) * 2.0**-53


@dataclass(frozen=True)
class TokenLogprob:
    """The log-probability of an answer's token in the target's logits, before any rule or guide.

    Attributes:
        logprob: Natural logarithm of its probability.
        top: The most likely tokens of its position, most likely first: ids and log-probabilities.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
