"""What is counted of a text: its words and, with a tokenizer, its tokens. It counts nothing."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tasc_text import TaskTokenizer
from tasc_text.tokenizer_file import open_to_encode

SIDES = ("input", "output")
WORDS, TOKENS = "words", "tokens"


@dataclass(frozen=True)
class Units:
    """N-grams of ``n`` words and, if there is a tokenizer, single tokens.

    Words are what stands between white space. Tokens are those of a row's bare text: no template,
    no special tokens around it, no end of sequence.

    Attributes:
        n: Words of an n-gram.
        tokenizer: A tokenizer.json; it must be there on every machine that counts.
        vocabulary: How many tokens it has.
    """

    n: int = 2
    tokenizer: Path | None = None
    vocabulary: int = 0

    @classmethod
    def of(cls, n: int, tokenizer: Path | None) -> "Units":
        """Look at the tokenizer before anything slow begins.

        Args:
            tokenizer: A tokenizer.json, or a folder with one.

        Raises:
            TokenizerError: There is none, or it is damaged.
        """
        if tokenizer is None:
            return cls(n)
        found = open_to_encode(tokenizer)
        size = len(found.backend.get_vocab(with_added_tokens=True))
        return cls(n, found.path.absolute(), size)

    @property
    def orders(self) -> dict[str, int]:
        """The symbols of an n-gram, by unit."""
        return {WORDS: self.n} if self.tokenizer is None else {WORDS: self.n, TOKENS: 1}

    def symbols(self, unit: str, texts: Sequence[str]) -> list[list[str]]:
        """Each text as words, or as token ids in digits."""
        if unit == WORDS:
            return [text.split() for text in texts]
        assert self.tokenizer is not None
        encoded = _tokenizer(self.tokenizer).encode_outputs(texts)
        return [[str(id_) for id_ in ids] for ids in encoded]


@functools.cache
def _tokenizer(path: Path) -> TaskTokenizer:
    """Loaded once per process."""
    return open_to_encode(path)
