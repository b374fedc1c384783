"""How a task is drafted: a mixture by name and its few numbers, validated. No input or output."""

from dataclasses import dataclass

from tasc_draft.drafts import NGRAM_SOURCES

MIXTURES = ("mixed", "tasc", "trie")


@dataclass(frozen=True)
class DraftSettings:
    """Settings of the n-gram proposer.

    Attributes:
        mixture: ``mixed`` weighs the evidence of all sources by learnt weights; ``tasc`` is
            TASC-spec (Tsur et al. 2026, arXiv 2602.24174, section 5.2); ``trie`` the N-Gram Trie's
            frequency order over the prompt.
        num_speculative_tokens: Most draft tokens of one row, and with a guest the depth of its
            tree; 0 turns drafting off.
        min_prob: No path is drafted whose probability is below this, in [0, 1]. Verifying an
            unlikely token costs more than it gains where compute is scarce, as on a CPU. Rows
            with a guest's draft do without.
        n_max: ``tasc``: longest n-gram, so that a context is at most ``n_max - 1`` tokens;
            ``trie``: tokens from the matched prefix's begin to the path's end.
        p_min: ``tasc``: least count at which an n-gram of the corpus is kept.
        corpus_weight: ``tasc``: lambda, the weight of the corpus against the prompt, in [0, 1].
        prefix: ``trie``: longest suffix of the answer that is looked for in the prompt (L_p).
        neighbours: ``mixed``: training rows with the most similar prompts, whose outputs count.
        neighbour_tokens: ``mixed``: room for their outputs, in tokens of a row.
        recent_tokens: ``mixed``: room for answers finished since the index was built, in tokens
            of all rows; 0 keeps none. 8 bytes each.
        sources: ``mixed``: the sources that are asked.
        learning_rate: ``mixed``: how fast the weights follow the target's answers; 0 freezes them.

    Raises:
        ValueError: A value is outside its range.
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
            raise ValueError(f"mixture is {self.mixture!r}; it must be one of {MIXTURES}")
        # A list, as JSON has it, would make the settings unhashable.
        object.__setattr__(self, "sources", tuple(self.sources))
        if unknown := set(self.sources) - set(NGRAM_SOURCES):
            raise ValueError(f"sources {sorted(unknown)} are unknown; there are {NGRAM_SOURCES}")
        _within("num_speculative_tokens", self.num_speculative_tokens, 0, 256)
        _within("min_prob", self.min_prob, 0.0, 1.0)
        _within("n_max", self.n_max, 2, 16)
        if self.mixture == "tasc":
            _within("n_max", self.n_max, 2, 9)  # contexts are compared up to 8 tokens
        _within("p_min", self.p_min, 1, 2**31 - 1)
        _within("corpus_weight", self.corpus_weight, 0.0, 1.0)
        _within("prefix", self.prefix, 1, 8)
        _within("neighbours", self.neighbours, 0, 256)
        _within("neighbour_tokens", self.neighbour_tokens, 0, 1 << 20)
        _within("recent_tokens", self.recent_tokens, 0, 1 << 20)
        _within("learning_rate", self.learning_rate, 0.0, 1.0)

    @classmethod
    def published(cls, mixture: str) -> "DraftSettings":
        """The settings a method was published with: ``tasc`` (p_min 5) or ``trie`` (n 13, L_p 3).

        Raises:
            ValueError: It is neither.
        """
        if mixture == "tasc":
            return cls(mixture="tasc", p_min=5, min_prob=0.0)
        if mixture == "trie":
            return cls(mixture="trie", n_max=13, num_speculative_tokens=32, min_prob=0.0)
        raise ValueError(f"{mixture!r} was not published; tasc and trie were")


def _within(name: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:
        raise ValueError(f"{name} is {value}; it must lie between {least} and {most}")
