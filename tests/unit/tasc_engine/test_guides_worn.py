"""Lexers that wear out: answers go on with few compiles, and end where they cannot go on."""

from pathlib import Path

import pytest
from guide_walks import allowed, ids, look

from tasc_engine.guides import Guides, library, trial
from tasc_engine.guides.grammar import MOST_MADE
from tasc_engine.guides.trial import make_matcher
from tasc_engine.request import GuideSpec
from tasc_text import TaskTokenizer

EOS = 0


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Every lexer that was made, in turn."""
    seen: list[object] = []
    monkeypatch.setattr(
        library, "make_matcher", lambda *a: seen.append(make_matcher(*a)) or seen[-1]
    )
    return seen


@pytest.mark.parametrize(("letters", "most", "each", "states"), [("abcd", 32, 1, 100)])
def test_answers_go_on_where_others_have_worn_the_lexer_out(
    tokenizer: TaskTokenizer, monkeypatch: pytest.MonkeyPatch, made: list[object],
    letters: str, most: int, each: int, states: int,
) -> None:  # fmt: skip
    # Each letter has states of its own, which are too many together.
    spec = GuideSpec("regex", text="|".join(f"{c}{{1,{most}}}x" for c in letters))
    roomy = Guides(tokenizer, tokenizer.vocab_size)
    pairs = [roomy.of(spec, 99) for _ in letters * each]
    monkeypatch.setitem(trial.LIMITS, "max_lexer_states", states)
    guides = Guides(tokenizer, tokenizer.vocab_size)
    made.clear()
    rows = [
        (guides.of(spec, 99), expected, t)
        for expected, [t] in zip(pairs, tokenizer.encode_outputs(letters * each), strict=True)
    ]
    for _ in range(most - 2):
        for guide, expected, token in rows:
            assert look(guide, [token, token], [-1, 0])[0] == allowed(expected)
            guide.advance(ids([token]))
            expected.advance(ids([token]))
    assert not any(guide.error for guide, _, _ in rows)
    assert 2 <= len(made) <= 1 + MOST_MADE * len(rows)


def test_a_lexer_that_one_answer_renewed_is_taken_by_the_others(
    tokenizer: TaskTokenizer, monkeypatch: pytest.MonkeyPatch, made: list[object]
) -> None:
    letters = "abcdefghij"
    spec = GuideSpec("regex", text="|".join(f"{c}{{1,14}}x" for c in letters))
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
    assert 2 <= len(made) <= 5


def test_an_answer_that_outgrows_its_limits_ends_with_the_reason(
    tokenizer: TaskTokenizer, monkeypatch: pytest.MonkeyPatch, made: list[object]
) -> None:
    spec = GuideSpec("regex", text="x(.*a.{30}){20}")
    x = tokenizer.encode_outputs(["x"])[0]
    monkeypatch.setitem(trial.LIMITS, "step_lexer_fuel", 3000)
    guides = Guides(tokenizer, tokenizer.vocab_size)
    guide = guides.of(spec, 999)
    assert look(guide, x, [-1])[0] == x
    assert not guide.error
    said = tokenizer.encode_outputs(["xabababab" * 6])[0]
    guide.advance(ids(said))
    assert look(guide, [5, 6], [-1, 0]) == ([], [False, False], [[], []])
    assert "lexer error" in guide.error
    assert not len(guide.forced(3))
    assert len(made) <= 1 + MOST_MADE
    assert allowed(guides.of(spec, 999)) == x


def test_a_dead_end_is_known_without_another_compile(folder: Path, made: list[object]) -> None:
    x, z = (i[0] for i in TaskTokenizer.from_folder(folder).encode_outputs(["x", "z"]))
    tokenizer = TaskTokenizer(folder / "tokenizer.json", [EOS, z])
    guide = Guides(tokenizer, tokenizer.vocab_size).of(GuideSpec("regex", text="[xy]z"), 99)
    assert look(guide, [x], [-1])[1] == [False]
    assert not guide.error
    guide.advance(ids([x]))
    assert not allowed(guide)
    assert guide.error == "no token may follow"
    assert len(made) == 1
