"""The target's hidden states: what a proposer asks for, and what a forward gave."""

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
        hidden: Whether it needs what the LM head reads.
        top: How many of the likeliest next tokens it needs.
    """

    hidden: bool = False
    top: int = 0

    def __bool__(self) -> bool:
        return self.hidden or self.top > 0

    @classmethod
    def of(cls, proposer: Any) -> "HiddenStateRequest":
        """A proposer's own request; an empty one if it does not need hidden states."""
        return getattr(proposer, "hidden_state_request", cls())


@dataclass(frozen=True)
class HiddenStates:
    """Of all N tokens of one forward, in its order.

    Attributes:
        request: What was asked for.
        hidden: ``[N, D]`` what the LM head reads; None where nothing was asked for.
        head: The LM head: of states, logits.
    """

    request: HiddenStateRequest = HiddenStateRequest()
    hidden: Tensor | None = None
    head: Callable[[Tensor], Tensor] | None = None

    def at(self, places: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """``[k, D]`` of tokens ``int64[k]`` and ``int64[k, top]``, the likeliest ones behind each.

        None for what was not asked for. The head runs once more, over these tokens alone, since
        most nodes of a draft are not accepted.
        """
        if self.hidden is None or self.head is None:
            return None, None
        hidden, most = self.hidden[places], self.request.top
        # In slices: logits of a whole prompt may not fit the memory that a plain step needs.
        tops = [self.head(x).topk(most, -1).indices for x in hidden.split(_SLICE)] if most else []
        return hidden if self.request.hidden else None, torch.cat(tops) if tops else None
