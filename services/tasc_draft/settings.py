"""Drafting settings of a task."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from tasc_draft.drafts import NGRAM_SOURCES, DraftError

MIXTURES = ("mixed", "tasc", "trie")
# The minimum and the maximum of each numeric setting.
RANGES: Final[Mapping[str, tuple[float, float]]] = {
    "num_speculative_tokens": (0, 256),
    "min_prob": (0, 1),
    "n_max": (2, 16),
    "p_min": (1, 2**31 - 1),
    "corpus_weight": (0, 1),
    "prefix": (1, 8),
    "neighbours": (0, 256),
    "neighbour_tokens": (0, 1 << 20),
    "recent_tokens": (0, 1 << 20),
    "learning_rate": (0, 1),
}


@dataclass(frozen=True)
class DraftSettings:
    """Settings of the n-gram proposer.

    Attributes:
        mixture: ``mixed`` weighs the evidence of all sources by learnt weights. ``tasc`` is
            TASC-spec (Tsur et al. 2026, arXiv 2602.24174, section 5.2). ``trie`` is the N-Gram
            Trie, which drafts the most frequent continuations in the prompt.
        num_speculative_tokens: Maximum number of draft tokens of one row; 0 turns drafting off. For
            rows with another proposer's draft (an external tree): the maximum depth of the draft.
        min_prob: Minimum probability of a drafted path, in [0, 1]; not applied to rows with an
            external tree. If compute is scarce, as on a CPU, verifying an unlikely token costs more
            than it gains.
        n_max: ``tasc``: length of the longest n-gram, so that a context has at most ``n_max - 1``
            tokens. ``trie``: maximum number of tokens of the matched prefix and the path after it
            together.
        p_min: ``tasc``: minimum count of an n-gram of the corpus that is used.
        corpus_weight: ``tasc``: lambda, the weight of the corpus against the prompt, in [0, 1].
        prefix: ``trie``: length of the longest suffix of the answer that is searched for in the
            prompt (L_p).
        neighbours: ``mixed``: number of training rows with the most similar prompts whose outputs
            are used.
        neighbour_tokens: ``mixed``: space for these outputs, in tokens per row.
        recent_tokens: ``mixed``: space for the latest finished answers of all rows together, in
            tokens of 8 bytes each; 0 keeps none.
        sources: ``mixed``: the sources in use.
        learning_rate: ``mixed``: how fast the weights adapt to the target's answers; 0 keeps them
            as they are.

    Raises:
        DraftError: A value is outside its range.
    """

    mixture: str = "mixed"
    num_speculative_tokens: int = 16
    min_prob: float = 0.2
    n_max: int = 6
    p_min: int = 1
    corpus_weight: float = 0.75
    prefix: int = 3
    neighbours: int = 32
    neighbour_tokens: int = 4096
    recent_tokens: int = 65_536
    learning_rate: float = 0.1
    sources: tuple[str, ...] = NGRAM_SOURCES

    def __post_init__(self) -> None:
        if self.mixture not in MIXTURES:
            raise DraftError(f"mixture is {self.mixture!r}; it must be one of {MIXTURES}")
        # JSON has lists, which are not hashable.
        object.__setattr__(self, "sources", tuple(self.sources))
        if unknown := set(self.sources) - set(NGRAM_SOURCES):
            raise DraftError(f"sources {sorted(unknown)} are unknown; known are {NGRAM_SOURCES}")
        for name, (minimum, maximum) in RANGES.items():
            _within(name, getattr(self, name), minimum, maximum)
        if self.mixture == "tasc":
            _within("n_max", self.n_max, 2, 9)  # contexts are compared up to 8 tokens

    @classmethod
    def published(cls, mixture: str) -> "DraftSettings":
        """The published settings of ``tasc`` (p_min 5) or ``trie`` (n 13, L_p 3).

        Raises:
            DraftError: ``mixture`` is neither.
        """
        if mixture == "tasc":
            return cls(mixture="tasc", p_min=5, min_prob=0.0)
        if mixture == "trie":
            return cls(mixture="trie", n_max=13, num_speculative_tokens=32, min_prob=0.0)
        raise DraftError(f"{mixture!r} has no published settings; only tasc and trie have them")


def _within(name: str, value: float, minimum: float, maximum: float) -> None:
    if not minimum <= value <= maximum:
        raise DraftError(f"{name} is {value}; it must lie between {minimum} and {maximum}")
