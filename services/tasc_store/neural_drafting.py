"""How a task is drafted by a model of its own, as its record says it. It opens no folder."""

from dataclasses import dataclass
from typing import Literal

_WHOLE = {"ranked_tokens": 1 << 24, "depth": 16, "width": 32, "nodes": 63}
_CHOICES = {
    "proposer": ("neural", "hybrid"),
    "vocabulary": ("full", "ranked", "recent", "recent+ranked"),
}


@dataclass(frozen=True)
class NeuralDrafting:
    """A drafter and how it drafts.

    Attributes:
        drafter: Folder or hub name of what `tasc train-drafter` makes.
        proposer: ``neural`` drafts by it alone, ``hybrid`` by it and by n-grams in one tree.
        vocabulary: What is drafted from: ``full`` every token, ``ranked`` the most frequent of the
            task's answers, ``recent`` those of a row's latest context, ``recent+ranked`` both.
        ranked_tokens: How many are taken of the ranking.
        depth: Levels of a draft's tree.
        width: Nodes of a level that are expanded.
        nodes: Most draft tokens of a row's step, in a hybrid the drafter's own.
        sure: Hybrid: the drafter is asked where the n-grams' likeliest token has less probability.

    Raises:
        ValueError: A value is of the wrong kind or outside its range.
    """

    drafter: str
    proposer: Literal["neural", "hybrid"] = "hybrid"
    vocabulary: Literal["full", "ranked", "recent", "recent+ranked"] = "full"
    ranked_tokens: int = 4096
    depth: int = 5
    width: int = 10
    nodes: int = 32
    sure: float = 0.9

    def __post_init__(self) -> None:
        if not isinstance(self.drafter, str) or not self.drafter:
            raise ValueError(f"drafter is {self.drafter!r}; it must be a folder or a hub name")
        for name, allowed in _CHOICES.items():
            if (value := getattr(self, name)) not in allowed:
                raise ValueError(f"{name} is {value!r}; use one of {', '.join(allowed)}")
        for name, most in _WHOLE.items():
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= most:
                raise ValueError(f"{name} is {value!r}; it must be an integer from 1 to {most}")
        if (self.depth - 1) * self.width > _WHOLE["nodes"]:
            raise ValueError(
                f"depth {self.depth} and width {self.width} expand {(self.depth - 1) * self.width} "
                f"nodes; the most is {_WHOLE['nodes']}, so lower one of them"
            )
        if type(self.sure) not in (int, float) or not 0 <= self.sure <= 1:
            raise ValueError(f"sure is {self.sure!r}; it must be a number from 0 to 1")

    @property
    def is_ranked(self) -> bool:
        """Whether it needs a ranking of the task's tokens."""
        return self.vocabulary in ("ranked", "recent+ranked")
