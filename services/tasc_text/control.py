"""Keeps texts of clients from spelling control tokens, such as ``<|im_end|>`` in a chat message.

A tokenizer makes special tokens of their spellings, wherever in a text they are. In a prompt only
the template may write them. So spellings in texts are quoted before the template is rendered, and
a rendered prompt with quoted ones is encoded by a copy of the tokenizer whose control tokens have
secret names, which only those that the template wrote are given.
"""

import re
import secrets
from collections.abc import Sequence
from functools import cached_property

from tokenizers import AddedToken, Tokenizer

_MARK = f"<{secrets.token_hex(8)}:"  # of a quoted spelling; a text that has it gains nothing


class ControlTokens:
    """The control tokens of a tokenizer: its special tokens and those that end a sequence.

    Args:
        backend: The tokenizer.
        eos_ids: Ids that end a sequence.
    """

    def __init__(self, backend: Tokenizer, eos_ids: Sequence[int]) -> None:
        self._backend = backend
        self._added: dict[int, AddedToken] = backend.get_added_tokens_decoder()
        tokens = {i: t for i, t in self._added.items() if t.special or i in eos_ids}
        self._ids = {t.content: i for i, t in tokens.items() if t.content}
        # The longest first, as the tokenizer matches; "(?!)" matches nowhere.
        spellings = sorted(map(re.escape, self._ids), key=len, reverse=True) or ["(?!)"]
        self._spelled = re.compile("|".join(spellings))
        self._quoted = re.compile("|".join((re.escape(_MARK) + "([0-9]+)>", *spellings)))
        # Some are found in a text as it is normalized, such as in lower case.
        self._normalizer = (
            backend.normalizer if any(t.normalized for t in tokens.values()) else None
        )

    def quoted(self, text: str) -> tuple[str, bool]:
        """A text with its spellings quoted, and whether `encode` must encode what it is put into.

        It is the text itself unless it spells a control token.
        """
        quoted = self._spelled.sub(lambda found: f"{_MARK}{self._ids[found[0]]}>", text)
        if quoted == text and self._normalizer is not None:
            return text, bool(self._spelled.search(self._normalizer.normalize_str(text)))
        return quoted, quoted != text

    def encode(self, prompt: str) -> list[int]:
        """Ids of a prompt with quoted spellings, which become ordinary tokens.

        Special tokens that the tokenizer adds to texts are not added.
        """
        text = self._quoted.sub(self._unquoted, prompt)
        encoding = self._renamed.encode(text, add_special_tokens=False)
        ids = list[int]()
        for id_, token, (begin, end) in zip(
            encoding.ids, encoding.tokens, encoding.offsets, strict=True
        ):
            if token in self._ids and text[begin:end] == token:  # a piece of the vocabulary, too
                model = self._backend.model
                ids += [part.id for letter in token for part in model.tokenize(letter)]
            else:
                ids.append(self._names.get(token, id_))
        return ids

    def _unquoted(self, found: re.Match[str]) -> str:
        if found[1] is None:
            return self._secret[self._ids[found[0]]]
        token = self._added.get(int(found[1]))
        return token.content if token else found[0]

    @cached_property
    def _secret(self) -> dict[int, str]:
        nonce = secrets.token_hex(8)
        return {id_: f"<{nonce}:{id_}>" for id_ in self._ids.values()}

    @cached_property
    def _names(self) -> dict[str, int]:
        """Ids of the added tokens by their names in the copy, which numbers them otherwise."""
        return {self._secret.get(id_, token.content): id_ for id_, token in self._added.items()}

    @cached_property
    def _renamed(self) -> Tokenizer:
        """The copy. It shares the model, so that it costs neither time nor memory."""
        made = Tokenizer(self._backend.model)
        for part in ("normalizer", "pre_tokenizer"):
            if (value := getattr(self._backend, part)) is not None:
                setattr(made, part, value)
        flags = ("lstrip", "rstrip", "single_word", "normalized", "special")
        made.add_tokens(
            [
                AddedToken(name, **{flag: getattr(self._added[id_], flag) for flag in flags})
                for name, id_ in self._names.items()
            ]
        )
        return made


class Quotes:
    """Quotes the texts of one prompt.

    Attributes:
        found: Whether any of them spells a control token.
    """

    def __init__(self, control: ControlTokens) -> None:
        self._control = control
        self.found = False

    def __call__(self, text: str) -> str:
        quoted, found = self._control.quoted(text)
        self.found |= found
        return quoted
