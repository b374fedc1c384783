"""Guides answers by JSON schemas, regular expressions and Lark grammars, with llguidance.

llguidance is imported when the first grammar is compiled; engines without guides do not need it.

All matchers of a grammar share one lexer. If the lexer exceeds its limits, all these matchers stop.
Each matcher is then rebuilt from the answer so far: with a lexer that another answer has already
renewed, with a new lexer for all answers, or finally with a lexer for this answer only. If that
lexer stops too, the answer ends with an error. So an answer does not depend on other answers.
"""

import json
import threading
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tasc_engine.errors import GuideError
from tasc_engine.guided.following import Guide, Masks, known_ends
from tasc_engine.guided.sandbox import Effort, Sandbox
from tasc_engine.guided.schemas import LENIENT, Prepared, prepared
from tasc_engine.guided.trial import make_matcher, make_tokens, reason
from tasc_engine.guided.unique import Place, Unique, opening
from tasc_engine.layout import Int32
from tasc_protocol import GuideSpec
from tasc_text import TaskTokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions

# Maximum number of forced tokens at once. Each of them needs a mask, which takes up to a
# millisecond while all rows wait. Further forced tokens follow in the next step, so the answer is
# the same.
MAX_FORCED = 32
# Maximum numbers of lexers made for one answer: shared by all answers, and in total. All rows wait
# while a lexer is compiled. A lexer that is not shared cannot be exhausted by other answers.
MAX_SHARED, MAX_MADE = 3, 6
_DEAD_ENDS = ("doesn't satisfy the grammar", "NoExtension")  # errors of the grammar, not the lexer


class Grammar:
    """A compiled grammar, for any number of answers and threads.

    Args:
        ends: Tokens that end an answer. The first one is used where only ends are allowed.
        never: ``uint32[words]``, a mask of tokens that are never allowed.
        unique: Finds tokens that would repeat an item of an array; None if no items must be unique.

    Attributes:
        make: Makes a matcher at the start of the grammar, with a new lexer.
        opening: ``int32[n]``, the tokens that every answer begins with, at most `MAX_FORCED`.
    """

    def __init__(
        self,
        make: Callable[[], "LLMatcher"],
        ends: tuple[int, ...],
        never: Masks,
        unique: Unique | None = None,
    ) -> None:
        self.unique = unique
        self.ends = ends
        self.words = len(never)
        others = _bits(ends[1:], self.words)
        self._other_ends = others if others.any() else None
        never = never | others  # the grammar may contain these tokens as text
        self._never = never if never.any() else None
        self.make = make
        self._lock = threading.Lock()
        self._fresh = make()
        self.opening = GrammarGuide(self).computed(MAX_FORCED)

    def guide(self, max_tokens: int | None) -> Guide:
        """Returns a guide for one answer. The length of answers is not limited here."""
        return GrammarGuide(self)

    @property
    def fresh(self) -> "LLMatcher":
        """The matcher that new answers copy: at the grammar's start, with the shared lexer."""
        with self._lock:
            return self._fresh

    def begin(self) -> "LLMatcher":
        """Returns `fresh`, made again with a new lexer if the shared lexer has stopped."""
        with self._lock:
            matcher = self._fresh.deep_copy()
            matcher.compute_bitmask()
            if matcher.is_error():
                self._fresh = self.make()
            return self._fresh

    def share(self, fresh: "LLMatcher") -> None:
        """Makes ``fresh`` the matcher that other answers copy."""
        with self._lock:
            self._fresh = fresh

    def after(self, place: Place | None, token: int) -> Place | None:
        """Returns the position after a token; None if no items must be unique."""
        return self.unique.after(place, token) if self.unique and place else None

    def fill(self, matcher: "LLMatcher", place: Place | None, mask: Masks) -> bool:
        """Writes the tokens that a matcher allows; returns False if there are none or it failed."""
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if matcher.is_error():
            return False
        # A grammar may contain the end-of-sequence token where its text is not yet complete.
        eos_id = self.ends[0]
        may_end = _allows(mask, eos_id)
        early = may_end and not (matcher.is_stopped() or matcher.is_accepting())
        if not early and self._never is None and not self.unique:
            return True
        if early:
            mask[eos_id >> 5] &= ~np.uint32(1 << (eos_id & 31))
        if self._never is not None:
            mask &= ~self._never
        if self.unique and place:
            self.unique.narrow(place, mask)
        if self._other_ends is not None and may_end and not early and _only(mask) is None:
            mask |= self._other_ends
        return bool(mask.any())


class GrammarGuide:
    """The position of one answer in a grammar; see `Guide`."""

    labels = None
    draftable = True

    def __init__(self, grammar: Grammar) -> None:
        self.words = grammar.words
        self.error = ""
        self._ended = False
        self._grammar = grammar
        self._origin = grammar.begin()
        self._matcher = self._origin.deep_copy()
        self._made = 0
        self._said: list[int] = []
        self._place = Place() if grammar.unique else None

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
            if token in self._grammar.ends:
                self._ended = True
                return
            self._said.append(token)
            self._place = self._grammar.after(self._place, token)
            if self._grammar.unique and not self._place:
                self.error = "an item of an array with unique items is repeated"
            elif not self._matcher.consume_token(token):
                self._revive()

    def forced(self, max_tokens: int) -> Int32:
        if self._said or self._ended or self.error:
            return self.computed(min(max_tokens, MAX_FORCED))
        return self._grammar.opening[:max_tokens]

    def computed(self, max_tokens: int) -> Int32:
        """Computes the result of `forced`."""
        found: list[int] = []
        mask = np.empty(self.words, np.uint32)
        place, going = self._place, self._now(mask)
        if not going:
            return np.array(found, np.int32)
        while going and len(found) < max_tokens:
            token = _only(mask)
            if token is None:
                break
            found.append(token)
            if token in self._grammar.ends:
                break
            place = self._grammar.after(place, token)
            going = self._matcher.consume_token(token) and self._grammar.fill(
                self._matcher, place, mask
            )
        back = len(found) - (found[-1:] == [self._grammar.ends[0]])
        if not self._matcher.rollback(back):
            self._revive()
        return np.array(found, np.int32)

    def _now(self, mask: Masks) -> bool:
        """Writes the tokens that may come next; returns False if no token may."""
        if self._ended or self.error:
            return False
        return self._grammar.fill(self._matcher, self._place, mask) or self._revive(mask)

    def _walk(
        self, tokens: list[int], parents: list[int], kept: NDArray[np.bool_], masks: Masks
    ) -> bool:
        """Visits the draft tree depth first; returns False if the matcher stopped."""
        below: dict[int, list[int]] = {}
        for x in range(len(tokens) - 1, -1, -1):
            below.setdefault(parents[x], []).append(x)
        pending, path, places = below.get(-1, []), [-1], {-1: self._place}
        while pending:
            x = pending.pop()
            back = len(path) - 1 - path.index(parents[x])
            if back:
                self._matcher.rollback(back)
                del path[-back:]
            if not _allows(masks[1 + parents[x]], tokens[x]):
                continue
            if tokens[x] in self._grammar.ends:
                kept[x], masks[1 + x] = True, 0
                continue
            if not self._matcher.consume_token(tokens[x]):
                return False
            path.append(x)
            places[x] = self._grammar.after(places[parents[x]], tokens[x])
            if not self._grammar.fill(self._matcher, places[x], masks[1 + x]):
                return False
            kept[x] = True
            pending += below.get(x, [])
        return self._matcher.rollback(len(path) - 1)

    def _revive(self, mask: Masks | None = None) -> bool:
        """Rebuilds the matcher and writes the mask.

        Returns False and sets `error` if the matcher stops again.
        """
        # If the lexer is not worn, the grammar stopped the matcher. At draft or forced tokens, the
        # matcher can return to the answer. At the answer's last token (with a mask), it cannot.
        if not self._worn and mask is None and self._restart(self._origin):
            return True
        if self._worn and self._made < MAX_SHARED:
            fresh = self._grammar.fresh
            if fresh is not self._origin and self._restart(fresh, mask):
                return True
        if self._worn and self._made < MAX_MADE:
            self._made += 1
            fresh = self._grammar.make()
            if self._restart(fresh, mask):
                if self._made <= MAX_SHARED:
                    self._grammar.share(fresh)
                return True
        self.error = reason(self._matcher) or "no token may follow"
        return False

    @property
    def _worn(self) -> bool:
        """Whether the matcher stopped at a limit of its lexer, not because of the grammar."""
        if not self._matcher.is_error():
            return False
        error = self._matcher.get_error()
        return not any(words in error for words in _DEAD_ENDS)

    def _restart(self, origin: "LLMatcher", mask: Masks | None = None) -> bool:
        self._origin, self._matcher = origin, origin.deep_copy()
        return self._matcher.consume_tokens(self._said) and (
            mask is None or self._grammar.fill(self._matcher, self._place, mask)
        )


def _allows(mask: Masks, token: int) -> bool:
    return bool(int(mask[token >> 5]) >> (token & 31) & 1)


def _only(mask: Masks) -> int | None:
    """Returns the only token that a mask allows; None if the mask allows none or several."""
    words = np.flatnonzero(mask)
    if len(words) != 1:
        return None
    bits = int(mask[words[0]])
    return None if bits & (bits - 1) else 32 * int(words[0]) + bits.bit_length() - 1


# Texts that show which bytes a tokenizer's tokens stand for.
_PROBES = ('a {"b": [1, -2.5]}', "naïve, 東京 🙂")
# White space where JSON allows it: up to two blanks, and up to two line breaks with an indentation,
# so that a model may write its usual layout. llguidance's default has no limit, and a model that
# was not trained on JSON may write blanks until its tokens run out.
_WHITE_SPACE = r"[ \t]{0,2}((\r?\n){1,2}[ \t]{0,40})?"

_SHOWN = 200  # maximum characters of an error that a message quotes
_UNKNOWN = ("Unimplemented keys", "Unknown format", "oneOf constraints")  # llguidance's refusals


class Library:
    """Compiles grammars for one tokenizer. Used by one thread at a time.

    Args:
        effort: Limits for compiling one grammar.

    Raises:
        GuideError: llguidance is not installed or does not support the tokenizer, or the model has
            no token that ends an answer.
    """

    def __init__(self, tokenizer: TaskTokenizer, vocab_size: int, effort: Effort) -> None:
        text, self._ends = _readable(tokenizer), known_ends(tokenizer, vocab_size)
        try:
            self._tokens = make_tokens(text, vocab_size, self._ends[0])
        except ImportError as error:
            raise GuideError(
                "a guide by JSON schema, regular expression or grammar needs the library "
                f"llguidance; pip install llguidance ({error})"
            ) from error
        except Exception as error:  # llguidance raises plain exceptions for any fault
            raise GuideError(
                f"llguidance does not support this tokenizer ({error}); use a guide of choices"
            ) from error
        self._blank_in_front = _blank_in_front(self._tokens, tokenizer)
        self._sandbox = Sandbox(text, vocab_size, self._ends[0], effort)
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        misread = _misread(self._tokens, tokenizer, self._blank_in_front)
        self._never = _bits([i for i in misread if i < vocab_size], -(-vocab_size // 32))

    def compile(self, spec: GuideSpec) -> Grammar:
        """Compiles a JSON schema, an expression or a grammar.

        Raises:
            GuideError: The text is invalid, unsupported by llguidance, allows nothing, or exceeds
                the limits.
        """
        schema = _schema_of(spec) if spec.kind == "json_schema" else None
        source = self._source(_top_grammar(spec, schema))
        if refusal := self._sandbox.refusal(source):
            way_out = f"; leave it out, {LENIENT}" if refusal.startswith(_UNKNOWN) else ""
            raise GuideError(f"no answer can be guided by this {spec.kind}: {refusal}{way_out}")
        unique = None
        if schema and schema.members:
            unique = Unique(schema, self._tokenizer, self._opening)
        tokens = self._tokens
        return Grammar(lambda: make_matcher(tokens, source), self._ends, self._never, unique)

    @cached_property
    def _opening(self) -> Masks:
        return opening(self._tokenizer, self._vocab_size)

    def _source(self, grammar: dict[str, object]) -> str:
        if not self._blank_in_front:
            return json.dumps({"grammars": [grammar]})
        begin = {"lark_grammar": 'start: " " @answer'}
        return json.dumps({"grammars": [begin, {**grammar, "name": "answer"}]})


def _schema_of(spec: GuideSpec) -> Prepared:
    if spec.text.lstrip()[:1] not in ("{", ""):
        raise GuideError(
            f"this json_schema is not a JSON object but {spec.text[:20]!r}; send an object, "
            "or {} to allow any value"
        )
    try:
        return prepared(json.loads(spec.text))
    except GuideError:
        raise
    except (ValueError, RecursionError) as error:
        raise _unreadable(error) from error
    except (TypeError, AttributeError, KeyError, ArithmeticError) as error:
        raise GuideError(f"this json_schema is not a valid schema: {error}") from error


def _unreadable(error: Exception) -> GuideError:
    shown = f"{error!s:.{_SHOWN}}"  # the error may quote a number with thousands of digits
    return GuideError(f"this json_schema is not a JSON object, or is nested too deeply: {shown}")


def _top_grammar(spec: GuideSpec, schema: Prepared | None) -> dict[str, object]:
    """Returns a schema, expression or grammar in llguidance's own format."""
    from llguidance import LLMatcher

    if schema is None:
        if spec.kind == "grammar":
            return {"lark_grammar": spec.text}
        return dict(json.loads(LLMatcher.grammar_from_regex(spec.text))["grammars"][0])
    own = schema.root.get("x-guidance")
    defaults: JsonCompileOptions = {"whitespace_pattern": _WHITE_SPACE}
    if isinstance(own, dict) and "whitespace_flexible" in own:
        defaults = {}  # a pattern would take precedence
    try:
        text = LLMatcher.grammar_from_json_schema(schema.root, defaults=defaults)
        return dict(json.loads(text)["grammars"][0])
    except (ValueError, RecursionError) as error:
        raise _unreadable(error) from error


def _readable(tokenizer: TaskTokenizer) -> str:
    """Returns the ``tokenizer.json`` with a decoder that llguidance knows.

    llguidance looks only for ``ByteFallback`` or ``ByteLevel``. Tokenizers converted from GGUF have
    both, and llguidance takes the first, though only ``ByteLevel`` has an effect on their tokens.
    `_misread` checks the result.
    """
    text = tokenizer.backend.to_str()
    content = json.loads(text)
    decoder = content["decoder"] or {}
    steps = decoder.get("decoders", [decoder])
    kinds = {step.get("type"): step for step in steps}
    if "ByteLevel" in kinds:
        content["decoder"] = kinds["ByteLevel"]
    elif "ByteFallback" not in kinds and kinds.keys() & {"Metaspace", "Replace"}:
        if blank := kinds.get("Metaspace"):
            pattern = {"String": blank["replacement"]}
            steps = [{"type": "Replace", "pattern": pattern, "content": " "}]
        content["decoder"] = {"type": "Sequence", "decoders": [*steps, {"type": "ByteFallback"}]}
    else:
        return text
    return json.dumps(content)


def _blank_in_front(tokens: "LLTokenizer", tokenizer: TaskTokenizer) -> bool:
    """Whether the tokenizer adds a blank before a text when encoding, and drops it when decoding.

    If so, an answer starts with that blank, in tokens such as ``▁a``, like outputs in the corpus.

    Raises:
        GuideError: llguidance decodes this tokenizer's tokens differently.
    """
    ids = tokenizer.encode_outputs(_PROBES)
    kept = [(p, i) for p, i in zip(_PROBES, ids, strict=True) if tokenizer.decode(i) == p]
    fronts = {tokens.decode_bytes(i).decode(errors="replace").removesuffix(p) for p, i in kept}
    if fronts not in ({""}, {" "}):
        kind = type(tokenizer.backend.decoder).__name__
        raise GuideError(
            f"llguidance decodes this tokenizer's tokens (decoder {kind}) differently than the "
            "tokenizer; use a guide of choices"
        )
    return fronts == {" "}


def _misread(tokens: "LLTokenizer", tokenizer: TaskTokenizer, blank: bool) -> tuple[int, ...]:
    """Returns the tokens whose text in an answer differs from llguidance's text for them.

    These are added tokens with characters that the decoder converts or that stop the decoder from
    converting, and byte tokens such as ``<0x61>`` if the decoder does not convert them to bytes.
    """
    found = []
    added = tokenizer.backend.get_added_tokens_decoder()
    odd = {i for i, token in added.items() if not token.special} | tokenizer.byte_ids
    [around] = tokenizer.encode_outputs(_PROBES[:1])
    for i in range(tokenizer.vocab_size):
        alone = tokens.decode_bytes([i])
        same = not alone or alone == tokenizer.token_bytes(i)
        if same and i in odd:
            ids = [*around, i, *around]
            text = tokens.decode_bytes(ids).decode(errors="replace")
            same = tokenizer.decode(ids) == text.removeprefix(" " * blank)
        if not same:
            found.append(i)
    return tuple(found)


def _bits(ids: Sequence[int], words: int) -> Masks:
    """Returns the mask of some tokens, ``uint32[words]``."""
    mask = np.zeros(words, np.uint32)
    for i in ids:
        mask[i // 32] |= np.uint32(1 << i % 32)
    return mask
