"""Add n-grams as tokens to a tokenizer, so that every text still decodes to what it did.

Two families of tokenizers can: byte-level BPE, and SentencePiece-style BPE that writes a mark for
each blank, with or without one in front of a text. Others are refused by name.

Where a mark is written in front of texts there is one exception, which the file format does not let
us avoid: a text, or what is between two special tokens, that equals a new token's content letter by
letter ('▁play▁music', or '_music' behind a special token) gets no mark in front, and is read back
without that blank.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, normalizers

from tasc_jobs.errors import FamilyError

_INSIDE = "a"  # decoders drop a blank at a text's begin; behind this there is none


class GrowingTokenizer:
    """A tokenizer and the tokens it is given, one by one. The one passed in stays as it is.

    Raises:
        FamilyError: Its kind would not give texts back unchanged.
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
        """What a token of this text is written as in the vocabulary; None where none can be.

        It cannot where it cuts a character, where decoders would read it otherwise, where it is a
        token already, or where texts with it would lose special tokens.
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
        """Add a token and return its id."""
        self.contents.append(content)
        if self._mark:  # before the token is added: its content is normalized then
            self.backend.normalizer = _sparing(self._mark, self.contents)
        # Looked for behind tokens that are not normalized, as special ones are: it cuts none.
        self.backend.add_tokens([AddedToken(content, special=False, normalized=True)])
        found = self.backend.token_to_id(content)
        assert found is not None
        return int(found)

    @property
    def cuts(self) -> list[int]:
        """Ids that no new token reaches across: texts are cut there before one is looked for."""
        added = self.backend.get_added_tokens_decoder().items()
        return [id_ for id_, token in added if token.special or not token.normalized]

    def normalized(self, text: str) -> str:
        """What is looked for of a new token's content, and the text that it is looked for in."""
        normalizer = self.backend.normalizer
        return str(normalizer.normalize_str(text)) if normalizer else text

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids without special tokens around them."""
        encodings = self.backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def _is_found(self, content: str) -> bool:
        """Whether a normalizer makes of a content what it makes of it inside a text."""
        if self._mark:
            return True  # see `_sparing`
        inside = self.normalized(_INSIDE + content)
        return inside == self.normalized(_INSIDE) + self.normalized(content)

    def _hides(self, content: str, rival: AddedToken) -> bool:
        """Whether a text may have ``rival``, and a token ``content`` is found in its place.

        Both are looked for in one pass: the leftmost is found, of those the longest.
        """
        ours = content if self._mark else self.normalized(content)
        its = self.normalized(rival.content)
        if (rival.lstrip and ours[-1:].isspace()) or (rival.rstrip and ours[:1].isspace()):
            return True  # white space at its side is its own
        ends = (ours[at:] for at in range(1, len(ours)))
        return ours.startswith(its) or any(e.startswith(its) or its.startswith(e) for e in ends)


def _require_known(state: dict[str, Any]) -> None:
    kind = state["model"].get("type", "BPE")
    if kind != "BPE":
        raise FamilyError(
            f"a tokenizer of the kind {kind} cannot be enriched; take a model with one of BPE"
        )
    parts = _parts(state["pre_tokenizer"])
    if any(part["type"] == "Metaspace" for part in parts) or any(
        part["type"] == "ByteLevel" and part.get("add_prefix_space") for part in parts
    ):
        raise FamilyError(
            "the tokenizer's pre_tokenizer writes a blank in front of every piece of a text, so "
            "texts with new tokens would come back with blanks too many; take a model without "
            "Metaspace and add_prefix_space"
        )


def _mark(normalizer: dict[str, Any] | None) -> str | None:
    """What is written in front of a text, and for each blank; None where nothing is."""
    parts = _parts(normalizer)
    marks = [part["prepend"] for part in parts if part["type"] == "Prepend"]
    if not marks:
        return None
    blank = {"type": "Replace", "pattern": {"String": " "}, "content": marks[0]}
    if parts != [{"type": "Prepend", "prepend": marks[0]}, blank]:
        kinds = ", ".join(part["type"] for part in parts)
        raise FamilyError(
            f"the tokenizer's normalizer ({kinds}) writes {marks[0]!r} in front of texts and does "
            "more than write it for blanks, too; take a model with one that does just this"
        )
    return str(marks[0])


def _sparing(mark: str, contents: Sequence[str]) -> normalizers.Normalizer:
    """The mark in front of every text but one that is exactly a content, and for every blank.

    Contents are normalized like texts are, but must get no mark in front.
    """
    spared = "|".join(map(re.escape, contents))
    front = normalizers.Replace(Regex(rf"\A(?!(?:{spared})\z)"), mark)
    return normalizers.Sequence([front, normalizers.Replace(" ", mark)])


def _parts(component: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The parts of a sequence, or the component alone."""
    if component is None:
        return []
    if component["type"] != "Sequence":
        return [component]
    inner = component.get("normalizers") or component.get("pretokenizers") or []
    return [part for each in inner for part in _parts(each)]
