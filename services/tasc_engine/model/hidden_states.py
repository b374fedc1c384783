"""The target's hidden states: a proposer's request, and the result of a forward."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_SLICE = 64  # tokens whose logits are in memory together


@dataclass(frozen=True)
class HiddenStateRequest:
    """The hidden states that a proposer needs from the target's forwards.

    Attributes:
        hidden: Whether the proposer needs the inputs of the LM head.
        top: Number of likeliest next tokens that the proposer needs.
    """

    hidden: bool = False
    top: int = 0

    def __bool__(self) -> bool:
        return self.hidden or self.top > 0

    @classmethod
    def of(cls, proposer: Any) -> "HiddenStateRequest":
        """A proposer's own request; an empty request if the proposer needs no hidden states."""
        return getattr(proposer, "hidden_state_request", cls())


@dataclass(frozen=True)
class HiddenStates:
    """The hidden states of all N tokens of one forward, in the order of the step's tokens.

    Attributes:
        request: The request that this result answers.
        hidden: ``[N, D]``, the inputs of the LM head; None if nothing was requested.
        head: The LM head, which computes logits from hidden states.
    """

    request: HiddenStateRequest = HiddenStateRequest()
    hidden: Tensor | None = None
    head: Callable[[Tensor], Tensor] | None = None

    def at(self, places: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Hidden states ``[k, D]`` and likeliest next tokens ``int64[k, top]`` at ``places``.

        Parts that were not requested are None. The likeliest tokens come from another run of
        the LM head, at ``places`` only, since most nodes of a draft are not accepted.

        Args:
            places: ``int64[k]``, indices of tokens of the forward.
        """
        if self.hidden is None or self.head is None:
            return None, None
        hidden, top = self.hidden[places], self.request.top
        # In slices: the logits of a whole prompt may take more memory than the rest of the step.
        tops = [self.head(x).topk(top, -1).indices for x in hidden.split(_SLICE)] if top else []
        return hidden if self.request.hidden else None, torch.cat(tops) if tops else None
