"""A target's tokenizer as we use it: text to ids, ids to text, who it is. It knows no model."""

import hashlib
import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from tasc_text.errors import TokenizerError

# Padding and truncation are how one run was called, not who the tokenizer is.
_NOT_IDENTITY = ("padding", "truncation", "version")
_INSIDE = "a"  # its own text in byte-level and in SentencePiece vocabularies alike
_CUT = "\N{REPLACEMENT CHARACTER}"  # what decoders write for a part of a character


class TaskTokenizer:
    """The `tokenizers` tokenizer of one model folder, with its end-of-sequence ids.

    Args:
        path: A ``tokenizer.json``.
        eos_ids: Ids any of which ends an answer; the first is written behind corpus documents.

    Raises:
        TokenizerError: The file is missing or unreadable, or there is no end-of-sequence id.
    """

    def __init__(self, path: Path, eos_ids: Sequence[int]) -> None:
        if not eos_ids:
            raise TokenizerError(
                f"{path.parent} names no end-of-sequence token; set eos_token_id in config.json"
            )
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception for any fault of the file
            raise TokenizerError(f"{path} is no tokenizer file: {error}") from error
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self.path = path
        self.eos_ids = tuple(eos_ids)

    @classmethod
    def from_folder(cls, folder: Path) -> "TaskTokenizer":
        """Load ``tokenizer.json`` and find the end-of-sequence ids in the folder's settings."""
        path = folder / "tokenizer.json"
        if not folder.is_dir():
            raise TokenizerError(f"there is no folder {folder}; check the spelling of the path")
        if not path.is_file():
            raise TokenizerError(
                f"{folder} has no tokenizer.json; save the tokenizer in the fast format there"
            )
        return cls(path, _eos_ids(folder, path))

    @property
    def backend(self) -> Tokenizer:
        return self._tokenizer

    @property
    def eos_id(self) -> int:
        return self.eos_ids[0]

    @cached_property
    def vocab_size(self) -> int:
        """One above the largest id. It is also the id of the document mark of draft indexes."""
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    @cached_property
    def byte_ids(self) -> frozenset[int]:
        """Ids of ``<0x00>`` to ``<0xFF>``; a run of them is decoded as a whole or not at all."""
        ids = (self._tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
        return frozenset(i for i in ids if i is not None)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that have no text in an answer."""
        added = self._tokenizer.get_added_tokens_decoder()
        return frozenset(id_ for id_, token in added.items() if token.special)

    @cached_property
    def word_starts(self) -> NDArray[np.bool_]:
        """``bool[vocab_size + 1]``: whether a token begins a word.

        It does where its text begins with white space, and where it has no text of an answer: a
        special token, an end of sequence, an id without a token, and the last entry, the document
        mark. Read-only.
        """
        starts = np.ones(self.vocab_size + 1, bool)
        for id_, text in self._texts.items():
            starts[id_] = text[:1].isspace()
        starts[list(self.special_ids)] = True
        starts[[id_ for id_ in self.eos_ids if id_ < self.vocab_size]] = True
        starts.setflags(write=False)
        return starts

    @cached_property
    def canonical(self) -> NDArray[np.int32]:
        """``int32[vocab_size + 1]``: the id of the same text without a blank in front of it.

        A token that has no blank in front, or no such twin, stands for itself. Read-only.
        """
        twins = np.arange(self.vocab_size + 1, dtype=np.int32)
        ids = {text: id_ for id_, text in self._texts.items()}
        for id_, text in self._texts.items():
            if text[:1] == " " and len(text) > 1:
                twins[id_] = ids.get(text[1:], id_)
        twins.setflags(write=False)
        return twins

    @cached_property
    def fingerprint(self) -> str:
        """32 hexadecimal digits that differ whenever ids or their meaning may differ."""
        content = json.loads(self.path.read_text(encoding="utf-8"))
        identity = {k: v for k, v in content.items() if k not in _NOT_IDENTITY}
        identity["eos_ids"] = self.eos_ids
        canonical = json.dumps(identity, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:32]

    def encode_prompt(self, text: str) -> list[int]:
        """Ids of a prompt, with the special tokens the tokenizer puts in front of one."""
        return list(self._tokenizer.encode(text, add_special_tokens=True).ids)

    def encode_outputs(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of task outputs, without special tokens."""
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [list(e.ids) for e in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def token_bytes(self, id_: int) -> bytes:
        """What a token adds to a text, in UTF-8: also where that is a part of a character only.

        A special token has the text it is written as; an id without a token has none.
        """
        found = self._bytes.get(id_)
        if found is None:
            found = self._bytes[id_] = self._bytes_of(id_)
        return found

    @cached_property
    def _bytes(self) -> dict[int, bytes]:
        return {}

    def _bytes_of(self, id_: int) -> bytes:
        piece = self._tokenizer.id_to_token(id_)
        if piece is None:
            return b""
        if id_ in self.byte_ids:
            return bytes([int(piece[3:5], 16)])
        if id_ in self.special_ids:
            return piece.encode()
        text = self._text(piece)
        if _CUT in text and all(letter in _BYTES for letter in piece):
            return bytes(_BYTES[letter] for letter in piece)
        return text.encode()

    @cached_property
    def _texts(self) -> dict[int, str]:
        # Ids descend, so that of tokens with the same text the lowest id counts in every process.
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        pairs = sorted(((id_, piece) for piece, id_ in vocabulary.items()), reverse=True)
        return {id_: self._text(piece) for id_, piece in pairs}

    def _text(self, piece: str) -> str:
        """A token's text inside a text: at its begin decoders drop a blank."""
        decoder = self._tokenizer.decoder
        return (decoder.decode([_INSIDE, piece]) if decoder else piece).removeprefix(_INSIDE)


def _letters_of_bytes() -> dict[str, int]:
    """The letters that byte-level vocabularies write bytes as (Radford et al. 2019, GPT-2): those
    that are seen stand for themselves, the others are the letters from 256 on."""
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    unseen = [byte for byte in range(256) if byte not in seen]
    return {chr(b): b for b in seen} | {chr(256 + i): b for i, b in enumerate(unseen)}


_BYTES = _letters_of_bytes()


def _eos_ids(folder: Path, path: Path) -> list[int]:
    for name in ("generation_config.json", "config.json"):
        found = _read_json(folder / name).get("eos_token_id")
        if found is not None:
            return list(found) if isinstance(found, list) else [int(found)]
    token = _read_json(folder / "tokenizer_config.json").get("eos_token")
    text = token.get("content") if isinstance(token, dict) else token
    if text is None:
        return []
    vocab = {t["content"]: t["id"] for t in _read_json(path).get("added_tokens", [])}
    return [vocab[text]] if text in vocab else []


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path} cannot be read as JSON: {error}") from error
    return content if isinstance(content, dict) else {}
