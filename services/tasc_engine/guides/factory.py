"""Guides for requests: each different one is compiled once and kept while it is used."""

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Protocol

from tasc_engine.errors import GuideError
from tasc_engine.guides import following, trie
from tasc_engine.guides.choices import Choices
from tasc_engine.guides.guide import Guide
from tasc_engine.guides.library import Library
from tasc_engine.guides.sandbox import Effort
from tasc_engine.request import GuideSpec
from tasc_text import TaskTokenizer


@dataclass(frozen=True)
class GuideLimits:
    """How large guides may be.

    Attributes:
        choices: Of one guide.
        choice_characters: Of one guide's choices together.
        text_characters: Of a JSON schema, a regular expression or a grammar.
        compile_seconds: Of processor time, to compile one of those.
        compile_bytes: Of memory, to compile one of those.
        kept: Compiled guides that are kept, the latest used ones.
        kept_characters: Of what they were compiled from, together.
    """

    choices: int = 20_000
    choice_characters: int = 2_000_000
    text_characters: int = 65_536
    compile_seconds: float = 2.0
    compile_bytes: int = 2**26
    kept: int = 64
    kept_characters: int = 8_000_000


class _Compiled(Protocol):
    def guide(self, max_tokens: int) -> Guide: ...


@dataclass(frozen=True)
class _Refused:
    """A guide that cannot be: not compiled again for each of a million requests."""

    error: str

    def guide(self, max_tokens: int) -> Guide:
        raise GuideError(self.error)


class Guides:
    """Makes guides for one target's tokens; any thread may ask it.

    What is compiled already is had in microseconds. Anything else is compiled one after the other
    on the asking thread: ask for a request's guide before the thread that decodes has to.

    Args:
        vocab_size: The model's, which may be larger than the tokenizer's.
    """

    def __init__(
        self, tokenizer: TaskTokenizer, vocab_size: int, limits: GuideLimits | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._limits = limits or GuideLimits()
        self._kept: OrderedDict[GuideSpec, _Compiled] = OrderedDict()
        self._characters = 0
        self._library: Library | None = None
        self._lock, self._compiling = threading.Lock(), threading.Lock()
        trie.warm_up()
        following.warm_up()

    def of(self, spec: GuideSpec, max_tokens: int) -> Guide:
        """A guide for one answer of at most so many tokens.

        Raises:
            GuideError: No answer can be guided so, it is too large, or a choice does not fit.
        """
        self._require_size(spec)
        compiled = self._find(spec)
        if compiled is None:
            with self._compiling:
                compiled = self._find(spec) or self._keep(spec, self._compile(spec))
        return compiled.guide(max_tokens)

    def _require_size(self, spec: GuideSpec) -> None:
        limits = self._limits
        for what, size, most in (
            ("choices", len(spec.choices), limits.choices),
            ("characters of choices", sum(map(len, spec.choices)), limits.choice_characters),
            ("characters", len(spec.text), limits.text_characters),
        ):
            if size > most:
                raise GuideError(
                    f"a guide by {spec.kind} has {size} {what}; at most {most} are followed: "
                    "send a smaller one"
                )

    def _compile(self, spec: GuideSpec) -> _Compiled:
        if spec.kind != "choice" and self._library is None:
            effort = Effort(self._limits.compile_seconds, self._limits.compile_bytes)
            self._library = Library(self._tokenizer, self._vocab_size, effort)
        try:
            if self._library is None or spec.kind == "choice":
                return Choices.of(spec.choices, self._tokenizer, self._vocab_size)
            return self._library.compile(spec)
        except GuideError as error:
            return _Refused(str(error))

    def _find(self, spec: GuideSpec) -> _Compiled | None:
        with self._lock:
            if spec in self._kept:
                self._kept.move_to_end(spec)
            return self._kept.get(spec)

    def _keep(self, spec: GuideSpec, compiled: _Compiled) -> _Compiled:
        with self._lock:
            self._kept[spec] = compiled
            self._characters += _size(spec)
            while len(self._kept) > 1 and (
                len(self._kept) > self._limits.kept
                or self._characters > self._limits.kept_characters
            ):
                oldest, _ = self._kept.popitem(last=False)
                self._characters -= _size(oldest)
        return compiled


def _size(spec: GuideSpec) -> int:
    return len(spec.text) + sum(map(len, spec.choices))
