"""llguidance with one tokenizer: JSON schemas, regular expressions and Lark grammars as grammars.

It is imported when the first one is compiled: an engine without guides needs no such library.
"""

import json
from typing import TYPE_CHECKING

import numpy as np

from tasc_engine.errors import GuideError
from tasc_engine.guided.following import Masks
from tasc_engine.guided.grammar import Grammar
from tasc_engine.guided.sandbox import Effort, Sandbox
from tasc_engine.guided.trial import make_matcher, make_tokens
from tasc_engine.request import GuideSpec
from tasc_text import TaskTokenizer

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
