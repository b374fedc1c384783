"""Adds n-grams as tokens to a tokenizer, so that every text still decodes to the same text.

Two families of tokenizers are supported: byte-level BPE, and SentencePiece-style BPE that writes a
mark for each blank, with or without a mark before a text. Others are refused with an error.

With a mark before texts there is one exception, which the file format makes necessary. If a text,
or the part between two special tokens, equals a new token's content character by character
('▁play▁music', or '_music' after a special token), no mark is written before it, and it decodes
without that blank.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, normalizers

from tasc_train.errors import FamilyError

_INSIDE = "a"  # put before contents, since decoders drop a blank at the start of a text


class GrowingTokenizer:
    """A copy of a tokenizer to which tokens are added one by one.

    Raises:
        FamilyError: Texts would not decode unchanged with this kind of tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.backend = Tokenizer.from_str(tokenizer.to_str())
        self.contents: list[str] = []
        state = json.loads(tokenizer.to_str())
        _require_known(state)
        self._mark = _mark(state["normalizer"])
        added = self.backend.get_added_tokens_decoder().values()
        self._rivals = [t for t in added if t.normalized and (t.special or t.lstrip or t.rstrip)]

    def content(self, text: bytes) -> str | None:
        """Returns a text as it is written in the vocabulary, or None if it cannot be a token.

        A text cannot be a token if it cuts a character, is already a token, or would decode
        differently, or if texts that contain it would lose special tokens.
        """
        try:
            readable = text.decode()
        except UnicodeDecodeError:
            return None
        content = readable.replace(" ", self._mark) if self._mark else readable
        if self.backend.token_to_id(content) is not None or not self._is_found(content):
            return None
        decoder = self.backend.decoder
        decoded = decoder.decode([_INSIDE, content]) if decoder else content
        if decoded.removeprefix(_INSIDE) != readable:
            return None
        return None if any(self._hides(content, rival) for rival in self._rivals) else content

    def add(self, content: str) -> int:
        """Adds a token and returns its id."""
        self.contents.append(content)
        if self._mark:  # before the token is added, which normalizes its content
            self.backend.normalizer = _sparing(self._mark, self.contents)
        # Normalized tokens are matched after other tokens, so that special tokens stay whole.
        self.backend.add_tokens([AddedToken(content, special=False, normalized=True)])
        found = self.backend.token_to_id(content)
        assert found is not None
        return int(found)

    @property
    def cuts(self) -> list[int]:
        """Ids at which texts are split before new tokens are matched; no new token spans them."""
        added = self.backend.get_added_tokens_decoder().items()
        return [id_ for id_, token in added if token.special or not token.normalized]

    def normalized(self, text: str) -> str:
        """Normalizes a text or a new token's content, as the tokenizer does before matching."""
        normalizer = self.backend.normalizer
        return str(normalizer.normalize_str(text)) if normalizer else text

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Encodes texts, without special tokens around them."""
        encodings = self.backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def _is_found(self, content: str) -> bool:
        """Whether the normalizer treats a content alone as it does inside a text."""
        if self._mark:
            return True  # see `_sparing`
        inside = self.normalized(_INSIDE + content)
        return inside == self.normalized(_INSIDE) + self.normalized(content)

    def _hides(self, content: str, rival: AddedToken) -> bool:
        """Whether ``content`` could be matched in place of the existing token ``rival``.

        Both are matched in one pass: the leftmost match wins, then the longest.
        """
        ours = content if self._mark else self.normalized(content)
        other = self.normalized(rival.content)
        if (rival.lstrip and ours[-1:].isspace()) or (rival.rstrip and ours[:1].isspace()):
            return True  # the rival includes white space at its side
        ends = (ours[at:] for at in range(1, len(ours)))
        return ours.startswith(other) or any(
            e.startswith(other) or other.startswith(e) for e in ends
        )


def _require_known(state: dict[str, Any]) -> None:
    kind = state["model"].get("type", "BPE")
    if kind != "BPE":
        raise FamilyError(
            f"a tokenizer of type {kind} cannot be enriched; use a model with a BPE tokenizer"
        )
    parts = _parts(state["pre_tokenizer"])
    if any(part["type"] == "Metaspace" for part in parts) or any(
        part["type"] == "ByteLevel" and part.get("add_prefix_space") for part in parts
    ):
        raise FamilyError(
            "the tokenizer's pre_tokenizer writes a blank before every piece of a text, so texts "
            "with new tokens would decode with extra blanks; use a model without Metaspace and "
            "add_prefix_space"
        )


def _mark(normalizer: dict[str, Any] | None) -> str | None:
    """Returns the mark that is written before a text and for each blank; None if there is none."""
    parts = _parts(normalizer)
    marks = [part["prepend"] for part in parts if part["type"] == "Prepend"]
    if not marks:
        return None
    blank = {"type": "Replace", "pattern": {"String": " "}, "content": marks[0]}
    if parts != [{"type": "Prepend", "prepend": marks[0]}, blank]:
        kinds = ", ".join(part["type"] for part in parts)
        raise FamilyError(
            f"the tokenizer's normalizer ({kinds}) does more than write {marks[0]!r} before texts "
            f"and for blanks; use a model whose normalizer does only these two"
        )
    return str(marks[0])


def _sparing(mark: str, contents: Sequence[str]) -> normalizers.Normalizer:
    """Returns a normalizer that writes the mark for blanks, and before texts except contents.

    Contents are normalized like texts, but must get no mark at their start.
    """
    spared = "|".join(map(re.escape, contents))
    front = normalizers.Replace(Regex(rf"\A(?!(?:{spared})\z)"), mark)
    return normalizers.Sequence([front, normalizers.Replace(" ", mark)])


def _parts(component: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Returns the parts of a sequence, or the component alone."""
    if component is None:
        return []
    if component["type"] != "Sequence":
        return [component]
    inner = component.get("normalizers") or component.get("pretokenizers") or []
    return [part for each in inner for part in _parts(each)]
