"""Guides by schema, expression and grammar: what they allow is what they describe, by any path."""

import json
from pathlib import Path

import numpy as np
import pytest
from guide_walks import allowed, answers, behind, ids, look, path_to, random_answer, regex
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers

from tasc_engine.guides import Guide, Guides
from tasc_engine.guides.grammar import MOST_FORCED
from tasc_engine.request import GuideSpec
from tasc_text import TaskTokenizer

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


@settings(deadline=None, max_examples=30)
@given(texts=st.lists(st.text("ab東 ", min_size=1, max_size=4), min_size=1, max_size=4))
def test_answers_of_a_finite_expression_are_its_texts(
    guides: Guides, tokenizer: TaskTokenizer, texts: list[str]
) -> None:
    found = answers(lambda: guides.of(regex(*texts), 99), EOS, most=20)
    assert {tokenizer.decode(tokens) for tokens in found} == set(texts)
    assert found >= {tuple(tokens) for tokens in tokenizer.encode_outputs(texts)}


@settings(deadline=None, max_examples=40)
@given(spec=st.sampled_from(SPECS), data=st.data())
def test_behind_each_node_is_what_is_behind_its_path(
    guides: Guides, tokenizer: TaskTokenizer, spec: GuideSpec, data: st.DataObject
) -> None:
    def make() -> Guide:
        return guides.of(spec, 99)

    said = random_answer(make(), data.draw(st.integers(0, 50)), data.draw(st.integers(0, 8)))
    said = [token for token in said if token != EOS]
    paths: list[list[int]] = []
    tokens, parents = [], []
    for x in range(data.draw(st.integers(0, 9))):
        parents.append(data.draw(st.integers(-1, x - 1)))
        above = paths[parents[-1]] if parents[-1] >= 0 else []
        options = [t for t in allowed(behind(make, [*said, *above])) if EOS not in above] or [5]
        wrong = st.integers(0, tokenizer.vocab_size - 1)
        tokens.append(data.draw(st.sampled_from(options) | wrong))
        paths.append([*above, tokens[-1]] if tokens[-1] in options and above != [5] else [5])
    guide = behind(make, said)
    for _ in range(2):  # the second finds what the first did
        now, kept, after = look(guide, tokens, parents)
        assert now == allowed(behind(make, said))
        for x, parent in enumerate(parents):
            before = now if parent < 0 else after[parent]
            assert kept[x] == ((parent < 0 or kept[parent]) and tokens[x] in before)
            if kept[x]:
                path = path_to(tokens, parents, x)
                assert after[x] == allowed(behind(make, [*said, *path]))


@settings(deadline=None, max_examples=40)
@given(spec=st.sampled_from(SPECS), seed=st.integers(0, 50), length=st.integers(0, 30))
def test_a_stretch_is_forced_while_one_token_is_allowed(
    guides: Guides, spec: GuideSpec, seed: int, length: int
) -> None:
    def make() -> Guide:
        return guides.of(spec, 99)

    said = random_answer(make(), seed, length)
    expected: list[int] = []
    while len(expected) < 6 and len(only := allowed(behind(make, [*said, *expected]))) == 1:
        expected += only
    guide = behind(make, said)
    assert guide.forced(6).tolist() == expected
    assert allowed(guide) == allowed(behind(make, said))


def test_what_has_one_way_to_go_on_is_forced_to_its_end(
    guides: Guides, tokenizer: TaskTokenizer
) -> None:
    text = "intent: alarm_set, slot fills:"
    found = guides.of(regex(text), 99).forced(99).tolist()
    assert found == [*tokenizer.encode_outputs([text])[0], EOS]
    assert guides.of(regex(text), 99).forced(2).tolist() == found[:2]


def test_a_long_stretch_is_forced_a_piece_at_a_time(
    guides: Guides, tokenizer: TaskTokenizer
) -> None:
    text = "wake me up at nine am " * 100
    schema = json.dumps({"const": text})
    guide = guides.of(GuideSpec("json_schema", text=schema), 99_999)
    said: list[int] = []
    while not guide.ended:
        piece = guide.forced(99_999)
        assert 0 < len(piece) <= MOST_FORCED
        guide.advance(piece)
        said += piece.tolist()
    assert json.loads(tokenizer.decode(said)) == text


@pytest.mark.parametrize("seed", range(5))
def test_any_walk_of_a_schema_is_json_of_it(
    guides: Guides, tokenizer: TaskTokenizer, seed: int
) -> None:
    said = random_answer(guides.of(SPECS[0], 99), seed, 400)
    assert said[-1] == EOS
    found = json.loads(tokenizer.decode(said))
    assert list(found) == ["name", "n", "tags"]
    assert len(found["name"]) <= 6
    assert 0 <= found["n"] <= 300
    assert len(found["tags"]) <= 2
    assert set(found["tags"]) <= {"x", "naïve", "東"}


@pytest.mark.parametrize(
    ("layout", "followed"),
    [
        ({"separators": (",", ":")}, True),
        ({}, True),
        ({"separators": (",", ":  ")}, False),
        ({"indent": 2}, False),
    ],
)
def test_json_has_at_most_one_blank_at_a_place_unless_its_schema_says_otherwise(
    guides: Guides, tokenizer: TaskTokenizer, layout: dict, followed: bool
) -> None:
    value = {"name": "a b", "n": 12, "tags": ["x", "東"]}
    said = tokenizer.encode_outputs([json.dumps(value, ensure_ascii=False, **layout)])[0]
    kept = look(guides.of(SPECS[0], 99), said, range(-1, len(said) - 1))[1]
    assert all(kept) == followed
    roomy = {**SCHEMA, "x-guidance": {"whitespace_pattern": "[ \\n]{0,9}"}}
    own = guides.of(GuideSpec("json_schema", text=json.dumps(roomy)), 99)
    assert all(look(own, said, range(-1, len(said) - 1))[1])


def test_a_complete_answer_allows_its_end_and_then_nothing(
    guides: Guides, tokenizer: TaskTokenizer
) -> None:
    guide = guides.of(regex("friday"), 99)
    guide.advance(ids(tokenizer.encode_outputs(["friday"])[0]))
    assert look(guide, [EOS, EOS, 5], [-1, 0, -1]) == (
        [EOS], [True, False, False], [[], [], []],
    )  # fmt: skip
    assert guide.forced(3).tolist() == [EOS]
    assert not guide.ended
    guide.advance(ids([EOS]))
    assert guide.ended
    assert look(guide, [5], [-1]) == ([], [False], [[]])
    assert not len(guide.forced(3))
    assert not guide.error


def test_a_draft_of_several_branches_is_walked_through_all_of_them(
    guides: Guides, tokenizer: TaskTokenizer
) -> None:
    a, b = tokenizer.encode_outputs(["a", "b"])
    found = look(guides.of(regex("ab", "ba"), 99), [*a, *b, *b, *a, *a, EOS], [-1, -1, 0, 0, 1, 4])
    assert found[1] == [True, True, True, False, True, True]


def test_no_other_end_and_no_token_without_text_is_allowed(folder: Path) -> None:
    z = TaskTokenizer.from_folder(folder).encode_outputs(["z"])[0][0]
    tokenizer = TaskTokenizer(folder / "tokenizer.json", [EOS, z])
    guides = Guides(tokenizer, tokenizer.vocab_size + 100)
    found = allowed(guides.of(GuideSpec("regex", text="(?s:.*)"), 99))
    assert z not in found
    assert max(found) < tokenizer.vocab_size
    guide = guides.of(GuideSpec("regex", text="[xz]z"), 99)
    guide.advance(ids(tokenizer.encode_outputs(["x"])[0]))
    assert not allowed(guide)
    assert guide.error == "no token may follow"


def test_an_end_in_the_midst_of_a_grammar_is_not_allowed(
    guides: Guides, tokenizer: TaskTokenizer
) -> None:
    guide = guides.of(GuideSpec("grammar", text='start: "a" (<|end|> | "c") "b"'), 99)
    guide.advance(ids(tokenizer.encode_outputs(["a"])[0]))
    assert allowed(guide) == tokenizer.encode_outputs(["c"])[0]


@pytest.fixture(scope="module")
def dummy_blank(tmp_path_factory: pytest.TempPathFactory) -> TaskTokenizer:
    """A tokenizer that writes a blank in front of a text and drops it when reading."""
    pieces = ["</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "▁b"]
    vocab = {piece: at for at, piece in enumerate(pieces)}
    merges = [("▁", "a"), ("▁", "b")]
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True))
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
         decoders.Strip(" ", 1, 0)]
    )  # fmt: skip
    made.add_special_tokens(["</s>"])
    path = tmp_path_factory.mktemp("dummy_blank") / "tokenizer.json"
    made.save(str(path))
    return TaskTokenizer(path, [EOS])


@pytest.mark.parametrize(
    "spec",
    [
        regex("a b", "ba"),
        GuideSpec("grammar", text='start: "a b" | "ba"'),
        GuideSpec("json_schema", text='{"enum": ["a b", "ba"], "type": "string"}'),
    ],
)
def test_an_answer_begins_with_the_blank_that_its_tokenizer_writes(
    dummy_blank: TaskTokenizer, spec: GuideSpec
) -> None:
    guides = Guides(dummy_blank, dummy_blank.vocab_size)
    quote = '"' if spec.kind == "json_schema" else ""
    texts = [f"{quote}{text}{quote}" for text in ("a b", "ba")]
    found = answers(lambda: guides.of(spec, 99), EOS)
    assert {dummy_blank.decode(tokens) for tokens in found} == set(texts)
    assert found >= {tuple(tokens) for tokens in dummy_blank.encode_outputs(texts)}


def test_a_token_that_is_not_allowed_is_an_error(guides: Guides, tokenizer: TaskTokenizer) -> None:
    guide = guides.of(regex("friday"), 99)
    guide.advance(ids(tokenizer.encode_outputs(["z"])[0]))
    assert "doesn't satisfy the grammar" in guide.error
    assert not allowed(guide)


def test_masks_of_another_width_are_refused(guides: Guides) -> None:
    guide = guides.of(regex("friday"), 99)
    none = ids([])
    with pytest.raises(ValueError, match="buffer size"):
        guide.look(none, none, np.zeros(0, bool), np.zeros((1, guide.words - 1), np.uint32))
