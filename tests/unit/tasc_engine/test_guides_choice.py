"""Guided choice: exactly the choices can be said, in the tokenizer's own tokens."""

from pathlib import Path

import numpy as np
import pytest
from guide_walks import allowed, answers, behind, ids, look, path_to
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, normalizers

from tasc_engine.errors import GuideError
from tasc_engine.guides import GuideLimits, Guides
from tasc_engine.guides.choices import ChoiceGuide, Choices
from tasc_engine.guides.trie import Trie
from tasc_engine.request import GuideSpec
from tasc_text import TaskTokenizer

EOS = 0
VOCAB = 70  # three words, the last one not full
TEXTS = ("alarm_set", "alarm", "play_music", "play music", "friday", "wake me up", "東京 🙂")

texts = st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=5), min_size=1, max_size=8)
trees = st.integers(0, 9).flatmap(
    lambda n: st.tuples(
        st.tuples(*(st.integers(0, 4) for _ in range(n))),
        st.tuples(*(st.integers(-1, i - 1) for i in range(n))),
    )
)


def guide_of(sequences: list[list[int]]) -> ChoiceGuide:
    trie = Trie.of([[*s, EOS] for s in sequences])
    return ChoiceGuide(Choices(trie, -(-VOCAB // 32), 99, ""))


def goes_on(sequences: list[list[int]], path: list[int]) -> list[int]:
    """What sequences have behind a path."""
    ended = [[*s, EOS] for s in sequences]
    return sorted({s[len(path)] for s in ended if s[: len(path)] == path and len(s) > len(path)})


@settings(deadline=None)  # the first example compiles
@given(texts, trees, st.data())
def test_a_look_says_what_choices_have_behind_each_node(sequences, tree, data) -> None:
    tokens, parents = tree
    said = data.draw(st.sampled_from(sequences))
    said = said[: data.draw(st.integers(0, len(said)))]
    guide = guide_of(sequences)
    guide.advance(ids(said))
    for _ in range(2):  # the second finds what the first did
        now, kept, after = look(guide, tokens, parents)
        assert now == goes_on(sequences, said)
        for x in range(len(parents)):
            path = path_to(tokens, parents, x)
            whole = [[*s, EOS] for s in sequences]
            there = [*said, *path]
            assert kept[x] == any(s[: len(there)] == there for s in whole)
            assert after[x] == (goes_on(sequences, there) if kept[x] else [])


@settings(deadline=None)
@given(texts)
def test_walks_from_begin_to_end_are_the_choices(sequences) -> None:
    found = answers(lambda: guide_of(sequences), EOS)
    assert found == {tuple(s) for s in sequences}


@settings(deadline=None)
@given(texts, st.integers(0, 7), st.data())
def test_a_stretch_is_forced_while_one_token_is_allowed(sequences, most, data) -> None:
    said = data.draw(st.sampled_from(sequences))
    said = said[: data.draw(st.integers(0, len(said)))]
    expected: list[int] = []
    while len(expected) < most and expected[-1:] != [EOS]:
        choices = goes_on(sequences, [*said, *expected])
        if len(choices) != 1:
            break
        expected += choices
    guide = guide_of(sequences)
    guide.advance(ids(said))
    assert guide.forced(most).tolist() == expected
    assert allowed(guide) == goes_on(sequences, said)


def test_nothing_is_allowed_behind_the_end() -> None:
    guide = guide_of([[1, 2]])
    guide.advance(ids([1, 2]))
    assert not guide.ended
    assert look(guide, [EOS, EOS], [-1, 0]) == ([EOS], [True, False], [[], []])
    guide.advance(ids([EOS]))
    assert guide.ended
    assert not guide.error
    assert look(guide, [1], [-1]) == ([], [False], [[]])
    assert not len(guide.forced(3))


def test_a_token_that_is_not_allowed_is_an_error_and_nothing_follows() -> None:
    guide = guide_of([[1, 2]])
    guide.advance(ids([1, 3, 2]))
    assert "3" in guide.error
    assert look(guide, [2], [-1]) == ([], [False], [[]])
    assert not guide.ended


def test_choices_are_said_as_the_tokenizer_writes_them(tokenizer: TaskTokenizer) -> None:
    guides = Guides(tokenizer, tokenizer.vocab_size + 50)
    spec = GuideSpec("choice", (*TEXTS, TEXTS[0]))
    found = answers(lambda: guides.of(spec, 99), tokenizer.eos_id, most=30)
    assert found == {tuple(i) for i in tokenizer.encode_outputs(TEXTS)}
    assert sorted(map(tokenizer.decode, found)) == sorted(TEXTS)


def test_only_the_first_end_of_sequence_is_allowed(folder: Path) -> None:
    other = TaskTokenizer.from_folder(folder).encode_outputs(["z"])[0][0]
    both = TaskTokenizer(folder / "tokenizer.json", [EOS, other])
    guides = Guides(both, both.vocab_size)
    spec = GuideSpec("choice", ("friday",))
    assert allowed(behind(lambda: guides.of(spec, 9), both.encode_outputs(["friday"])[0])) == [EOS]
    with pytest.raises(GuideError, match="ends an answer"):
        guides.of(GuideSpec("choice", ("friday", "z")), 9)


def test_a_choice_that_does_not_fit_is_named(tokenizer: TaskTokenizer) -> None:
    guides = Guides(tokenizer, tokenizer.vocab_size)
    spec = GuideSpec("choice", ("friday", "wake me up at nine am"))
    needed = len(tokenizer.encode_outputs(spec.choices)[1]) + 1
    assert needed > 3
    assert allowed(guides.of(spec, needed))
    with pytest.raises(GuideError, match=f"choice 1 .'wake me up.* {needed} .* {needed - 1}"):
        guides.of(spec, needed - 1)


@pytest.mark.parametrize(
    ("choices", "told"),
    [
        (("friday", ""), "choice 1 .* no tokens"),
        (("friday", "<|end|>"), "choice 1 .* ends an answer"),
        (("friday", "x" * 99 + "<|end|>"), f"choice 1 .'{'x' * 40}'. .* ends an answer"),
        (("a",) * 6, "6 choices; at most 5"),
        (("a" * 20, "b" * 21), "41 characters of choices; at most 40"),
    ],
)
def test_choices_that_cannot_be_said_are_refused(
    tokenizer: TaskTokenizer, choices: tuple[str, ...], told: str
) -> None:
    most = 40 if "41" in told else 2000
    limits = GuideLimits(choices=5, choice_characters=most)
    guides = Guides(tokenizer, tokenizer.vocab_size, limits)
    for _ in range(2):  # the second time from what is kept
        with pytest.raises(GuideError, match=told):
            guides.of(GuideSpec("choice", choices), 200)


def test_a_choice_in_tokens_the_model_does_not_know_is_refused(tokenizer: TaskTokenizer) -> None:
    rare = max(t for i in tokenizer.encode_outputs(TEXTS) for t in i)
    with pytest.raises(GuideError, match=f"model .of {rare}. does not know"):
        Guides(tokenizer, rare).of(GuideSpec("choice", TEXTS), 99)
    last = TaskTokenizer(tokenizer.path, [rare])
    with pytest.raises(GuideError, match=f"end of sequence is token {rare}"):
        Guides(last, rare).of(GuideSpec("choice", ("friday",)), 99)


def test_a_choice_that_does_not_come_back_is_refused(folder: Path, tmp_path: Path) -> None:
    lower = Tokenizer.from_file(str(folder / "tokenizer.json"))
    lower.normalizer = normalizers.Lowercase()
    lower.save(str(tmp_path / "tokenizer.json"))
    tokenizer = TaskTokenizer(tmp_path / "tokenizer.json", [EOS])
    guides = Guides(tokenizer, tokenizer.vocab_size)
    assert allowed(guides.of(GuideSpec("choice", ("friday",)), 99))
    with pytest.raises(GuideError, match="choice 1 .'Friday'. would be answered as 'friday'"):
        guides.of(GuideSpec("choice", ("friday", "Friday")), 99)


def test_the_last_word_of_a_mask_holds_the_last_tokens() -> None:
    guide = guide_of([[VOCAB - 1], [31], [32]])
    assert allowed(guide) == [31, 32, VOCAB - 1]
    assert np.array_equal(guide.forced(3), ids([]))
