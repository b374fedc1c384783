"""From token ids with log-probabilities to what a client can read, on the replica's side.

It knows the tokenizer and one answer; it writes no JSON.
"""

import codecs
from collections.abc import Sequence

from tasc_engine import TokenLogprob
from tasc_runtime.protocol import TokenText
from tasc_text import TaskTokenizer


class TokenTexts:
    """The tokens of one answer, told in its order.

    Args:
        ends: Ids that end the answer: they are no part of it.
        said: Its first tokens, of which somebody else has told.
    """

    def __init__(
        self, tokenizer: TaskTokenizer, ends: Sequence[int], said: Sequence[int] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._ends = frozenset(ends)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._length = 0  # characters so far that no later byte can change
        self._begun = False
        self.of([TokenLogprob(token, 0.0) for token in said])

    def of(self, logprobs: Sequence[TokenLogprob]) -> tuple[TokenText, ...]:
        """The next tokens of the answer."""
        return tuple(self._text(one) for one in logprobs if one.token not in self._ends)

    def _text(self, one: TokenLogprob) -> TokenText:
        shown = self._shown(one.token)
        offset = self._length + self._is_cut_by(shown)
        self._length += len(self._decoder.decode(shown))
        name = self._tokenizer.token_bytes
        top = tuple((name(token), logprob) for token, logprob in one.top)
        return TokenText(name(one.token), one.logprob, offset, top)

    def _is_cut_by(self, shown: bytes) -> bool:
        """Whether bytes end a character that has begun and will never be whole."""
        begun = bool(self._decoder.getstate()[0])
        return begun and bool(shown) and not 0x80 <= shown[0] < 0xC0

    def _shown(self, token: int) -> bytes:
        """What the token adds to the answer's text: special ones nothing, and some tokenizers drop
        the blank that an answer begins with."""
        if token in self._tokenizer.special_ids:
            return b""
        utf8 = self._tokenizer.token_bytes(token)
        first, self._begun = not self._begun, True
        if first and utf8[:1] == b" " and self._tokenizer.decode([token])[:1] != " ":
            return utf8[1:]
        return utf8
