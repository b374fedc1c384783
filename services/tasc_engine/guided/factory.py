"""Makes guides for requests. Each distinct guide is compiled once and then cached."""

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from tasc_draft import labels
from tasc_engine.errors import GuideError
from tasc_engine.guided import following, scoring
from tasc_engine.guided.choices import Choices, label_set
from tasc_engine.guided.following import Guide
from tasc_engine.guided.grammar import Library
from tasc_engine.guided.sandbox import Effort, Unsettled
from tasc_engine.guided.scoring import LabelSet
from tasc_protocol import GuideSpec
from tasc_text import TaskTokenizer

Made = TypeVar("Made")


class Kept(Generic[Made]):
    """A cache with guides as keys, limited by the number and the total size of its guides.

    The least recently used guides are dropped first. The newest guide is kept regardless of its
    size. Not thread-safe.
    """

    def __init__(self, max_items: int, max_bytes: int) -> None:
        self._max_items, self._max_bytes = max_items, max_bytes
        self._made: OrderedDict[GuideSpec, Made] = OrderedDict()
        self._bytes = 0

    def __contains__(self, spec: GuideSpec) -> bool:
        return spec in self._made

    def get(self, spec: GuideSpec) -> Made | None:
        found = self._made.get(spec)
        if found is not None:
            self._made.move_to_end(spec)
        return found

    def add(self, spec: GuideSpec, made: Made) -> None:
        """Adds a value that is not kept yet."""
        self._made[spec] = made
        self._bytes += spec.size_bytes
        while len(self._made) > 1 and (
            len(self._made) > self._max_items or self._bytes > self._max_bytes
        ):
            oldest, _ = self._made.popitem(last=False)
            self._bytes -= oldest.size_bytes


@dataclass(frozen=True)
class GuideLimits:
    """Limits of the cost of guides.

    Attributes:
        compile_seconds: Processor time to compile a JSON schema, an expression or a grammar.
        compile_bytes: Memory to compile one schema, expression or grammar.
        kept: Maximum number of compiled guides in the cache. Refused guides have a separate cache
            with the same limits.
        kept_bytes: Maximum total size of the sources of all guides in a cache.
    """

    compile_seconds: float = 2.0
    compile_bytes: int = 2**26
    kept: int = 64
    kept_bytes: int = 8_000_000


class _Compiled(Protocol):
    def guide(self, max_tokens: int | None) -> Guide: ...


class Guides:
    """Makes guides for one target's tokens; thread-safe.

    A compiled guide is returned in microseconds. Other guides are compiled one after the other on
    the calling thread, so make a request's guide before the decoding thread needs it.

    Args:
        vocab_size: Vocabulary size of the model, which may exceed the tokenizer's.
    """

    def __init__(
        self, tokenizer: TaskTokenizer, vocab_size: int, limits: GuideLimits | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._limits = limits or GuideLimits()
        max_items, max_bytes = self._limits.kept, self._limits.kept_bytes
        self._kept: Kept[_Compiled | LabelSet] = Kept(max_items, max_bytes)
        # Kept separately, so that refused guides do not displace guides in use.
        self._refused: Kept[str] = Kept(max_items, max_bytes)
        self._library: Library | GuideError | None = None
        self._warm = False
        self._lock, self._compiling = threading.Lock(), threading.Lock()

    def of(self, spec: GuideSpec, max_tokens: int | None = None) -> Guide:
        """Returns a guide for one answer.

        Args:
            max_tokens: Limit that every choice must fit; if None, an answer may be cut inside a
                choice.

        Raises:
            GuideError: The guide cannot be followed, or a choice does not fit ``max_tokens``.
        """
        compiled = self._compiled(spec)
        if isinstance(compiled, LabelSet):
            raise GuideError("labels are scored, and guide no answer; use choices")
        return compiled.guide(max_tokens)

    def labels(self, spec: GuideSpec) -> LabelSet:
        """Returns labels for scoring.

        Raises:
            GuideError: The guide is of another kind, or the labels cannot be scored.
        """
        found = self._compiled(spec)
        if not isinstance(found, LabelSet):
            raise GuideError(f"it is a guide by {spec.kind}; only labels have probabilities")
        return found

    def prepare(self, spec: GuideSpec) -> None:
        """Compiles a guide or labels, unless they are known.

        Raises:
            GuideError: See `of` and `labels`.
        """
        self._compiled(spec)

    def known(self, spec: GuideSpec) -> bool:
        """Whether `of` returns or fails without compiling; for threads that must not wait."""
        with self._lock:
            return spec in self._kept or spec in self._refused

    def _compiled(self, spec: GuideSpec) -> _Compiled | LabelSet:
        compiled = self._find(spec)
        if compiled is None:
            with self._compiling:
                compiled = self._find(spec) or self._compile(spec)
        return compiled

    def _compile(self, spec: GuideSpec) -> _Compiled | LabelSet:
        self._warm_up()
        try:
            compiled = self._made_of(spec)
        except Unsettled:
            raise
        except GuideError as error:
            with self._lock:
                self._refused.add(spec, str(error))
            raise
        with self._lock:
            self._kept.add(spec, compiled)
        return compiled

    def _warm_up(self) -> None:
        """Loads compiled code; not in the constructor, as the first time takes seconds."""
        if not self._warm:
            labels.warm_up()
            following.warm_up()
            scoring.warm_up()
            self._warm = True

    def _made_of(self, spec: GuideSpec) -> _Compiled | LabelSet:
        if spec.kind == "labels":
            return label_set(spec, self._tokenizer, self._vocab_size)
        if spec.kind == "choice":
            return Choices.of(spec.choices, self._tokenizer, self._vocab_size)
        if self._library is None:
            effort = Effort(self._limits.compile_seconds, self._limits.compile_bytes)
            try:
                self._library = Library(self._tokenizer, self._vocab_size, effort)
            except GuideError as error:  # a second attempt would be slow and fail again
                self._library = error
        if isinstance(self._library, GuideError):
            raise GuideError(str(self._library))
        return self._library.compile(spec)

    def _find(self, spec: GuideSpec) -> _Compiled | LabelSet | None:
        with self._lock:
            if reason := self._refused.get(spec):
                raise GuideError(reason)
            return self._kept.get(spec)
