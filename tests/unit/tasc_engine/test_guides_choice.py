"""Tests that guided choice allows exactly the choices, and how a step uses guides."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from guide_walks import (
    EOS,
    VOCAB,
    WORDS,
    allowed,
    answers,
    guide_after,
    guide_of,
    ids,
    label_sets,
    look,
    next_tokens,
    path_to,
    tokens_of,
    trees,
)  # fmt: skip
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, normalizers
from tree_layouts import forest

from support import refused
from tasc_draft import Drafts
from tasc_engine.errors import GuideError
from tasc_engine.guided import Guide, GuideLimits, Guides, factory, follow
from tasc_engine.guided.choices import Choices
from tasc_engine.guided.following import LeastTokens
from tasc_protocol import GuideSpec
from tasc_text import TaskTokenizer


def choice(*texts: str) -> GuideSpec:
    return GuideSpec("choice", texts)


TEXTS = ("alarm_set", "alarm", "play_music", "play music", "friday", "wake me up", "東京 🙂")


@settings(deadline=None)
@given(trees, st.integers(0, 5), st.integers(0, 3))
def test_end_tokens_are_forbidden_before_min_tokens(tree, least, emitted) -> None:
    tokens, parents = tree
    guide = LeastTokens([EOS, 32, VOCAB + 5], VOCAB, least)
    guide.advance(ids([1] * emitted))
    anything = list(range(VOCAB))
    late = [token for token in anything if token not in (EOS, 32)]
    now, kept, masks = look(guide, tokens, parents)
    assert now == (late if emitted < least else anything)
    for x in range(len(tokens)):
        path = path_to(tokens, parents, x)
        fits = all(t not in (EOS, 32) or emitted + i >= least for i, t in enumerate(path))
        assert kept[x] == fits
        if fits:
            assert masks[x] == (late if emitted + len(path) < least else anything)


@settings(deadline=None)  # the first example compiles
@given(label_sets, trees, st.data())
def test_allowed_tokens_after_each_node_follow_the_choices(sequences, tree, data) -> None:
    tokens, parents = tree
    emitted = data.draw(st.sampled_from(sequences))
    emitted = emitted[: data.draw(st.integers(0, len(emitted)))]
    guide = guide_of(sequences)
    guide.advance(ids(emitted))
    for _ in range(2):  # the second finds what the first did
        now, kept, after = look(guide, tokens, parents)
        assert now == next_tokens(sequences, emitted)
        for x in range(len(parents)):
            there = [*emitted, *path_to(tokens, parents, x)]
            assert kept[x] == begins(sequences, there)
            assert after[x] == (next_tokens(sequences, there) if kept[x] else [])


@settings(deadline=None)
@given(label_sets, st.integers(0, 7), st.data())
def test_single_allowed_tokens_are_forced(sequences, most, data) -> None:
    emitted = data.draw(st.sampled_from(sequences))
    emitted = emitted[: data.draw(st.integers(0, len(emitted)))]
    expected: list[int] = []
    while len(expected) < most and expected[-1:] != [EOS]:
        choices = next_tokens(sequences, [*emitted, *expected])
        if len(choices) != 1:
            break
        expected += choices
    guide = guide_of(sequences)
    guide.advance(ids(emitted))
    assert guide.forced(most).tolist() == expected
    assert allowed(guide) == next_tokens(sequences, emitted)


def test_choices_are_tokenized_by_the_tokenizer(tokenizer: TaskTokenizer) -> None:
    guides = Guides(tokenizer, tokenizer.vocab_size + 50)
    spec = choice(*TEXTS, TEXTS[0])
    found = answers(lambda: guides.of(spec, 99), tokenizer.eos_id, most=30)
    assert found == {tuple(i) for i in tokenizer.encode_outputs(TEXTS)}
    assert sorted(map(tokenizer.decode, found)) == sorted(TEXTS)


def test_choice_that_continues_another_may_end_with_any_end_token(folder: Path) -> None:
    """After a complete choice only an end token may follow; the first end token is forced."""
    other = TaskTokenizer.from_folder(folder).encode_outputs(["z"])[0][0]
    both = TaskTokenizer(folder / "tokenizer.json", [other, EOS, 10**6])
    guides = Guides(both, both.vocab_size)
    short, long = both.encode_outputs(["red", "red and blue"])
    assert long[: len(short)] == short

    def behind_label(label: list[int]) -> Guide:
        return guide_after(lambda: guides.of(choice("red", "red and blue"), 99), label)

    assert allowed(behind_label(short)) == sorted([EOS, other, long[len(short)]])
    assert look(behind_label(short), [EOS, other], [-1, -1])[1] == [True, True]
    assert not len(behind_label(short).forced(9))
    assert allowed(behind_label(long)) == behind_label(long).forced(9).tolist() == [other]
    with pytest.raises(GuideError):
        guides.of(choice("friday", "z"), 9)


def test_choice_that_does_not_fit_is_named_in_the_error(tokenizer: TaskTokenizer) -> None:
    guides = Guides(tokenizer, tokenizer.vocab_size)
    spec = choice("friday", "wake me up at nine am" * 3)
    needed = len(tokenizer.encode_outputs(spec.choices)[1]) + 1
    assert needed > 3
    assert allowed(guides.of(spec, needed))
    assert allowed(guides.of(spec))  # an answer may be cut
    with pytest.raises(GuideError, match=spec.choices[1]):
        guides.of(spec, needed - 1)


@pytest.mark.parametrize(
    ("choices", "named"),
    [
        (("friday", ""), ["choice 1"]),
        (("friday", "<|end|>"), ["choice 1"]),
        (("friday", "x" * 999 + "<|end|>"), ["choice 1", f"{'x' * 99}' and ", "more"]),
    ],
)
def test_choices_that_cannot_be_emitted_are_refused(
    tokenizer: TaskTokenizer, choices, named
) -> None:
    guides = Guides(tokenizer, tokenizer.vocab_size)
    for _ in range(2):  # the second time from what is kept
        with refused(GuideError, *named):
            guides.of(choice(*choices), 200)


def test_choice_with_tokens_outside_the_vocabulary_is_refused(tokenizer: TaskTokenizer) -> None:
    rare = max(t for i in tokenizer.encode_outputs(TEXTS) for t in i)
    last = TaskTokenizer(tokenizer.path, [rare])
    for own, texts in ((tokenizer, TEXTS), (last, ("friday",))):
        with pytest.raises(GuideError):
            Guides(own, rare).of(choice(*texts), 99)


@pytest.mark.parametrize(
    "spec", [choice("friday"), GuideSpec("regex", text="a|b"), GuideSpec("json_schema", text="{}")]
)
def test_end_tokens_outside_the_vocabulary_are_named_in_the_error(
    tokenizer: TaskTokenizer, spec
) -> None:
    size = tokenizer.vocab_size
    other = TaskTokenizer(tokenizer.path, [size + 9, size + 5])
    with refused(GuideError, str(other.eos_ids), str(tokenizer.path.parent), f"below {size}"):
        Guides(other, size).of(spec, 99)


def test_choice_that_does_not_decode_to_itself_is_refused(folder: Path, tmp_path: Path) -> None:
    lower = Tokenizer.from_file(str(folder / "tokenizer.json"))
    lower.normalizer = normalizers.Lowercase()
    lower.save(str(tmp_path / "tokenizer.json"))
    tokenizer = TaskTokenizer(tmp_path / "tokenizer.json", [EOS])
    guides = Guides(tokenizer, tokenizer.vocab_size)
    assert allowed(guides.of(choice("friday"), 99))
    with pytest.raises(GuideError):
        guides.of(choice("friday", "Friday"), 99)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The first choices of the compiled guides, in order."""
    seen: list[str] = []
    of = Choices.of

    def noted(texts, *rest) -> Choices:
        seen.append(texts[0])
        return of(texts, *rest)

    monkeypatch.setattr(Choices, "of", noted)
    return seen


AAAA, BBBB, LONG = "aaaa", "bbbb", "d" * 30


@pytest.mark.parametrize(
    ("limits", "asked", "expected"),
    [
        ({"kept": 2}, "abacab", "abcb"),
        ({"kept_bytes": 10}, [AAAA, BBBB, AAAA, "cccc", AAAA, BBBB, LONG, LONG],
         [AAAA, BBBB, "cccc", BBBB, LONG]),
        ({}, "AAA", "A"),
        ({"kept": 2}, "aBCDEFBa", "aBCDEFB"),
    ],
)  # fmt: skip
def test_recent_guides_and_refusals_have_separate_caches(
    tokenizer, compiled, limits, asked, expected
) -> None:
    """A choice in capital letters is refused."""
    guides = Guides(tokenizer, tokenizer.vocab_size, GuideLimits(**limits))
    for text in asked:
        with nullcontext() if text.islower() else pytest.raises(GuideError):
            guides.of(choice(text) if text.islower() else choice(text, ""), 99)
    assert compiled == [*expected]


def test_known_guides_need_no_compile(tokenizer: TaskTokenizer, compiled: list[str]) -> None:
    guides = Guides(tokenizer, tokenizer.vocab_size)
    good, bad = choice("a"), choice("b", "")
    assert [guides.known(s) for s in (good, bad)] == [False, False]
    guides.of(good, 99)
    with pytest.raises(GuideError):
        guides.of(bad, 99)
    assert [guides.known(s) for s in (good, bad)] == [True, True]
    assert compiled == ["a", "b"]


def test_missing_guide_library_is_searched_once(tokenizer, monkeypatch) -> None:
    missing = Mock(side_effect=GuideError("it is not there"))
    monkeypatch.setattr(factory, "Library", missing)
    guides = Guides(tokenizer, tokenizer.vocab_size)
    for text in "abab":
        with pytest.raises(GuideError):
            guides.of(GuideSpec("regex", text=text), 99)
    missing.assert_called_once()


@pytest.mark.parametrize("spec", [choice("ab", "ba"), GuideSpec("regex", text="ab|ba")])
def test_guides_with_the_same_text_are_independent(tokenizer, spec: GuideSpec) -> None:
    guides = Guides(tokenizer, tokenizer.vocab_size)
    one, other = guides.of(spec, 99), guides.of(spec, 99)
    before = allowed(other)
    one.advance(ids(before[:1]))
    assert allowed(one) != before
    assert (allowed(other), allowed(guides.of(spec, 99))) == (before, before)


def test_threads_share_a_compiled_guide(tokenizer, compiled: list[str]) -> None:
    texts = [f"{a}{b}" for a in "abcd" for b in "efghij"]
    specs = [choice(t) for t in texts] + [GuideSpec("regex", text=f"{t}+") for t in texts[:5]]
    expected = [allowed(Guides(tokenizer, tokenizer.vocab_size).of(s, 99)) for s in specs]
    guides = Guides(tokenizer, tokenizer.vocab_size, GuideLimits(kept=50))
    compiled.clear()
    asked = ask_in_threads(guides, specs * 3, specs * 3)
    assert asked == [expected * 3] * 2
    assert sorted(compiled) == sorted(texts)


def test_threads_get_their_guides_under_eviction(tokenizer) -> None:
    guides = Guides(tokenizer, tokenizer.vocab_size, GuideLimits(kept=1))
    specs = [choice(text) for text in "abcdef"] * 20
    expected = tokenizer.encode_outputs("abcdef") * 20
    assert ask_in_threads(guides, specs, specs[::-1]) == [expected, expected[::-1]]


def ask_in_threads(guides: Guides, *specs: list[GuideSpec]) -> list[list[list[int]]]:
    """Returns the first allowed tokens of guides, made by one thread per list at the same time."""
    begin = threading.Barrier(len(specs))

    def ask(own: list[GuideSpec]) -> list[list[int]]:
        begin.wait()
        return [allowed(guides.of(spec, 99)) for spec in own]

    with ThreadPoolExecutor(len(specs)) as pool:
        return [*pool.map(ask, specs)]


rows = st.tuples(st.none() | label_sets, trees)


def numbered(step: list) -> Drafts:
    """Returns drafts with log-probabilities and sources that identify nodes."""
    drafts = forest([tree[1] for _, tree in step], [tree[0] for _, tree in step])
    drafts.logp[:] = -np.arange(len(drafts.tokens))
    drafts.source[:] = np.arange(len(drafts.tokens)) % 5
    return drafts


def begins(sequences: list[list[int]], path: list[int]) -> bool:
    return any([*s, EOS][: len(path)] == path for s in sequences)


@settings(deadline=None)  # the first example compiles
@given(st.lists(rows, max_size=5))
def test_forbidden_draft_nodes_are_removed_and_logits_of_guided_rows_have_masks(step) -> None:
    drafts = numbered(step)
    guided = follow([guide_of(s) if s else None for s, _ in step], drafts)
    left, found = guided.drafts, guided.allowed
    assert left.offsets[0] == 0
    assert len(found.mask_of) == len(left.tokens) + len(step)
    for i, (sequences, (tokens, parents)) in enumerate(step):
        paths = [path_to(tokens, parents, x) for x in range(len(tokens))]
        stay = [x for x, p in enumerate(paths) if sequences is None or begins(sequences, p)]
        begin, end = left.offsets[i : i + 2]
        mine, was = slice(begin, end), drafts.offsets[i] + ids(stay)
        new_place = {-1: -1, **{x: place for place, x in enumerate(stay)}}
        assert left.tokens[mine].tolist() == [tokens[x] for x in stay]
        assert left.parents[mine].tolist() == [new_place[parents[x]] for x in stay]
        for name in ("depths", "logp", "source"):
            assert getattr(left, name)[mine].tolist() == getattr(drafts, name)[was].tolist()
        places = found.mask_of[begin + i : end + i + 1].tolist()
        if sequences is None:
            assert places == [-1] * len(places)
            continue
        for path, mask in zip([[], *(paths[x] for x in stay)], places, strict=True):
            expected = [t for t in range(32 * WORDS) if begins(sequences, [*path, t])]
            assert tokens_of(found.masks[mask]) == expected
