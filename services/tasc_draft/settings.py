"""How a task is drafted: the few numbers of TASC-spec, validated. No input or output here."""

from dataclasses import dataclass


@dataclass(frozen=True)
class DraftSettings:
    """Settings of TASC-spec (Tsur et al. 2026, arXiv 2602.24174, section 5.2).

    Attributes:
        n_max: Longest n-gram of both models; a context is at most ``n_max - 1`` tokens.
        p_min: Least count at which an n-gram of the corpus is kept.
        corpus_weight: The paper's lambda, the weight of the corpus against the prompt, in [0, 1].
        num_speculative_tokens: Longest draft of one row, in tokens; 0 turns drafting off.
        min_prob: A draft ends where its path probability falls below this, in [0, 1]. Verifying an
            unlikely token costs more than it gains where compute is scarce, as on a CPU.

    Raises:
        ValueError: A value is outside its range.
    """

    n_max: int = 6
    p_min: int = 1
    corpus_weight: float = 0.75
    num_speculative_tokens: int = 8
    min_prob: float = 0.2

    def __post_init__(self) -> None:
        _within("n_max", self.n_max, 2, 16)
        _within("p_min", self.p_min, 1, 2**31 - 1)
        _within("corpus_weight", self.corpus_weight, 0.0, 1.0)
        _within("num_speculative_tokens", self.num_speculative_tokens, 0, 64)
        _within("min_prob", self.min_prob, 0.0, 1.0)


def _within(name: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:
        raise ValueError(f"{name} is {value}; it must lie between {least} and {most}")
