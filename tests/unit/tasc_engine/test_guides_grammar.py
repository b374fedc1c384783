"""Tests guides by schema, expression and grammar: allowed texts, refusals, and limits."""

import json
import os
import pickle
import signal
import sys
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
from guide_walks import allowed, answers, guide_after, ids, look, path_to, random_answer, regex
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from support import failing, refused
from tasc_draft import Drafts
from tasc_engine.errors import GuideError
from tasc_engine.guided import Guide, GuideLimits, Guides, follow, grammar, sandbox, trial
from tasc_engine.guided.grammar import MAX_FORCED, MAX_MADE
from tasc_engine.guided.sandbox import Effort, Sandbox, Unsettled
from tasc_engine.guided.schemas import prepared
from tasc_engine.guided.trial import make_matcher
from tasc_engine.guided.unique import Place, Unique, opening
from tasc_protocol import GuideSpec
from tasc_text import TaskTokenizer
from tiny import sentencepiece

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "n": {"type": "integer", "minimum": 0, "maximum": 300},
        "tags": {"type": "array", "items": {"enum": ["x", "naïve", "東"]}, "maxItems": 2},
    },
    "required": ["name", "n", "tags"],
    "additionalProperties": False,
}
SPECS = (
    GuideSpec("json_schema", text=json.dumps(SCHEMA)),
    GuideSpec("json_schema", text='{"type": "object"}'),
    GuideSpec("regex", text=r"(alarm|friday)( [a-c0-9]{1,4})*"),
    GuideSpec("regex", text="intent: alarm_set, slot fills: .{0,9}"),
    GuideSpec("grammar", text='start: e\ne: e "+" e | "(" e ")" | /[0-9]+/'),
    GuideSpec("grammar", text='start: b "y"*\nb[lazy]: /[a-z ]*x/'),
    GuideSpec("grammar", text='start: b "y"\nb[suffix="x"]: /[a-z]*/'),
    GuideSpec("grammar", text='start: "ab" "cd" "x"*\n%ignore / {1,3}/'),
)
EOS = 0


@pytest.fixture(scope="module")
def guides(tokenizer: TaskTokenizer) -> Guides:
    return Guides(tokenizer, tokenizer.vocab_size + 100)


def assert_answers(
    guides: Guides, tokenizer: TaskTokenizer, spec: GuideSpec, texts: list[str]
) -> None:
    """Asserts that a guide allows these texts only, also with the tokenizer's own tokens."""
    found = answers(lambda: guides.of(spec, 99), EOS, most=20)
    assert {tokenizer.decode(tokens) for tokens in found} == set(texts)
    assert found >= {tuple(tokens) for tokens in tokenizer.encode_outputs(texts)}


@settings(deadline=None, max_examples=30)
@given(texts=st.lists(st.text("ab東 ", min_size=1, max_size=4), min_size=1, max_size=4))
def test_finite_expression_allows_exactly_its_texts(guides, tokenizer, texts: list[str]) -> None:
    assert_answers(guides, tokenizer, regex(*texts), texts)


@settings(deadline=None, max_examples=40)
@given(spec=st.sampled_from(SPECS), data=st.data())
def test_allowed_tokens_after_a_node_equal_allowed_tokens_after_its_path(
    guides, tokenizer, spec, data
) -> None:
    def make() -> Guide:
        return guides.of(spec, 99)

    emitted = random_answer(make(), data.draw(st.integers(0, 50)), data.draw(st.integers(0, 8)))
    emitted = [token for token in emitted if token != EOS]
    paths: list[list[int]] = []
    tokens, parents = [], []
    for x in range(data.draw(st.integers(0, 9))):
        parents.append(data.draw(st.integers(-1, x - 1)))
        above = paths[parents[-1]] if parents[-1] >= 0 else []
        options = [
            t for t in allowed(guide_after(make, [*emitted, *above])) if EOS not in above
        ] or [5]
        wrong = st.integers(0, tokenizer.vocab_size - 1)
        tokens.append(data.draw(st.sampled_from(options) | wrong))
        paths.append([*above, tokens[-1]] if tokens[-1] in options and above != [5] else [5])
    guide = guide_after(make, emitted)
    for _ in range(2):  # the second finds what the first did
        now, kept, after = look(guide, tokens, parents)
        assert now == allowed(guide_after(make, emitted))
        for x, parent in enumerate(parents):
            before = now if parent < 0 else after[parent]
            assert kept[x] == ((parent < 0 or kept[parent]) and tokens[x] in before)
            if kept[x]:
                path = path_to(tokens, parents, x)
                assert after[x] == allowed(guide_after(make, [*emitted, *path]))


@settings(deadline=None, max_examples=40)
@given(spec=st.sampled_from(SPECS), seed=st.integers(0, 50), length=st.integers(0, 30))
def test_single_allowed_tokens_are_forced(guides, spec, seed, length) -> None:
    def make() -> Guide:
        return guides.of(spec, 99)

    emitted = random_answer(make(), seed, length)
    expected: list[int] = []
    while len(expected) < 6 and len(only := allowed(guide_after(make, [*emitted, *expected]))) == 1:
        expected += only
    guide = guide_after(make, emitted)
    assert guide.forced(6).tolist() == expected
    assert allowed(guide) == allowed(guide_after(make, emitted))


def test_long_forced_stretch_is_forced_in_parts(guides: Guides, tokenizer) -> None:
    text = "wake me up at nine am " * 100
    schema = json.dumps({"const": text})
    guide = guides.of(GuideSpec("json_schema", text=schema), 99_999)
    emitted: list[int] = []
    while len(piece := guide.forced(99_999)):
        assert len(piece) <= MAX_FORCED
        guide.advance(piece)
        emitted += piece.tolist()
    assert json.loads(tokenizer.decode(emitted)) == text


def test_forced_opening_of_a_guide_is_computed_once(guides: Guides, monkeypatch) -> None:
    spec = GuideSpec("json_schema", text=json.dumps({"enum": ["alarm set now", "alarm set ever"]}))
    first = guides.of(spec, 99)
    opening = first.forced(99)
    assert len(opening) > 2
    monkeypatch.setattr(grammar.Grammar, "fill", failing(AssertionError("a mask was computed")))
    later = guides.of(spec, 99)
    assert later.forced(2).tolist() == opening[:2].tolist()
    assert later.forced(99).tolist() == opening.tolist()
    monkeypatch.undo()
    later.advance(opening[:2])
    assert later.forced(99).tolist() == opening[2:].tolist()


LAYOUTS = {
    "compact": {"separators": (",", ":")},
    "one line": {},
    "two": {"indent": 2},
    "four": {"indent": 4},
    "tabs": {"indent": "\t"},
    "wide": {"separators": (",", ":" + " " * 3)},
    "long": {"indent": 50},
}


@pytest.mark.parametrize(
    ("options", "followed"),
    [
        (None, ["compact", "one line", "two", "four", "tabs"]),
        ({"whitespace_pattern": " ?"}, ["compact", "one line"]),
        ({"whitespace_pattern": "[ \\n]{0,9}"}, ["compact", "one line", "two", "four", "wide"]),
        ({"whitespace_flexible": False}, ["compact"]),
        ({"whitespace_flexible": True}, list(LAYOUTS)),
    ],
    ids=str,
)
def test_json_has_the_layouts_that_models_write_unless_the_schema_sets_one(
    guides: Guides, tokenizer: TaskTokenizer, options: dict | None, followed: list[str]
) -> None:
    value = {"name": "a b", "n": 12, "tags": ["x", "東"]}
    schema = SCHEMA | ({"x-guidance": options} if options else {})
    found = []
    for name, layout in LAYOUTS.items():
        emitted = tokenizer.encode_outputs([json.dumps(value, ensure_ascii=False, **layout)])[0]
        guide = guides.of(GuideSpec("json_schema", text=json.dumps(schema)), 99)
        if all(look(guide, emitted, range(-1, len(emitted) - 1))[1]):
            found.append(name)
    assert found == followed


def test_guide_keeps_all_items_of_indented_json(guides, tokenizer) -> None:
    """If the guide forbids the next token of the text, the first allowed token is emitted."""
    wanted = tokenizer.encode_outputs([json.dumps(["a", "b", "c"], indent=2)])[0]
    guide = guides.of(GuideSpec("json_schema", text='{"items": {"type": "string"}}'), 99)
    emitted: list[int] = []
    for token in [*wanted, EOS]:
        if found := allowed(guide):
            emitted.append(token if token in found else found[0])
            guide.advance(ids(emitted[-1:]))
    assert json.loads(tokenizer.decode(emitted)) == ["a", "b", "c"]


def test_white_space_between_items_is_bounded(guides: Guides, tokenizer: TaskTokenizer) -> None:
    """A model that always prefers white space must still emit an item."""
    guide = guides.of(GuideSpec("json_schema", text='{"items": {"enum": ["a"]}, "minItems": 1}'), 9)
    guide.advance(ids(tokenizer.encode_outputs(["["])[0]))
    for _ in range(60):
        found = allowed(guide)
        blank = [token for token in found if not tokenizer.token_bytes(token).strip()]
        if not blank:
            break
        guide.advance(ids(blank[:1]))
    assert not blank
    assert found


def texts_of(guides: Guides, tokenizer: TaskTokenizer, schema: dict, most: int) -> set[str]:
    """All answers that a schema allows without white space."""
    compact = schema | {"x-guidance": {"whitespace_flexible": False}}
    spec = GuideSpec("json_schema", text=json.dumps(compact))
    found = answers(lambda: guides.of(spec, 99), EOS, most)
    return {tokenizer.decode(tokens) for tokens in found}


def fits(guides: Guides, tokenizer: TaskTokenizer, schema: dict, value: object) -> bool:
    """Whether a schema allows a value, both as a draft and as an answer."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    emitted = [*tokenizer.encode_outputs([text])[0], EOS]
    spec = GuideSpec("json_schema", text=json.dumps(schema))
    guide = guides.of(spec, 99)
    drafted = all(look(guide, emitted, range(-1, len(emitted) - 1))[1])
    allowed_now = [token in allowed(guide) and not guide.advance(ids([token])) for token in emitted]
    assert drafted == all(allowed_now)
    return drafted


def unique(items: dict, **more: object) -> dict:
    return {"type": "array", "items": items, "uniqueItems": True, **more}


@pytest.mark.parametrize(
    ("items", "values"),
    [
        ({"enum": ["a", "ab", "b東"]}, ["a", "ab", "b東"]),
        ({"enum": ["a", 1, None, True], "type": ["integer", "null"]}, [1, None]),
        ({"$ref": "#/$defs/E"}, ["x", 1, 2]),
        ({"type": "integer", "minimum": 9, "maximum": 11}, [9, 10, 11]),
        ({"anyOf": [{"const": "a"}, {"type": "boolean"}]}, ["a", True, False]),
        ({"enum": [1, 2, 3, "a"], "minimum": 2}, [2, 3, "a"]),
        ({"enum": [1, 2, True], "maximum": 1}, [1, True]),
        ({"type": "integer", "minimum": 0.5, "maximum": 2.5}, [1, 2]),
        ({"type": "integer", "minimum": -1.5, "maximum": 0}, [-1, 0]),
        ({"type": "string", "anyOf": [{"const": "a"}, {"const": 1}, {"const": "b"}]}, ["a", "b"]),
        ({"$ref": "#/$defs/E", "type": "integer"}, [1, 2]),
        ({"$ref": "#/$defs/E", "enum": ["x", 2, 3]}, ["x", 2]),
        ({"$ref": "#/$defs/E", "maximum": 1}, ["x", 1]),
        ({"const": 1, "enum": [1, 2]}, [1]),
        ({"anyOf": [{"const": 1}, {"const": True}], "type": "boolean"}, [True]),
    ],
    ids=str,
)
def test_unique_items_allowed_by_all_keywords_occur_once_in_any_order(
    guides, tokenizer, items, values
):
    """No comma is allowed after the last possible item."""
    defs = {"$defs": {"E": {"enum": ["x", 1, 2]}}}
    every = [list(p) for n in range(len(values) + 1) for p in permutations(values, n)]
    dumped = {json.dumps(v, separators=(",", ":"), ensure_ascii=False) for v in every}
    assert texts_of(guides, tokenizer, unique(items) | defs, 40) == dumped
    if len(values) > 1:
        two = texts_of(guides, tokenizer, unique(items, minItems=2, maxItems=2) | defs, 40)
        assert two == {text for text in dumped if len(json.loads(text)) == 2}
    compact = unique(items) | defs | {"x-guidance": {"whitespace_flexible": False}}
    spec = GuideSpec("json_schema", text=json.dumps(compact))
    text = json.dumps(values, separators=(",", ":"), ensure_ascii=False).removesuffix("]")
    found = allowed(guide_after(lambda: guides.of(spec, 99), tokenizer.encode_outputs([text])[0]))
    assert {tokenizer.decode([token]) for token in found} == {"]"}


def test_unique_items_are_followed_at_any_depth(guides: Guides, tokenizer: TaskTokenizer) -> None:
    labels = unique({"enum": ["a", "b"]})

    def kind(name: str, tags: dict) -> dict:
        properties = {"kind": {"const": name}, "tags": tags}
        return {"type": "object", "properties": properties, "required": [*properties]}

    schema = {
        "$defs": {"tree": {"type": "object", "properties": {
            "of": labels, "kids": {"type": "array", "items": {"$ref": "#/$defs/tree"}}}}},
        "type": "object",
        "properties": {
            "tree": {"$ref": "#/$defs/tree"},
            "pair": {"type": "array", "prefixItems": [labels, {"items": {"enum": ["a"]}}]},
            "maybe": {"anyOf": [labels, {"type": "null"}]},
            "pet": {"oneOf": [kind("cat", labels), kind("dog", labels | {"uniqueItems": False})]},
            "map": {"type": "object", "additionalProperties": labels},
            "named": {"type": "object", "patternProperties": {"^x": labels}},
        },
    }  # fmt: skip

    def ok(value: object) -> bool:
        return fits(guides, tokenizer, schema, value)

    assert ok({"tree": {"of": ["b", "a"], "kids": [{"of": ["a"], "kids": []}, {"of": ["a"]}]}})
    assert not ok({"tree": {"of": ["b"], "kids": [{"of": ["a", "a"]}]}})
    assert ok({"pair": [["a", "b"], ["a", "a"]]})
    assert not ok({"pair": [["a", "a"], []]})
    assert ok({"maybe": None})
    assert ok({"maybe": ["a"]})
    assert not ok({"maybe": ["b", "b"]})
    assert ok({"pet": {"kind": "dog", "tags": ["a", "a"]}})
    assert not ok({"pet": {"kind": "cat", "tags": ["a", "a"]}})
    assert ok({"map": {'"tags": [': ["a"], "[\\": ["a", "b"]}})
    assert not ok({"map": {"x": ["a"], "y": ["b", "b"]}})
    assert ok({"named": {"x": ["a", "b"], "y": 1}})
    assert not ok({"named": {"x": ["a", "a"]}})
    assert not ok('{"maybe": [\n  "a",\n  "a"')


def test_strings_and_numbers_outside_unique_arrays_are_not_recorded(tokenizer) -> None:
    labels = unique({"enum": ["a", "b"]})
    schema = {
        "type": "object",
        "properties": {"kind": {"const": "cat"}, "text": {"type": "string"}, "labels": labels},
    }
    several = opening(tokenizer, tokenizer.vocab_size)
    followed = Unique(prepared(schema), tokenizer, several)

    def behind_text(text: str) -> Place:
        place: Place | None = Place()
        for token in tokenizer.encode_outputs([text])[0]:
            assert place is not None
            place = followed.after(place, token)
        assert place is not None
        return place

    for begin in ('{"text": "', '{"labels": ["a"], "text": "', '{"text": 1'):
        assert behind_text(begin + "12" * 999) == behind_text(begin + "12")
    for begin in ('{"kind": "', '{"labels": ["a", "', '{"'):
        assert behind_text(begin + "b").text == b'"b'
    (comma,) = tokenizer.encode_outputs([","])[0]
    place = behind_text('{"text": "' + 'a[,\\"' * 99 + '", "labels": ["a"')
    assert followed.after(place, comma)
    assert followed.after(behind_text('{"text": "[", "labels": ["b", "a"'), comma) is None


def test_token_with_several_items_does_not_repeat_an_item(folder: Path) -> None:
    tokenizer = with_decoder(folder, decoders.ByteLevel(), '["a","a"', '["a","b"', ',"b","b"')
    guides = Guides(tokenizer, tokenizer.vocab_size)
    found = texts_of(guides, tokenizer, unique({"enum": ["a", "b"]}), 9)
    assert found == {"[]", '["a"]', '["b"]', '["a","b"]', '["b","a"]'}
    tokens = [tokenizer.backend.token_to_id(text) for text in ('["a","a"', '["a","b"')]
    spec = GuideSpec("json_schema", text=json.dumps(unique({"enum": ["a", "b"]})))
    assert [token in allowed(guides.of(spec, 9)) for token in tokens] == [False, True]


def test_repeated_item_is_an_error(guides: Guides, tokenizer) -> None:
    spec = GuideSpec("json_schema", text=json.dumps(unique({"enum": ["a", "b"]})))
    guide = guides.of(spec, 99)
    guide.advance(ids(tokenizer.encode_outputs(['["a", "a"'])[0]))
    assert "unique" in guide.error
    assert not allowed(guide)


@pytest.mark.parametrize("leaf", [{"enum": []}, {"const": "a"}])
def test_nested_references_are_resolved_once(guides: Guides, leaf: dict) -> None:
    two = {str(n): {"anyOf": [{"$ref": f"#/$defs/{n + 1}"}] * 2} for n in range(60)}
    schema = {"type": "array", "items": {"$ref": "#/$defs/0"}, "uniqueItems": True}
    schema["$defs"] = two | {"60": leaf}
    with refused(GuideError, "uniqueItems" if "const" in leaf else ""):
        guides.of(GuideSpec("json_schema", text=json.dumps(schema | {"minItems": 1})), 99)


def test_lenient_schemas_ignore_unenforceable_keywords(guides: Guides, tokenizer) -> None:
    lenient = {"x-guidance": {"lenient": True}}
    assert fits(guides, tokenizer, unique({"type": "string"}) | lenient, ["a", "a"])
    assert fits(guides, tokenizer, {"type": "string", "format": "regex"} | lenient, '"(("')
    assert not fits(guides, tokenizer, unique({"enum": ["a", "b"]}) | lenient, ["a", "a"])


FRIDAY = [regex("friday"), GuideSpec("choice", ("friday",))]


@pytest.mark.parametrize("spec", FRIDAY)
def test_token_that_is_not_allowed_is_an_error(guides: Guides, tokenizer, spec) -> None:
    guide = guides.of(spec, 99)
    guide.advance(ids(tokenizer.encode_outputs(["z"])[0]))
    assert guide.error
    assert look(guide, [5], [-1]) == ([], [False], [[]])
    none = Drafts.empty(1)
    masks = follow([guide], none).allowed
    assert not masks.masks[masks.mask_of].any()


@pytest.mark.parametrize("spec", FRIDAY)
def test_complete_answer_allows_only_its_end(guides, tokenizer, spec) -> None:
    guide = guides.of(spec, 99)
    guide.advance(ids(tokenizer.encode_outputs(["friday"])[0]))
    assert look(guide, [EOS, EOS, 5], [-1, 0, -1]) == (
        [EOS], [True, False, False], [[], [], []],
    )  # fmt: skip
    assert guide.forced(3).tolist() == [EOS]
    guide.advance(ids([EOS]))
    assert look(guide, [5], [-1]) == ([], [False], [[]])
    assert not len(guide.forced(3))
    assert not guide.error


@pytest.mark.parametrize("first", [True, False])
def test_any_end_token_is_allowed_after_complete_text(folder: Path, first: bool) -> None:
    x, z = (i[0] for i in TaskTokenizer.from_folder(folder).encode_outputs(["x", "z"]))
    ends = [z, EOS] if first else [EOS, z]
    tokenizer = TaskTokenizer(folder / "tokenizer.json", ends)
    guides = Guides(tokenizer, tokenizer.vocab_size + 100)
    found = allowed(guides.of(GuideSpec("regex", text="(?s:.*)"), 99))
    assert {x, z, EOS} <= {*found}
    assert max(found) < tokenizer.vocab_size
    optional = GuideSpec("regex", text="x(xx)?")
    assert look(guides.of(optional, 99), [x, z, EOS, z], [-1, 0, 0, -1])[1] == [True] * 3 + [False]
    once = guide_after(lambda: guides.of(optional, 99), [x])
    assert {x, z, EOS} <= {*allowed(once)}
    assert not len(once.forced(9))
    for end in ends:
        over = guide_after(lambda: guides.of(optional, 99), [x, end])
        assert not allowed(over)
        assert not over.error
    whole = guide_after(lambda: guides.of(optional, 99), [x, x, x])
    assert allowed(whole) == whole.forced(9).tolist() == ends[:1]


def test_end_token_inside_a_grammar_is_not_allowed(guides: Guides, tokenizer) -> None:
    guide = guides.of(GuideSpec("grammar", text='start: "a" (<|end|> | "c") "b"'), 99)
    guide.advance(ids(tokenizer.encode_outputs(["a"])[0]))
    assert allowed(guide) == tokenizer.encode_outputs(["c"])[0]


def test_masks_of_another_width_are_refused(guides: Guides) -> None:
    guide = guides.of(regex("friday"), 99)
    none = ids([])
    with refused(ValueError):
        guide.look(none, none, np.zeros(0, bool), np.zeros((1, guide.words - 1), np.uint32))


@pytest.mark.parametrize(
    ("kind", "text", "named"),
    [
        ("regex", "(a", ""),
        ("regex", "(?=a)b", "look-around"),
        ("regex", r"[^\s\S]", ""),
        ("regex", r"a[^\s\S]", ""),
        ("regex", "a{0}", ""),
        ("regex", "(" * 5000 + ")" * 5000, ""),
        ("json_schema", " []", " []"),
        ("json_schema", '{"type": "integer"}, "lark_grammar": "start: /a/"', ""),
        ("json_schema", '{"items": ' * 3000 + "{}" + "}" * 3000, ""),
        ("json_schema", '{"type": "foo"}', "foo"),
        ("json_schema", '{"type": "array", "uniqueItems": true}', "lenient"),
        ("json_schema", '{"items": {"type": "string"}, "uniqueItems": true}', "enum"),
        ("json_schema", '{"items": {"enum": [1]}, "minItems": 2, "uniqueItems": true}', "minItems"),
        ("json_schema", '{"items": {"enum": [1.5]}, "uniqueItems": true}', "uniqueItems"),
        *(
            ("json_schema", json.dumps(unique({"type": "integer", **limits})), "uniqueItems")
            for limits in (
                {"minimum": 0, "maximum": 10**400},
                {"minimum": 0.5, "maximum": 10**400},
                {"minimum": -(10**400), "maximum": 0.5},
            )
        ),
        ("json_schema", json.dumps({"type": "integer", "maximum": 10**400}), ""),
        (
            "json_schema",
            '{"anyOf": [{"items": {"enum": ["a"]}, "type": "array", '
            '"uniqueItems": true}, {"type": "array"}]}',
            "anyOf",
        ),
        *(
            (
                "json_schema",
                json.dumps({name: [unique({"enum": ["a", "b"]}), unique({"enum": ["a", other]})]}),
                name,
            )
            for name, other in (("anyOf", "c"), ("oneOf", "c"), ("allOf", "a"))
        ),
        ("json_schema", '{"items": {"enum": ["a"]}, "uniqueItems": true, "$ref": "b"}', "$ref"),
        ("json_schema", '{"type": "array", "contains": {}}', "lenient"),
        ("json_schema", '{"format": "regex"}', "lenient"),
        ("json_schema", '{"properties": 3, "anyOf": 4}', ""),
        ("json_schema", '{"$ref": "file:///etc/passwd"}', "retriev"),
        ("grammar", "start: foo", "foo"),
        ("grammar", '{"grammars": [{"json_schema": {}}]}', ""),
        ("grammar", "start: start start", ""),
        ("grammar", 'start: b "y"\nb[stop="x"]: /.*/', ""),
    ],
)
def test_invalid_grammar_is_refused_with_the_reason(guides: Guides, kind, text, named) -> None:
    with refused(GuideError, kind, named) as caught:
        guides.of(GuideSpec(kind, text=text), 99)
    assert len(str(caught.value)) < 400
    assert guides.known(GuideSpec(kind, text=text))


@pytest.mark.parametrize(("seconds", "exponent"), [(0.3, 33), (60.0, 25)])
def test_slow_grammar_is_refused_without_affecting_other_grammars(tokenizer, seconds, exponent):
    limits = GuideLimits(compile_seconds=seconds, compile_bytes=2**exponent)
    guides = Guides(tokenizer, tokenizer.vocab_size, limits)
    with refused(GuideError, f"{seconds:g} s", f"{2 ** (exponent - 20)} MiB"):
        guides.of(GuideSpec("grammar", text="start: A\nA: /(.*b.{20}.*)/ & ~/(.*c.{20}.*)/"), 99)
    assert allowed(guides.of(regex("friday"), 99))


def test_only_choice_guides_work_without_the_guide_library(
    tokenizer: TaskTokenizer, monkeypatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    guides = Guides(tokenizer, tokenizer.vocab_size)
    assert allowed(guides.of(GuideSpec("choice", ("friday",)), 99))
    with refused(GuideError, "llguidance"):
        guides.of(regex("friday"), 99)


def test_tokenizer_with_unknown_decoder_is_refused(folder, tmp_path: Path) -> None:
    made = Tokenizer.from_file(str(folder / "tokenizer.json"))
    made.normalizer = normalizers.Prepend("x")
    made.decoder = decoders.Sequence([made.decoder, decoders.Strip("x", 1, 0)])
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = TaskTokenizer(tmp_path / "tokenizer.json", [EOS])
    with refused(GuideError, "tokenizer"):
        Guides(tokenizer, tokenizer.vocab_size).of(regex("friday"), 99)
    with refused(GuideError, "vocab size"):
        Guides(tokenizer, 100).of(regex("friday"), 99)


GGUF = [
    decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("▁", " "), decoders.ByteLevel()
]  # fmt: skip


def with_decoder(folder: Path, decoder: decoders.Decoder, *added: str) -> TaskTokenizer:
    """The tokenizer of a folder with another decoder, and with tokens that are not special."""
    made = Tokenizer.from_file(str(folder / "tokenizer.json"))
    made.decoder = decoder
    made.add_tokens([AddedToken(text, normalized=False) for text in added])
    return saved(made, folder)


def saved(made: Tokenizer, folder: Path) -> TaskTokenizer:
    path = folder / "other.json"
    made.save(str(path))
    return TaskTokenizer(path, [EOS])


@pytest.mark.parametrize(
    "decoder", [decoders.Sequence(GGUF), decoders.Sequence([decoders.ByteLevel()])]
)
def test_byte_level_decoders_in_a_sequence_are_supported(folder: Path, decoder) -> None:
    tokenizer = with_decoder(folder, decoder)
    texts = ["a 東", "naïve 🙂"]
    assert_answers(Guides(tokenizer, tokenizer.vocab_size), tokenizer, regex(*texts), texts)


@pytest.mark.parametrize("fallback", [True, False])
@pytest.mark.parametrize("prepend", [True, False])
def test_sentencepiece_decoders_are_supported(folder: Path, fallback: bool, prepend: bool) -> None:
    """With ``prepend`` an answer begins with a blank that the decoder drops."""
    pieces = [*sorted(set("".join(grammar._PROBES)) - {" "} | {'"'}), "▁", "▁a", "▁b"]
    made = sentencepiece(pieces, [("▁", "a"), ("▁", "b")], ["</s>", "<unk>"], prepend)
    if not fallback:  # as of Unigram models
        scheme = "always" if prepend else "never"
        made.normalizer = None
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
        made.decoder = decoders.Metaspace(prepend_scheme=scheme, split=False)
    tokenizer = saved(made, folder)
    guides = Guides(tokenizer, tokenizer.vocab_size)
    json_schema = GuideSpec("json_schema", text='{"enum": ["a b", "ba"], "type": "string"}')
    for spec in (regex("a b", "ba"), GuideSpec("grammar", text='start: "a b" | "ba"')):
        assert_answers(guides, tokenizer, spec, ["a b", "ba"])
    assert_answers(guides, tokenizer, json_schema, ['"a b"', '"ba"'])


def test_tokens_with_another_decoded_text_are_not_allowed(folder: Path) -> None:
    for decoder, texts, exact in (
        (decoders.ByteLevel(), ["a b", "\n\n"], ["a b", "\n\n"]),
        (decoders.Sequence(GGUF[-1:]), ["Ġx"], ["Ġx"]),  # letters that stand for bytes
        (decoders.Sequence(GGUF), ["a b"], []),  # the fused text is no longer bytes
    ):
        tokenizer = with_decoder(folder, decoder, *texts)
        guides = Guides(tokenizer, tokenizer.vocab_size)
        ids = {text: tokenizer.backend.token_to_id(text) for text in texts}
        found = allowed(guides.of(GuideSpec("regex", text="(?s:.*)"), 99))
        assert [text for text in texts if ids[text] in found] == exact


def test_word_pieces_are_refused(folder: Path) -> None:
    letters = [c for c in sorted(set("".join(grammar._PROBES))) if c != " "]
    names = ["[UNK]", *letters, *(f"##{c}" for c in letters)]
    made = Tokenizer(models.WordPiece({n: i for i, n in enumerate(names)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    tokenizer = saved(made, folder)
    with refused(GuideError, "WordPiece", "choices"):
        Guides(tokenizer, tokenizer.vocab_size).of(regex("a"), 99)


@pytest.mark.parametrize(
    ("parts", "named"),
    [
        (("choice",), ["choices"]),
        (("choice", ("a",), "b"), ["choices", "text"]),
        (("regex",), ["regex", "text"]),
        (("regex", ("a",), "a"), ["regex"]),
        (("yaml", (), "a"), ["yaml", "choice, labels, json_schema, regex, grammar"]),
        (("choice", ("a", "b\ud800")), ["choice 1", r"'\ud800' at character 1"]),
        (("regex", (), "\udfff"), ["regex", r"'\udfff' at character 0"]),
        (("choice", ("a",) * 20_001), ["20001 choices", "20000"]),
        (("choice", ("é" * 600_000, "é" * 400_001)), ["2000002 bytes", "2000000"]),
        (("grammar", (), "é" * 32_769), ["65538 bytes", "65536"]),
    ],
)
def test_unknown_guide_kind_is_refused_and_named(parts: tuple, named: list[str]) -> None:
    with refused(ValueError, *named):
        GuideSpec(*parts)


def test_equal_guides_have_equal_hashes() -> None:
    one, other = GuideSpec("choice", ("a", "東 🙂")), GuideSpec("choice", ("a", "東 🙂"))
    assert hash(one) == hash(other)
    assert {one: 1}[other] == 1
    assert one != GuideSpec("choice", ("a",))
    sent = pickle.dumps(one)
    assert sent == pickle.dumps(other)
    assert pickle.loads(sent) == one
    assert one.size_bytes == 9
    assert b"_hash" not in sent


@pytest.fixture
def lexers(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Every lexer that was made, in turn."""
    seen: list[object] = []
    monkeypatch.setattr(
        grammar, "make_matcher", lambda *a: seen.append(make_matcher(*a)) or seen[-1]
    )
    return seen


def test_answers_continue_after_other_answers_exhausted_the_lexer(
    tokenizer, monkeypatch, lexers
) -> None:
    # Each letter has states of its own, which are too many together.
    spec, roomy = many_states("abcd", 32), Guides(tokenizer, tokenizer.vocab_size)
    pairs = [(roomy.of(spec, 99), token) for [token] in tokenizer.encode_outputs("abcd")]
    monkeypatch.setitem(trial.LIMITS, "max_lexer_states", 100)
    guides = Guides(tokenizer, tokenizer.vocab_size)
    lexers.clear()
    rows = [(guides.of(spec, 99), *pair) for pair in pairs]
    for _ in range(30):
        for guide, expected, token in rows:
            assert look(guide, [token, token], [-1, 0])[0] == allowed(expected)
            guide.advance(ids([token]))
            expected.advance(ids([token]))
    assert not any(guide.error for guide, _, _ in rows)
    assert 2 <= len(lexers) <= 1 + MAX_MADE * len(rows)


def many_states(letters: str, most: int) -> GuideSpec:
    return GuideSpec("regex", text="|".join(f"{c}{{1,{most}}}x" for c in letters))


def test_renewed_lexer_is_shared_by_answers(tokenizer, monkeypatch, lexers):
    letters = "abcdefghij"
    spec = many_states(letters, 14)
    monkeypatch.setitem(trial.LIMITS, "max_lexer_states", 100)
    guides = Guides(tokenizer, tokenizer.vocab_size)
    live = [guides.of(spec, 99) for _ in range(40)]
    for [token] in tokenizer.encode_outputs(letters):
        row = guides.of(spec, 99)
        for _ in range(12):
            allowed(row)
            row.advance(ids([token]))
    [[token]] = tokenizer.encode_outputs(["j"])
    for _ in range(12):
        for guide in live:
            assert token in allowed(guide)
            guide.advance(ids([token]))
    assert 2 <= len(lexers) <= 5


def test_answer_beyond_the_guide_limits_ends_with_the_reason(tokenizer, monkeypatch, lexers):
    spec = GuideSpec("regex", text="x(.*a.{30}){20}")
    x = tokenizer.encode_outputs(["x"])[0]
    monkeypatch.setitem(trial.LIMITS, "step_lexer_fuel", 3000)
    guides = Guides(tokenizer, tokenizer.vocab_size)
    guide = guides.of(spec, 999)
    assert look(guide, x, [-1])[0] == x
    assert not guide.error
    emitted = tokenizer.encode_outputs(["xabababab" * 6])[0]
    guide.advance(ids(emitted))
    assert look(guide, [5, 6], [-1, 0]) == ([], [False, False], [[], []])
    assert "lexer error" in guide.error
    assert not len(guide.forced(3))
    assert len(lexers) <= 1 + MAX_MADE
    assert allowed(guides.of(spec, 999)) == x


def test_dead_end_of_a_grammar_is_known_without_another_compile(
    folder: Path, lexers: list[object]
) -> None:
    x, z = (i[0] for i in TaskTokenizer.from_folder(folder).encode_outputs(["x", "z"]))
    tokenizer = TaskTokenizer(folder / "tokenizer.json", [EOS, z])
    guide = Guides(tokenizer, tokenizer.vocab_size).of(GuideSpec("regex", text="[xy]z"), 99)
    assert look(guide, [x], [-1])[1] == [False]
    assert not guide.error
    guide.advance(ids([x]))
    assert not allowed(guide)
    assert guide.error == "no token may follow"
    assert len(lexers) == 1


GRAMMAR = '{"grammars": [{"lark_grammar": "start: \\"friday\\""}]}'


def sandbox_of(tokenizer: TaskTokenizer) -> Sandbox:
    text = tokenizer.backend.to_str()
    return Sandbox(text, tokenizer.vocab_size, tokenizer.eos_id, Effort(30.0, 2**26))


def children() -> set[int]:
    """The processes that this one has started."""
    lists = Path("/proc/self/task").glob("*/children")
    return {int(pid) for own in lists for pid in own.read_text().split()}


@pytest.mark.parametrize("wait", [False, True])
def test_killed_compile_process_does_not_affect_the_next_grammar(tokenizer, wait: bool) -> None:
    asked, before = sandbox_of(tokenizer), children()
    assert not asked.refusal(GRAMMAR)
    (first,) = children() - before
    os.kill(first, signal.SIGKILL)
    if wait:
        os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)
    assert not asked.refusal(GRAMMAR)
    assert children() - before - {first}


def test_stalled_compile_process_is_ended_and_its_result_is_not_cached(
    tokenizer: TaskTokenizer,
) -> None:
    guides = Guides(tokenizer, tokenizer.vocab_size, GuideLimits(compile_seconds=0.1))
    before = children()
    assert allowed(guides.of(regex("alarm"), 99))
    (started,) = children() - before
    os.kill(started, signal.SIGSTOP)
    with pytest.raises(GuideError):
        guides.of(regex("friday"), 99)
    assert not guides.known(regex("friday"))
    assert allowed(guides.of(regex("friday"), 99))
    assert guides.known(regex("friday"))


def test_refusal_of_a_grammar_whose_process_ends_twice_is_not_cached(
    tokenizer, monkeypatch, tmp_path
) -> None:
    program = tmp_path / "ends.py"
    program.write_text("input(); print('\"\"', flush=True); input(); raise SystemExit(7)")
    monkeypatch.setattr(sandbox, "_PROGRAM", program)
    with pytest.raises(Unsettled):
        sandbox_of(tokenizer).refusal(GRAMMAR)
    monkeypatch.setattr(sandbox.sys, "executable", str(tmp_path / "none"))
    with pytest.raises(Unsettled):
        sandbox_of(tokenizer).refusal(GRAMMAR)


def test_compile_process_is_replaced_after_a_number_of_grammars(
    tokenizer: TaskTokenizer, monkeypatch
) -> None:
    monkeypatch.setattr(sandbox, "MAX_ASKED", 2)
    asked, before = sandbox_of(tokenizer), children()
    pids = [(asked.refusal(GRAMMAR), children() - before)[1] for _ in range(4)]
    assert pids[0] == pids[1] != pids[2] == pids[3]
    assert {len(own) for own in pids} == {1}
