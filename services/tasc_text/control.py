"""Prevents texts of clients from spelling control tokens, such as ``<|im_end|>``.

A tokenizer converts the spelling of an added token to that token anywhere in a text. In a prompt,
only the template may write tokens that control the model. `ControlTokens` finds such spellings, and
encodes a prompt in which only given spellings become control tokens. The module `template`
determines these spellings.
"""

import re
import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from tokenizers import AddedToken, Tokenizer, models

MARK = "\U000f7a5c"  # replaces a character of a text; a private character, which no token has
_UNKNOWN = "\U0010fffd"  # a private character that no tokenizer knows
_NONCE = secrets.token_hex(8)
_REST = f"<{_NONCE}>"  # a word that replaces all text between added tokens


class Span(NamedTuple):
    """The place of an added token in a text, in characters."""

    id: int
    begin: int
    end: int


class Spellings:
    """Finds a tokenizer's added tokens in texts, by the tokenizer's rules and in linear time.

    Args:
        backend: The tokenizer.

    Attributes:
        added: The added tokens by id.
        normalizer: The tokenizer's normalizer, if it has one.
    """

    def __init__(self, backend: Tokenizer) -> None:
        self.added: dict[int, AddedToken] = backend.get_added_tokens_decoder()
        self.normalizer = backend.normalizer
        self._finder = Tokenizer(models.WordLevel({_REST: 0}, unk_token=_REST))
        if self.normalizer is not None and any(t.normalized for t in self.added.values()):
            self._finder.normalizer = self.normalizer
        self._finder.add_tokens(list(self.added.values()))
        self._ids = _numbers(self._finder, {t.content: id_ for id_, t in self.added.items()})

    def find(self, text: str) -> list[Span]:
        """Returns the added tokens in a text, in order."""
        found = self._finder.encode(text, add_special_tokens=False)
        return [
            Span(self._ids[id_], *place)
            for id_, place in zip(found.ids, found.offsets, strict=True)
            if id_
        ]


class ControlTokens:
    """Some of a tokenizer's added tokens, which texts of clients may not spell.

    Args:
        backend: The tokenizer.
        spellings: The spellings of the tokenizer.
        ids: Ids of the tokens; ids that belong to no added token are ignored.
    """

    def __init__(self, backend: Tokenizer, spellings: Spellings, ids: Iterable[int]) -> None:
        self._backend, self._spellings = backend, spellings
        added = spellings.added
        self._contents = {i: added[i].content for i in ids if i in added and added[i].content}
        self._ids = {content: id_ for id_, content in self._contents.items()}
        normalizer = spellings.normalizer
        forms = set(self._ids)
        if normalizer is not None:
            forms |= {text for form in forms if (text := normalizer.normalize_str(form))}
        signs = _signs(forms)
        self._sign = re.compile(f"[{re.escape(signs)}]" if signs else "(?!)")
        # A normalizer can turn a non-ASCII letter into a sign (see `without_signs`), but turns an
        # ASCII letter only into another letter.
        self._normalizes_ascii = any(sign.isalnum() for sign in signs)
        hidden = self._sign.pattern
        if normalizer is not None:
            hidden += r"|\S" if self._normalizes_ascii else r"|(?!\s)[^\0-\x7f]"
        self._hidden = re.compile(f"(?:{hidden})+")

    def may_spell(self, text: str) -> bool:
        """Whether a text can be part of a spelling; most texts cannot."""
        if self._sign.search(text):
            return True
        normalizer = self._spellings.normalizer
        if normalizer is None or (text.isascii() and not self._normalizes_ascii):
            return False
        return bool(self._sign.search(normalizer.normalize_str(text)))

    def find(self, text: str) -> list[Span]:
        """Returns the control tokens that a text spells, in order."""
        return [span for span in self._spellings.find(text) if span.id in self._contents]

    def without_signs(self, text: str) -> str:
        """Replaces a text's signs by marks, so that the text cannot be part of a spelling.

        Signs are characters of which each spelling has at least one.
        """
        if not self.may_spell(text):
            return text
        return self._hidden.sub(lambda found: MARK * len(found[0]), text)

    def without_spellings(self, text: str) -> str:
        """Replaces each character of a text's spellings by a mark."""
        return _replaced(text, [(s, MARK * (s.end - s.begin)) for s in self.find(text)])

    def example(self, spans: Sequence[Span]) -> str:
        """The text of the first control token in ``spans``; if there are none, of any token."""
        return next(iter([self._contents[span.id] for span in spans] or self._ids))

    def beyond(self, ids: Sequence[int], spans: Sequence[Span]) -> bool:
        """Whether the control tokens in ``ids`` differ from the spelled ones, ``spans``.

        Ids of unknown text are ignored.
        """
        counted = self._contents.keys() - self._unknown
        wanted = [span.id for span in spans if span.id in counted]
        return [id_ for id_ in ids if id_ in counted] != wanted

    def encode(self, text: str, written: Sequence[Span]) -> list[int]:
        """Encodes a text in which only some spellings are control tokens.

        Special tokens that the tokenizer adds to texts are not added. A letter whose only token is
        a control token is left out.

        Args:
            written: The places of the spellings that become control tokens, in order.
        """
        named = _replaced(text, [(span, self._named(text, span)) for span in written])
        copy, real = self._renamed
        encoding = copy.encode(named, add_special_tokens=False)
        # A vocabulary with control tokens can still turn plain text into them.
        own = self._contents.keys() - real.keys()
        if own.isdisjoint(found := encoding.ids):
            return [real.get(id_, id_) for id_ in found]
        model, ids = self._backend.model, list[int]()
        for id_, (begin, end) in zip(found, encoding.offsets, strict=True):
            content = self._contents[id_] if id_ in own else ""
            if content and (id_ not in self._unknown or named[begin:end] == content):
                parts = [part.id for letter in content for part in model.tokenize(letter)]
                ids += [part for part in parts if part in self._unknown or part not in own]
            else:
                ids.append(real.get(id_, id_))
        return ids

    def _named(self, text: str, span: Span) -> str:
        """A token's secret name, with the white space that the token takes around its spelling."""
        spelled = text[span.begin : span.end]
        begin = len(spelled) - len(spelled.lstrip())
        return spelled[:begin] + self._secret[span.id] + spelled[len(spelled.rstrip()) :]

    @cached_property
    def _unknown(self) -> Collection[int]:
        """Ids that the model gives to unknown text."""
        try:
            return {token.id for token in self._backend.model.tokenize(_UNKNOWN)}
        except Exception:  # the library's error if the model has no such id
            return set()

    @cached_property
    def _secret(self) -> dict[int, str]:
        return {id_: f"<{_NONCE}:{id_}>" for id_ in self._contents}

    @cached_property
    def _renamed(self) -> tuple[Tokenizer, dict[int, int]]:
        """A copy of the tokenizer with secret names for control tokens; real ids by the copy's ids.

        The copy shares the model, so it costs neither time nor memory. The ids of its added tokens
        are different.
        """
        made = Tokenizer(self._backend.model)
        for part in ("normalizer", "pre_tokenizer"):
            if (value := getattr(self._backend, part)) is not None:
                setattr(made, part, value)
        added = self._spellings.added
        names = {self._secret.get(id_, token.content): id_ for id_, token in added.items()}
        made.add_tokens([self._copied(name, id_) for name, id_ in names.items()])
        return made, _numbers(made, names)

    def _copied(self, name: str, id_: int) -> AddedToken:
        flags = {
            flag: getattr(self._spellings.added[id_], flag)
            for flag in ("lstrip", "rstrip", "single_word", "normalized", "special")
        }
        if id_ in self._contents:  # is found inside words too: the template wrote it
            flags["single_word"] = False
        return AddedToken(name, **flags)


def _numbers(copy: Tokenizer, names: Mapping[str, int]) -> dict[int, int]:
    """The tokenizer's ids of tokens, by their ids in a copy."""
    pairs = ((copy.token_to_id(name), id_) for name, id_ in names.items())
    return {number: id_ for number, id_ in pairs if number is not None}


def _replaced(text: str, others: Iterable[tuple[Span, str]]) -> str:
    parts, end = list[str](), 0
    for span, other in others:
        parts += [text[end : span.begin], other]
        end = span.end
    return "".join((*parts, text[end:]))


def _signs(texts: Collection[str]) -> str:
    """A few characters of which each text has at least one, preferably punctuation marks."""
    chosen, left = "", set(texts)
    while left:
        letters = sorted({letter for text in left for letter in text})
        chosen += max(
            letters,
            key=lambda letter: (
                not letter.isalnum() and not letter.isspace(),
                sum(letter in text for text in left),
            ),
        )
        left = {text for text in left if chosen[-1] not in text}
    return chosen
