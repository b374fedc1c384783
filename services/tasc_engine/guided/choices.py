"""Guided choice: an answer is one of a given set of texts, in the tokenizer's own encoding.

Other token sequences with the same text are not allowed, because the corpus and the drafts use the
tokenizer's own encoding.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from tasc_draft.labels import NOWHERE, LabelTrie
from tasc_engine.errors import GuideError
from tasc_engine.guided.following import Guide, Masks, known_ends
from tasc_engine.guided.scoring import LabelSet
from tasc_engine.layout import Int32
from tasc_protocol import GuideSpec
from tasc_text import TaskTokenizer

_SHOWN = 300  # characters of a choice that an error quotes; further characters are only counted


@dataclass(frozen=True)
class Choices:
    """Texts as a trie of their tokens, each followed by an end-of-sequence token.

    A text whose tokens are a prefix of another text's tokens may end with any end-of-sequence
    token. After any other text, only the tokenizer's first end-of-sequence token is allowed, so
    that token is forced.

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
            GuideError: A text is empty or has no tokens; it contains a token that the model does
                not know or that ends an answer; or decoding its tokens gives another text.
        """
        ids, ends = _encoded(texts, tokenizer, vocab_size)
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
            max_tokens: Limit that every choice must fit; if None, an answer may be cut inside a
                choice.

        Raises:
            GuideError: A choice does not fit ``max_tokens``.
        """
        if max_tokens is not None and self.longest > max_tokens:
            raise GuideError(
                f"{self.name} takes {self.longest} tokens, its end included, but max_tokens is "
                f"{max_tokens}; raise max_tokens, or leave the choice out"
            )
        return ChoiceGuide(self)


def label_set(spec: GuideSpec, tokenizer: TaskTokenizer, vocab_size: int) -> LabelSet:
    """Compiles choices for `LabelScorer`.

    Raises:
        GuideError: See `Choices.of`; also if two labels have the same tokens.
    """
    if spec.end is None:
        ids, ends = _encoded(spec.choices, tokenizer, vocab_size)
        sequences = [[[*tokens, end] for end in ends] for tokens in ids]
    else:
        if empty := [at for at, text in enumerate(spec.choices) if not text]:
            raise GuideError(f"{_name(empty[0], '')} is empty; leave it out")
        texts = [text + spec.end for text in spec.choices]
        ids, _ = _encoded(texts, tokenizer, vocab_size)
        sequences = [[tokens] for tokens in ids]
    return LabelSet.of(spec.choices, sequences)


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
            self.error = f"no choice continues with tokens {tokens.tolist()}"

    def forced(self, max_tokens: int) -> Int32:
        return self.labels.forced(self._state, max_tokens)


def _encoded(
    texts: Sequence[str], tokenizer: TaskTokenizer, vocab_size: int
) -> tuple[list[list[int]], tuple[int, ...]]:
    """Returns the tokens of each text, and the tokens that end an answer."""
    ids = tokenizer.encode_outputs(texts)
    ends = known_ends(tokenizer, vocab_size)
    _require_encodable(texts, ids, tokenizer, vocab_size)
    return ids, ends


def _require_encodable(
    texts: Sequence[str], ids: Sequence[Sequence[int]], tokenizer: TaskTokenizer, vocab_size: int
) -> None:
    ends = set(tokenizer.eos_ids)
    decoded = tokenizer.backend.decode_batch(list(ids), skip_special_tokens=True)
    for at, (text, tokens, back) in enumerate(zip(texts, ids, decoded, strict=True)):
        if not text or not tokens:
            raise GuideError(f"{_name(at, text)} has no tokens; leave it out")
        if max(tokens) >= vocab_size or not ends.isdisjoint(tokens):
            raise GuideError(
                f"{_name(at, text)} has a token that the model (with {vocab_size} tokens) does not "
                f"know, or that ends an answer, among {list(tokens)[:8]}; reword the choice"
            )
        if back != text:
            raise GuideError(
                f"{_name(at, text)} would be answered as {_quoted(back)}, because the tokenizer "
                "changes the text; send the choice as the tokenizer decodes it"
            )


def _begun(sequences: Sequence[Sequence[int]]) -> set[tuple[int, ...]]:
    """The sequences that are prefixes of other sequences."""
    known = sorted({tuple(sequence) for sequence in sequences})
    return {one for one, other in pairwise(known) if other[: len(one)] == one}


def _name(at: int, text: str) -> str:
    return f"choice {at} ({_quoted(text)})"


def _quoted(text: str) -> str:
    cut = len(text) > _SHOWN
    return repr(text[:_SHOWN]) + (f" and {len(text) - _SHOWN} more characters" if cut else "")
