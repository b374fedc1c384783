"""Tokenizers of model folders, and the location of these folders.

Tokenizers convert text to ids and back. They also provide fingerprints and the properties of tokens
that drafting needs.
"""

import hashlib
import json
from collections.abc import Hashable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TypedDict

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from tasc_text.control import ControlTokens, Spellings
from tasc_text.ends import named_ends
from tasc_text.errors import TextError, TokenizerError
from tasc_text.formats import file_in_words

SETTINGS_FILES = ("*.json", "*.jinja", "*.model", "*.txt")
WEIGHT_FILES = ("*.safetensors",)


def resolve_folder(model: str, revision: str | None = None, *, weights: bool = True) -> Path:
    """Returns the local folder of a model. Models of the Hugging Face hub are downloaded.

    Args:
        model: A folder, or a hub name such as ``Qwen/Qwen2.5-0.5B``.
        revision: A branch, tag or commit of the hub; ignored for a folder.
        weights: Whether the weights are needed, in addition to tokenizer and configuration.

    Raises:
        TextError: ``model`` is a file; or it is not a folder, and the hub does not have it or
            cannot be reached.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder.resolve()
    if folder.is_file():
        raise TextError(file_in_words(folder))
    if model.startswith((".", "/", "~")):
        raise TextError(f"there is no folder {model}; check the spelling of the path")
    # Imported here, so that local folders need neither the network nor `huggingface_hub`.
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = [*SETTINGS_FILES, *(WEIGHT_FILES if weights else ())]
    try:
        return Path(
            snapshot_download(
                model,
                revision=revision,
                allow_patterns=patterns,
                # Without this argument, huggingface_hub 1.x asks the hub even for cached files.
                local_files_only=constants.HF_HUB_OFFLINE,
            )
        )
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise TextError(
            f"model {model!r} is neither a local folder nor available from the Hugging Face hub "
            f"({error}); check the spelling, or name a local folder"
        ) from error


_NOT_IDENTITY = ("padding", "truncation", "version")  # fields left out of the fingerprint
_INSIDE = "a"  # the text of a token in both byte-level and SentencePiece vocabularies
_CUT = "\N{REPLACEMENT CHARACTER}"  # written by decoders for a part of a character


class IndexFacts(TypedDict):
    """The arguments of `tasc_draft.build_index` that a tokenizer determines."""

    fingerprint: str
    vocab_size: int
    eos_id: int
    word_starts: NDArray[np.bool_]
    canonical: NDArray[np.int32]


class TaskTokenizer:
    """The tokenizer of a model folder, with its end-of-sequence ids.

    Args:
        path: A ``tokenizer.json``.
        eos_ids: Tokens that end an answer. The first one is appended to corpus documents, and ends
            answers where a guide allows only the end.

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
            raise TokenizerError(f"{path} is not a tokenizer file: {error}") from error
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self.path = path
        self.eos_ids = tuple(eos_ids)

    @classmethod
    def from_folder(cls, folder: Path) -> "TaskTokenizer":
        """Loads ``tokenizer.json``, and the ends of answers that any file names (`named_ends`)."""
        path = folder / "tokenizer.json"
        if folder.is_file():
            raise TokenizerError(file_in_words(folder))
        if not folder.is_dir():
            raise TokenizerError(f"there is no folder {folder}; check the spelling of the path")
        if not path.is_file():
            raise TokenizerError(
                f"{folder} has no tokenizer.json; save the tokenizer in the fast format there"
            )
        ends = named_ends(folder).values()
        return cls(path, list(dict.fromkeys(id_ for ids in ends for id_ in ids)))

    @property
    def backend(self) -> Tokenizer:
        return self._tokenizer

    @property
    def eos_id(self) -> int:
        return self.eos_ids[0]

    @cached_property
    def vocab_size(self) -> int:
        """The largest id plus 1. This is also the id of the document mark of draft indexes."""
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    @cached_property
    def byte_ids(self) -> frozenset[int]:
        """Ids of ``<0x00>`` to ``<0xFF>``. A run of these ids is decoded, or fails, as a whole."""
        ids = (self._tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
        return frozenset(i for i in ids if i is not None)

    @cached_property
    def special_tokens(self) -> dict[str, int]:
        """Ids of special tokens by their text."""
        added = self._tokenizer.get_added_tokens_decoder()
        return {str(token.content): id_ for id_, token in added.items() if token.special}

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of special tokens, which have no text in answers."""
        return frozenset(self.special_tokens.values())

    def special_in(self, text: str) -> str | None:
        """The text of the first special token in a text; None if the text has none."""
        added = self.spellings.added
        found = (added[span.id] for span in self.spellings.find(text))
        return next((t.content for t in found if t.special and t.content in text), None)

    @cached_property
    def spellings(self) -> Spellings:
        """Finds the spellings of added tokens in texts."""
        return Spellings(self._tokenizer)

    @cached_property
    def controls(self) -> dict[Hashable, tuple[ControlTokens, frozenset[str]]]:
        """A cache by template: its control tokens, and its own texts that spell none of them."""
        return {}

    def control(self, ids: Iterable[int] = ()) -> ControlTokens:
        """The tokens that texts of clients may not spell: special tokens, ends, and further tokens.

        Args:
            ids: Ids of the further tokens.
        """
        own = self.special_ids.union(self.eos_ids, ids)
        return ControlTokens(self._tokenizer, self.spellings, own)

    @cached_property
    def word_starts(self) -> NDArray[np.bool_]:
        """``bool[vocab_size + 1]``, read-only: whether a token begins a word.

        A token begins a word if its text begins with white space, or if it has no text in answers:
        special tokens, end-of-sequence, ids without a token, and the document mark, which is last.
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
        """``int32[vocab_size + 1]``, read-only: the id of the same text without a leading space.

        Tokens without a leading space, or without such a counterpart, have their own id.
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
        """32 hexadecimal digits; they are equal only if ids and their meanings are equal."""
        content = json.loads(self.path.read_text(encoding="utf-8"))
        identity = {k: v for k, v in content.items() if k not in _NOT_IDENTITY}
        identity["eos_ids"] = self.eos_ids
        canonical = json.dumps(identity, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:32]

    @property
    def index_facts(self) -> IndexFacts:
        return IndexFacts(
            fingerprint=self.fingerprint,
            vocab_size=self.vocab_size,
            eos_id=self.eos_id,
            word_starts=self.word_starts,
            canonical=self.canonical,
        )

    def encode_prompt(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a prompt, by default with the special tokens that the tokenizer adds.

        Leading special tokens are not added to a prompt that already begins with them. An end of
        sequence is never added, because nothing would follow it.
        """
        ids = list(self._tokenizer.encode(text, add_special_tokens=False).ids)
        return self.with_special_tokens(ids) if add_special_tokens else ids

    def encode_outputs(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of task outputs, without special tokens."""
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [e.ids for e in encodings]

    def with_special_tokens(self, ids: list[int]) -> list[int]:
        """Ids of a prompt with the special tokens that the tokenizer adds; see `encode_prompt`."""
        before, behind = self._special_around
        rest = [id_ for id_ in behind if id_ not in self.eos_ids]
        return [*([] if ids[: len(before)] == before else before), *ids, *rest]

    @property
    def appended_ends(self) -> tuple[int, ...]:
        """Ends of sequence that the tokenizer itself would append to each text."""
        return tuple(id_ for id_ in self._special_around[1] if id_ in self.eos_ids)

    @cached_property
    def _special_around(self) -> tuple[list[int], list[int]]:
        """The ids that the tokenizer's post-processor puts before and after a text."""
        encoding = self._tokenizer.encode(_INSIDE, add_special_tokens=True)
        inner = [at for at, added in enumerate(encoding.special_tokens_mask) if not added]
        first, last = (inner[0], inner[-1]) if inner else (len(encoding.ids), len(encoding.ids))
        return list(encoding.ids[:first]), list(encoding.ids[last + 1 :])

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def token_bytes(self, id_: int) -> bytes:
        """The bytes that a token adds to a text, in UTF-8. They may be a part of a character.

        Special tokens give their text. Ids without a token give no bytes.
        """
        found = self._bytes.get(id_)
        if found is None:
            found = self._bytes[id_] = self._bytes_of(id_)
        return found

    def drops_blank(self, id_: int) -> bool:
        """Whether decoding drops a token's leading blank at the beginning of a text."""
        return self.token_bytes(id_)[:1] == b" " and self.decode([id_])[:1] != " "

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
        # Ids descend, so that the lowest id of tokens with the same text counts in every process.
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        pairs = sorted(((id_, piece) for piece, id_ in vocabulary.items()), reverse=True)
        return {id_: self._text(piece) for id_, piece in pairs}

    def _text(self, piece: str) -> str:
        """A token's text inside a text; at the beginning, decoders drop a leading space."""
        decoder = self._tokenizer.decoder
        return (decoder.decode([_INSIDE, piece]) if decoder else piece).removeprefix(_INSIDE)


def _letters_of_bytes() -> dict[str, int]:
    """The letters that stand for bytes in byte-level vocabularies (Radford et al. 2019, GPT-2).

    Printable bytes stand for themselves. The letters from 256 on stand for the other bytes.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTES = _letters_of_bytes()


FILE = "tokenizer.json"
# Usual texts of the token that ends an answer, the most common first.
_USUAL = ("<|endoftext|>", "</s>", "<eos>", "<|im_end|>", "<|end_of_text|>", "<|eos|>", "[EOS]")
_SHOWN = 8


def open_tokenizer(path: str | Path, eos: str | None = None) -> TaskTokenizer:
    """Loads a tokenizer and finds the token that ends an answer.

    This token is ``eos``, else the end that the settings files next to ``tokenizer.json`` name,
    else the special token with the most common of the usual names.

    Args:
        path: A folder with a ``tokenizer.json``, or such a file.
        eos: The token's text.

    Raises:
        TokenizerError: The file is missing or damaged, or there is no such token.
    """
    bare = open_to_encode(Path(path))
    file = bare.path
    if eos is not None:
        return TaskTokenizer(file, [_id_of(bare, eos, file)])
    if file.name == FILE and (found := _as_settings_say(file.parent)):
        return found
    special = bare.special_tokens
    usual = next((special[name] for name in _USUAL if name in special), None)
    if usual is None:
        shown = ", ".join(list(special)[:_SHOWN]) or "none"
        raise TokenizerError(
            f"{file} and the settings next to it name no end-of-sequence token; name one with "
            f"--eos, as in --eos '</s>' (its special tokens: {shown})"
        )
    return TaskTokenizer(file, [usual])


def open_to_encode(path: Path) -> TaskTokenizer:
    """Loads a tokenizer for encoding only; its end-of-sequence id is arbitrary.

    Args:
        path: A folder with a ``tokenizer.json``, or such a file.

    Raises:
        TokenizerError: The file is missing or damaged.
    """
    file = path / FILE if path.is_dir() else path
    if not file.is_file():
        raise TokenizerError(f"{path} is neither a {FILE} nor a folder with one; name either")
    return TaskTokenizer(file, (0,))


def _id_of(tokenizer: TaskTokenizer, eos: str, file: Path) -> int:
    found = tokenizer.backend.token_to_id(eos)
    if found is None:
        raise TokenizerError(f"{file} has no token {eos!r}; name one of its tokens with --eos")
    return int(found)


def _as_settings_say(folder: Path) -> TaskTokenizer | None:
    try:
        return TaskTokenizer.from_folder(folder)
    except TokenizerError as error:
        if error.__cause__:  # a settings file that cannot be read
            raise
        return None
