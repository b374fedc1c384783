"""Answers guided by a grammar: JSON schemas, regular expressions and Lark grammars, by llguidance.

llguidance is imported when the first grammar is compiled; an engine without guides needs none.

Matchers of one grammar share what its lexer has found out, and so its errors: where one has spent
what a lexer may hold, all of them stop. So one that stops is made anew from the answer so far,
with a lexer that a neighbour has renewed or that it renews for all of them, at last with one of its
own; only what stops then too is an error. An answer depends on its request, not on its neighbours.
"""

import json
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tasc_engine.errors import GuideError
from tasc_engine.guided.following import Guide, Int32, Masks
from tasc_engine.guided.sandbox import Effort, Sandbox
from tasc_engine.guided.trial import make_matcher, make_tokens, reason
from tasc_engine.request import GuideSpec
from tasc_text import TaskTokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher

# Each token of a stretch takes a mask, up to a millisecond, for which all rows wait. What is forced
# behind these comes a step later, and is the same.
MOST_FORCED = 32
# Lexers made for one answer, each a compile for which all rows wait: so many of them for everyone,
# then for itself, so that neighbours who wear lexers out cannot end it.
MOST_SHARED, MOST_MADE = 3, 6
_DEAD_ENDS = ("doesn't satisfy the grammar", "NoExtension")  # in errors that no lexer can mend


class Grammar:
    """A compiled grammar, for any number of answers and threads.

    Args:
        never: ``uint32[words]`` tokens that are never allowed.

    Attributes:
        make: Makes a matcher at its begin, with a lexer of its own.
        eos_id: Ends an answer.
    """

    def __init__(self, make: Callable[[], "LLMatcher"], eos_id: int, never: Masks) -> None:
        self.eos_id = eos_id
        self.words = len(never)
        self._never = never if never.any() else None
        self.make = make
        self._lock = threading.Lock()
        self._fresh = make()

    def guide(self, max_tokens: int) -> Guide:
        """A guide for one answer. How long one gets is known of few grammars, and not asked."""
        return GrammarGuide(self)

    @property
    def fresh(self) -> "LLMatcher":
        """What to copy: a matcher at its begin, whose lexer is shared. It is never moved."""
        with self._lock:
            return self._fresh

    def begin(self) -> "LLMatcher":
        """What to copy, with a lexer that can still go on."""
        with self._lock:
            matcher = self._fresh.deep_copy()
            matcher.compute_bitmask()
            if matcher.is_error():
                self._fresh = self.make()
            return self._fresh

    def share(self, fresh: "LLMatcher") -> None:
        """Let others copy this one from now on."""
        with self._lock:
            self._fresh = fresh

    def fill(self, matcher: "LLMatcher", mask: Masks) -> bool:
        """Write what a matcher allows; False where it cannot go on."""
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if matcher.is_error():
            return False
        # A grammar may name the end of sequence in its midst, where an answer would end.
        early = _allows(mask, self.eos_id) and not (matcher.is_stopped() or matcher.is_accepting())
        if not early and self._never is None:
            return True
        if early:
            mask[self.eos_id >> 5] &= ~np.uint32(1 << (self.eos_id & 31))
        if self._never is not None:
            mask &= ~self._never
        return bool(mask.any())


class GrammarGuide:
    """Where one answer is in a grammar; see `Guide`."""

    def __init__(self, grammar: Grammar) -> None:
        self.words = grammar.words
        self.error = ""
        self._ended = False
        self._grammar = grammar
        self._origin = grammar.begin()
        self._matcher = self._origin.deep_copy()
        self._made = 0
        self._said: list[int] = []

    def look(self, tokens: Int32, parents: Int32, kept: NDArray[np.bool_], masks: Masks) -> None:
        kept[:] = False
        if not self._now(masks[0]):
            masks[0] = 0
        elif len(tokens) and not self._walk(tokens.tolist(), parents.tolist(), kept, masks):
            self._revive()

    def advance(self, tokens: Int32) -> None:
        for token in tokens.tolist():
            if self._ended or self.error:
                return
            if token == self._grammar.eos_id:
                self._ended = True
                return
            self._said.append(token)
            if not self._matcher.consume_token(token):
                self._revive()

    def forced(self, most: int) -> Int32:
        found: list[int] = []
        most = min(most, MOST_FORCED)
        mask = np.empty(self.words, np.uint32)
        going = self._now(mask)
        if not going:
            return np.array(found, np.int32)
        while going and len(found) < most:
            token = _only(mask)
            if token is None:
                break
            found.append(token)
            if token == self._grammar.eos_id:
                break
            going = self._matcher.consume_token(token) and self._grammar.fill(self._matcher, mask)
        back = len(found) - (found[-1:] == [self._grammar.eos_id])
        if not self._matcher.rollback(back):
            self._revive()
        return np.array(found, np.int32)

    def _now(self, mask: Masks) -> bool:
        """Write what may come next; False where nothing may."""
        if self._ended or self.error:
            return False
        return self._grammar.fill(self._matcher, mask) or self._revive(mask)

    def _walk(
        self, tokens: list[int], parents: list[int], kept: NDArray[np.bool_], masks: Masks
    ) -> bool:
        """Depth first through the draft; False where the matcher stopped for good."""
        below: dict[int, list[int]] = {}
        for x in range(len(tokens) - 1, -1, -1):
            below.setdefault(parents[x], []).append(x)
        pending, path = below.get(-1, []), [-1]
        while pending:
            x = pending.pop()
            back = len(path) - 1 - path.index(parents[x])
            if back:
                self._matcher.rollback(back)
                del path[-back:]
            if not _allows(masks[1 + parents[x]], tokens[x]):
                continue
            if tokens[x] == self._grammar.eos_id:
                kept[x], masks[1 + x] = True, 0
                continue
            if not self._matcher.consume_token(tokens[x]):
                return False
            path.append(x)
            if not self._grammar.fill(self._matcher, masks[1 + x]):
                return False
            kept[x] = True
            pending += below.get(x, [])
        return self._matcher.rollback(len(path) - 1)

    def _revive(self, mask: Masks | None = None) -> bool:
        """Make the matcher anew, and write what may come; False, and an error, where it stops."""
        # Not worn, it stopped where a draft or a stretch led, or where the answer is: then for good
        if not self._worn and mask is None and self._restart(self._origin):
            return True
        if self._worn and self._made < MOST_SHARED:
            fresh = self._grammar.fresh
            if fresh is not self._origin and self._restart(fresh, mask):
                return True
        if self._worn and self._made < MOST_MADE:
            self._made += 1
            fresh = self._grammar.make()
            if self._restart(fresh, mask):
                if self._made <= MOST_SHARED:
                    self._grammar.share(fresh)
                return True
        self.error = reason(self._matcher) or "no token may follow"
        return False

    @property
    def _worn(self) -> bool:
        """Whether the matcher stopped for what its lexer holds, not for what the grammar says."""
        if not self._matcher.is_error():
            return False
        error = self._matcher.get_error()
        return not any(words in error for words in _DEAD_ENDS)

    def _restart(self, origin: "LLMatcher", mask: Masks | None = None) -> bool:
        self._origin, self._matcher = origin, origin.deep_copy()
        return self._matcher.consume_tokens(self._said) and (
            mask is None or self._grammar.fill(self._matcher, mask)
        )


def _allows(mask: Masks, token: int) -> bool:
    return bool(int(mask[token >> 5]) >> (token & 31) & 1)


def _only(mask: Masks) -> int | None:
    """The one token of a mask; None where there are none or several."""
    words = np.flatnonzero(mask)
    if len(words) != 1:
        return None
    bits = int(mask[words[0]])
    return None if bits & (bits - 1) else 32 * int(words[0]) + bits.bit_length() - 1


if TYPE_CHECKING:
    from llguidance import LLTokenizer
    from llguidance._lib import JsonCompileOptions

# What a tokenizer's tokens are in bytes is seen on what it writes and reads without loss.
_PROBES = ('a {"b": [1, -2.5]}', "naïve, 東京 🙂")
# White space at one place of JSON. The library's own default has no bound, and a model that was not
# taught JSON writes as much as it may, at each place, and runs into its last token. One blank is
# both `{"a": 1}` and `{"a":1}`; what is indented needs a schema's own "x-guidance".
_JSON_DEFAULTS: "JsonCompileOptions" = {"whitespace_pattern": " ?"}


class Library:
    """Compiles grammars for one tokenizer. Used by one thread at a time.

    Args:
        effort: What compiling one text may take.

    Raises:
        GuideError: llguidance is not installed, or does not know such tokenizers.
    """

    def __init__(self, tokenizer: TaskTokenizer, vocab_size: int, effort: Effort) -> None:
        text = tokenizer.backend.to_str()
        try:
            self._tokens = make_tokens(text, vocab_size, tokenizer.eos_id)
        except ImportError as error:
            raise GuideError(
                "a guide by JSON schema, regular expression or grammar needs the library "
                f"llguidance; pip install llguidance ({error})"
            ) from error
        except Exception as error:  # it raises plain exceptions for any fault of a tokenizer
            raise GuideError(
                f"llguidance does not know this tokenizer ({error}); use a guide of choices"
            ) from error
        self._blank_in_front = _blank_in_front(self._tokens, tokenizer)
        self._sandbox = Sandbox(text, vocab_size, tokenizer.eos_id, effort)
        self._eos_id = tokenizer.eos_id
        self._never = _bits(tokenizer.eos_ids[1:], vocab_size)

    def compile(self, spec: GuideSpec) -> Grammar:
        """Compile a text.

        Raises:
            GuideError: It is no such text, says what llguidance does not support, allows nothing,
                or takes too much.
        """
        source = self._source(spec)
        if refusal := self._sandbox.refusal(source):
            raise GuideError(f"no answer can be guided by this {spec.kind}: {refusal}")
        tokens = self._tokens
        return Grammar(lambda: make_matcher(tokens, source), self._eos_id, self._never)

    def _source(self, spec: GuideSpec) -> str:
        grammar = _top_grammar(spec)
        if not self._blank_in_front:
            return json.dumps({"grammars": [grammar]})
        begin = {"lark_grammar": 'start: " " @answer'}
        return json.dumps({"grammars": [begin, {**grammar, "name": "answer"}]})


def _top_grammar(spec: GuideSpec) -> dict[str, object]:
    """A text as llguidance wants one of its grammars."""
    from llguidance import LLMatcher

    if spec.kind == "grammar":
        return {"lark_grammar": spec.text}
    if spec.kind == "regex":
        return dict(json.loads(LLMatcher.grammar_from_regex(spec.text))["grammars"][0])
    if spec.text.lstrip()[:1] not in ("{", ""):
        raise GuideError(
            f"this json_schema is no JSON object but {spec.text[:20]!r}; send an object, which is "
            "{} where any value is welcome"
        )
    try:
        text = LLMatcher.grammar_from_json_schema(spec.text, defaults=_JSON_DEFAULTS)
        return dict(json.loads(text)["grammars"][0])
    except (ValueError, RecursionError) as error:
        raise GuideError(f"this json_schema is no JSON object, or too deep: {error}") from error


def _blank_in_front(tokens: "LLTokenizer", tokenizer: TaskTokenizer) -> bool:
    """Whether the tokenizer puts a blank in front of a text, which it drops when it reads it.

    An answer then begins with that blank, in tokens such as ``▁a``, as those of the corpus do.

    Raises:
        GuideError: llguidance reads other bytes in this tokenizer's tokens.
    """
    ids = tokenizer.encode_outputs(_PROBES)
    kept = [(p, i) for p, i in zip(_PROBES, ids, strict=True) if tokenizer.decode(i) == p]
    fronts = {tokens.decode_bytes(i).decode(errors="replace").removesuffix(p) for p, i in kept}
    if fronts not in ({""}, {" "}):
        raise GuideError(
            "llguidance reads this tokenizer's tokens otherwise than the tokenizer does; "
            "use a guide of choices"
        )
    return fronts == {" "}


def _bits(ids: tuple[int, ...], vocab_size: int) -> Masks:
    """``uint32[words]`` a mask of some tokens."""
    mask = np.zeros(-(-vocab_size // 32), np.uint32)
    for i in ids:
        if i < vocab_size:
            mask[i // 32] |= np.uint32(1 << i % 32)
    return mask
