"""Incremental decoding of an answer, with stop strings."""

from collections.abc import Sequence

from tokenizers.decoders import DecodeStream

from tasc_text.tokenizer import TaskTokenizer


class IncrementalDetokenizer:
    """Decodes one answer as its tokens arrive.

    Text that may become part of a stop string, or change when the last bytes of a character arrive,
    is held back. So the joined results of ``take`` are always a prefix of ``text``.

    Args:
        tokenizer: The target's tokenizer.
        stop: Strings that end the answer; none may be empty.
        keep_stop: Whether the text is cut after the stop string rather than before it.
        min_tokens: Stop strings that are complete within this number of tokens do not count.
    """

    def __init__(
        self,
        tokenizer: TaskTokenizer,
        stop: Sequence[str] = (),
        keep_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._tokenizer = tokenizer.backend
        self._byte_ids = tokenizer.byte_ids
        self._ids: list[int] = []
        self._decode = DecodeStream(skip_special_tokens=True)
        self._stop, self._keep_stop, self._min_tokens = tuple(stop), keep_stop, min_tokens
        self._longest = max((len(s) for s in stop), default=1)
        self._text = ""
        self._firm = 0  # end of the text that no later byte token can change
        self._taken = 0
        self.stopped = False

    @property
    def text(self) -> str:
        """All text so far, cut at the stop string if there is one."""
        return self._text

    def push(self, tokens: Sequence[int]) -> int:
        """Adds tokens; returns how many belong to the answer.

        If a stop string ends the answer, the token that completes it is the last one, and
        ``stopped`` becomes true.
        """
        for used, token in enumerate(tokens, start=1):
            piece = self._step(token)
            if piece and self._append(piece):
                return used
            if piece and token not in self._byte_ids:
                self._firm = len(self._text)
        return len(tokens)

    def take(self) -> str:
        """Returns the text that has become safe to send since the last call."""
        safe = len(self._text) if self.stopped else min(self._firm, len(self._text) - self._held())
        piece, self._taken = self._text[self._taken : safe], max(self._taken, safe)
        return piece

    def finish(self, text: str) -> str:
        """Returns the rest to send, given the ``text`` of the whole answer decoded at once."""
        return text[self._taken :]

    def _step(self, token: int) -> str | None:
        self._ids.append(token)
        try:
            return self._decode.step(self._tokenizer, token)
        except Exception:  # tokenizers raises a bare Exception if a byte token breaks a valid run
            whole = self._tokenizer.decode(self._ids, skip_special_tokens=True)
            self._decode = DecodeStream(self._ids, skip_special_tokens=True)
            self._text, piece = whole[: self._firm], whole[self._firm :]
            return piece

    def _append(self, piece: str) -> bool:
        before = len(self._text)
        self._text += piece
        stops = self._stop if len(self._ids) > self._min_tokens else ()
        # Only matches that end in the new piece count: earlier matches were within min_tokens.
        starts = ((s, self._text.find(s, max(0, before - len(s) + 1))) for s in stops)
        found = [(at, at + len(s)) for s, at in starts if at >= 0]
        if found:
            self._text = self._text[: min(found)[self._keep_stop]]
            self.stopped = True
        return self.stopped

    def _held(self) -> int:
        """Length of the longest tail that is a prefix of a stop string."""
        tail = self._text[max(self._taken, len(self._text) - self._longest + 1) :]
        return next(
            (
                len(tail) - at
                for at in range(len(tail))
                if any(s.startswith(tail[at:]) for s in self._stop)
            ),
            0,
        )
