"""Tokens that a neural proposer drafts from: the interface, all tokens, and a fixed subset.

Only drafts use fewer tokens; the target verifies with its whole vocabulary. For ranking by
frequency, see FR-Spec, arXiv 2502.14856, and VocabTrim, arXiv 2506.22694. The sizes of the
rows' vocabularies are collected on the device and fetched once every `STEPS` steps.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from tasc_draft.drafts import Int32
from tasc_engine.model.linears import CompiledLinear, Linear


class Vocabulary(Protocol):
    """The tokens that a neural proposer may draft, and their logits.

    Tensors are on the head's device. Rows are numbered from 0. A row is started, observed any
    number of times, and finished. Methods that only record events do nothing by default.
    """

    @property
    def needs_top(self) -> int:
        """Number of the target's likeliest tokens that `observe` needs per place; 0 for none."""

    @property
    def nbytes(self) -> int:
        """Bytes of copied weights and windows that are allocated on the head's device."""

    def start(self, row: int, prompt: Int32) -> None:
        return

    def observe(self, row: int, tokens: Int32, top: Tensor | None) -> None:
        """Appends tokens that the target emitted.

        Args:
            top: ``int64[k, needs_top]``, the likeliest tokens after each of the k tokens that
                entered the target's cache since the last call, the likeliest first.
        """
        return

    def drafted(self, rows: Tensor, ids: Tensor) -> None:
        """Records a level's candidates ``ids int64[R, n]`` of ``rows int64[R]``, each row once."""
        return

    def prepare(self) -> None:
        """Begins work for the next `logits`, preferably before the forward that gives ``hidden``.

        The call is optional: without it, `logits` does all the work.
        """
        return

    def finish(self, row: int) -> None:
        return

    def logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """Maps ``hidden [R, w, H]`` of rows ``int64[R]`` to ``[R, w, A]``; -inf for no token."""

    def ids_of(self, slots: Tensor, rows: Tensor) -> Tensor:
        """Maps columns of the last logits, ``int64[R, ...]``, to token ids; 0 for no token."""

    def sizes(self, rows: Tensor) -> Tensor:
        """``int64[R]``, the number of tokens that may be drafted in each row."""


class _FixedVocabulary(Vocabulary):
    """The same tokens in all rows at all times, so that rows need no records."""

    needs_top = nbytes = 0

    def __init__(self, head: Linear | CompiledLinear) -> None:
        self._head = head

    def logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        return self._head(hidden)

    def sizes(self, rows: Tensor) -> Tensor:
        return torch.full_like(rows, self._head.out_features)


class FullVocabulary(_FixedVocabulary):
    """Every token of the LM head, which is not copied."""

    def ids_of(self, slots: Tensor, rows: Tensor) -> Tensor:
        return slots


class RankedVocabulary(_FixedVocabulary):
    """A subset of tokens, the same for every row; its part of the LM head is copied once.

    Args:
        head: Weight of the LM head, ``[V, H]``.
        ids: Ids of the tokens, at least one and each once, in any order.

    Raises:
        ValueError: An id is outside the head.
    """

    def __init__(self, head: Tensor, ids: Int32) -> None:
        self._ids = checked_ids(ids, head)
        weights = head[self._ids]
        super().__init__(Linear(weights))
        self.nbytes = weights.nbytes + self._ids.nbytes

    def ids_of(self, slots: Tensor, rows: Tensor) -> Tensor:
        return self._ids[slots]


def checked_ids(ids: Int32, head: Tensor) -> Tensor:
    """The ids of a ranked vocabulary as ``int64`` on the head's device.

    Raises:
        ValueError: An id is outside the head.
    """
    size = head.shape[0]
    if len(outside := ids[(ids < 0) | (ids >= size)]):
        raise ValueError(
            f"ranked token {outside[0]} is outside the head of {size} tokens; rank with the "
            "tokenizer of this model"
        )
    return torch.as_tensor(ids.astype("int64"), device=head.device)


STEPS = 16  # number of steps whose sizes are fetched together


class ActiveSizes:
    """Collects the sizes of a vocabulary on its device.

    Args:
        tell: Called on the engine's thread with the sizes of all drafted rows in `STEPS` steps.
    """

    def __init__(
        self, vocabulary: Vocabulary, device: torch.device, tell: Callable[[list[int]], None]
    ) -> None:
        self._vocabulary, self._device, self._tell = vocabulary, device, tell
        self._held: list[Tensor] = []

    @torch.inference_mode()
    def drafted(self, rows: Int32) -> None:
        """Collects the sizes of a step's rows, after their drafts."""
        on_device = torch.from_numpy(rows.astype("int64")).to(self._device, non_blocking=True)
        self._held.append(self._vocabulary.sizes(on_device).clone())
        if len(self._held) == STEPS:
            sizes: list[int] = torch.cat(self._held).tolist()
            self._held.clear()
            self._tell(sizes)
