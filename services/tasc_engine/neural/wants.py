"""What a proposer wants to know of the target's forwards. Values only."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Wants:
    """What a proposer asks of the target's forwards.

    Attributes:
        hidden: Whether it wants what the LM head reads.
        top: How many of the likeliest next tokens it wants.
    """

    hidden: bool = False
    top: int = 0

    def __bool__(self) -> bool:
        return self.hidden or self.top > 0

    @classmethod
    def of(cls, proposer: Any) -> "Wants":
        """Of proposers that say nothing, nothing."""
        return getattr(proposer, "wants", cls())


@dataclass(frozen=True)
class Thoughts:
    """Of all N tokens of one forward, in its order; None for what nobody wants.

    Attributes:
        hidden: ``[N, D]`` what the LM head reads.
        top: ``int64[N, K]`` the likeliest next tokens.
    """

    hidden: Tensor | None
    top: Tensor | None
