"""What a proposer wants to know of the target's forwards, and where to find it; no rows."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_SLICE = 64  # tokens whose logits are there together


@dataclass(frozen=True)
class HiddenStateRequest:
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
    def of(cls, proposer: Any) -> "HiddenStateRequest":
        """Of proposers that say nothing, nothing."""
        return getattr(proposer, "wants", cls())


@dataclass(frozen=True)
class HiddenStates:
    """Of all N tokens of one forward, in its order.

    Attributes:
        wants: What somebody wants of them.
        hidden: ``[N, D]`` what the LM head reads; None where nothing is wanted.
        head: The LM head: of states, logits.
    """

    wants: HiddenStateRequest = HiddenStateRequest()
    hidden: Tensor | None = None
    head: Callable[[Tensor], Tensor] | None = None

    def at(self, places: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """``[k, D]`` of tokens ``int64[k]`` and ``int64[k, top]``, the likeliest ones behind each.

        None for what is not wanted. The head runs once more, over these tokens alone: most nodes of
        a draft are never asked for.
        """
        if self.hidden is None or self.head is None:
            return None, None
        hidden, most = self.hidden[places], self.wants.top
        # In slices: logits of a whole prompt may not fit the memory that a plain step needs.
        tops = [self.head(x).topk(most, -1).indices for x in hidden.split(_SLICE)] if most else []
        return hidden if self.wants.hidden else None, torch.cat(tops) if tops else None
