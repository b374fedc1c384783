"""How a neural proposer drafts: its tree's few numbers, validated. No input or output."""

from dataclasses import dataclass

from tasc_engine.layout import MOST_NODES


@dataclass(frozen=True)
class NeuralSettings:
    """The tree of one draft (EAGLE-2: Li et al. 2024, arXiv 2406.16858).

    Attributes:
        depth: Levels, each but the last a forward of the drafter. MicroSpec has 5, FR-Spec 6,
            VocabTrim 3.
        width: Nodes of a level that are expanded, and children of each that are looked at.
        nodes: Most draft tokens of one row, the likeliest paths of all that were looked at.
        min_prob: No path is drafted whose probability is below this, in [0, 1].

    Raises:
        ValueError: A value is outside its range, or the levels have more nodes than a step holds.
    """

    depth: int = 5
    width: int = 10
    nodes: int = 60
    min_prob: float = 0.0

    def __post_init__(self) -> None:
        for name, least, most in (("depth", 1, 16), ("width", 1, 32), ("nodes", 1, MOST_NODES)):
            if not least <= getattr(self, name) <= most:
                raise ValueError(
                    f"{name} is {getattr(self, name)}; it must lie between {least} and {most}"
                )
        if not 0.0 <= self.min_prob <= 1.0:
            raise ValueError(f"min_prob is {self.min_prob}; it must lie between 0 and 1")
        if (self.depth - 1) * self.width > MOST_NODES:
            raise ValueError(
                f"depth {self.depth} and width {self.width} expand {(self.depth - 1) * self.width} "
                f"nodes, a row's tree holds {MOST_NODES}; lower one of them"
            )
