"""Guided choice: an answer is one of some texts, in the tokens that the tokenizer makes of it.

Other tokens of the same text are not allowed, since the corpus, and so the drafts, have these.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from tasc_draft.labels import NOWHERE, LabelTrie
from tasc_engine.errors import GuideError
from tasc_engine.guided.following import Guide, Masks, known_ends
from tasc_engine.layout import Int32
from tasc_text import TaskTokenizer

_SHOWN = 300  # characters of a choice in an error; the rest of a longer one is counted


@dataclass(frozen=True)
class Choices:
    """Texts as a trie of their tokens, each followed by an end of sequence.

    A text that is the beginning of another one may end with any end of sequence. After the other
    texts, only the tokenizer's first end is allowed, and so it is forced.

    Attributes:
        longest: Number of tokens of the longest text, including its end.
        name: The longest text, for errors.
    """

    trie: LabelTrie
    words: int
    longest: int
    name: str

    @classmethod
    def of(cls, texts: Sequence[str], tokenizer: TaskTokenizer, vocab_size: int) -> "Choices":
        """Compiles choices.

        Raises:
            GuideError: A text is empty or has no tokens, has a token that the model does not know
                or that ends an answer, or differs from the text of its tokens.
        """
        ids = tokenizer.encode_outputs(texts)
        ends = known_ends(tokenizer, vocab_size)
        _require_sayable(texts, ids, tokenizer, vocab_size)
        lengths = [len(tokens) for tokens in ids]
        at = int(np.argmax(lengths))
        begun = _begun(ids)
        trie = LabelTrie.of(
            [
                [*tokens, end]
                for tokens in ids
                for end in (ends if tuple(tokens) in begun else ends[:1])
            ]
        )
        return cls(trie, -(-vocab_size // 32), lengths[at] + 1, _name(at, texts[at]))

    def guide(self, max_tokens: int | None) -> Guide:
        """Returns a guide for one answer.

        Args:
            max_tokens: Each choice must fit it; unset: a choice may be cut.

        Raises:
            GuideError: A choice does not fit ``max_tokens``.
        """
        if max_tokens is not None and self.longest > max_tokens:
            raise GuideError(
                f"{self.name} takes {self.longest} tokens, its end included, and max_tokens is "
                f"{max_tokens}; raise max_tokens, or leave the choice out"
            )
        return ChoiceGuide(self)


class ChoiceGuide:
    """The position of one answer in the trie; see `Guide`."""

    def __init__(self, choices: Choices) -> None:
        self.words = choices.words
        self.error = ""
        self.labels = choices.trie
        self._state = 0

    @property
    def draftable(self) -> bool:
        return self._state != NOWHERE and bool(self.labels.decides[self._state])

    def look(self, tokens: Int32, parents: Int32, kept: NDArray[np.bool_], masks: Masks) -> None:
        self.labels.look(self._state, tokens, parents, kept, masks)

    def advance(self, tokens: Int32) -> None:
        self._state = self.labels.after(self._state, tokens)
        if self._state == NOWHERE and not self.error:
            self.error = f"no choice goes on with tokens {tokens.tolist()}"

    def forced(self, max_tokens: int) -> Int32:
        return self.labels.forced(self._state, max_tokens)


def _require_sayable(
    texts: Sequence[str], ids: Sequence[Sequence[int]], tokenizer: TaskTokenizer, vocab_size: int
) -> None:
    ends = set(tokenizer.eos_ids)
    decoded = tokenizer.backend.decode_batch(list(ids), skip_special_tokens=True)
    for at, (text, tokens, back) in enumerate(zip(texts, ids, decoded, strict=True)):
        if not text or not tokens:
            raise GuideError(f"{_name(at, text)} has no tokens; leave it out")
        if max(tokens) >= vocab_size or not ends.isdisjoint(tokens):
            raise GuideError(
                f"{_name(at, text)} has a token that the model (of {vocab_size}) does not know, or "
                f"that ends an answer, among {list(tokens)[:8]}; write it in other words"
            )
        if back != text:
            raise GuideError(
                f"{_name(at, text)} would be answered as {_quoted(back)}: the tokenizer does not "
                "give it back; write it as it comes back"
            )


def _begun(sequences: Sequence[Sequence[int]]) -> set[tuple[int, ...]]:
    """The sequences that are proper beginnings of others."""
    known = sorted({tuple(sequence) for sequence in sequences})
    return {one for one, other in pairwise(known) if other[: len(one)] == one}


def _name(at: int, text: str) -> str:
    return f"choice {at} ({_quoted(text)})"


def _quoted(text: str) -> str:
    cut = len(text) > _SHOWN
    return repr(text[:_SHOWN]) + (f" and {len(text) - _SHOWN} more characters" if cut else "")
