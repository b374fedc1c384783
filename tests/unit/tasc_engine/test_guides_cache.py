"""Compiled guides are kept, within bounds, whoever asks for them."""

import threading

import pytest
from guide_walks import allowed, ids

from tasc_engine.errors import GuideError
from tasc_engine.guides import GuideLimits, Guides, factory
from tasc_engine.guides.choices import Choices
from tasc_engine.request import GuideSpec
from tasc_text import TaskTokenizer


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """First choices of what was compiled, in turn."""
    seen: list[str] = []
    of = Choices.of

    def noted(texts, *rest) -> Choices:
        seen.append(texts[0])
        return of(texts, *rest)

    monkeypatch.setattr(Choices, "of", noted)
    return seen


def choice(*texts: str) -> GuideSpec:
    return GuideSpec("choice", texts)


def test_the_guides_used_last_are_kept(tokenizer: TaskTokenizer, compiled: list[str]) -> None:
    guides = Guides(tokenizer, tokenizer.vocab_size, GuideLimits(kept=2))
    for text in "abacab":
        guides.of(choice(text), 99)
    assert compiled == ["a", "b", "c", "b"]


def test_guides_are_kept_up_to_so_many_characters(
    tokenizer: TaskTokenizer, compiled: list[str]
) -> None:
    guides = Guides(tokenizer, tokenizer.vocab_size, GuideLimits(kept_characters=10))
    for text in ("aaaa", "bbbb", "aaaa", "cccc", "aaaa", "bbbb", "d" * 30, "d" * 30):
        guides.of(choice(text), 99)
    assert compiled == ["aaaa", "bbbb", "cccc", "bbbb", "d" * 30]


def test_what_was_refused_is_not_compiled_again(
    tokenizer: TaskTokenizer, compiled: list[str]
) -> None:
    guides = Guides(tokenizer, tokenizer.vocab_size)
    for _ in range(3):
        with pytest.raises(GuideError, match="choice 1"):
            guides.of(choice("a", ""), 99)
    assert compiled == ["a"]


def test_known_is_what_needs_no_compile(tokenizer: TaskTokenizer, compiled: list[str]) -> None:
    guides = Guides(tokenizer, tokenizer.vocab_size, GuideLimits(choices=2))
    good, bad, large = choice("a"), choice("b", ""), choice("a", "b", "c")
    assert [guides.known(s) for s in (good, bad, large)] == [False, False, True]
    guides.of(good, 99)
    for spec in (bad, large):
        with pytest.raises(GuideError):
            guides.of(spec, 99)
    assert [guides.known(s) for s in (good, bad, large)] == [True, True, True]
    assert compiled == ["a", "b"]


def test_refused_guides_press_no_others_out(tokenizer: TaskTokenizer, compiled: list[str]) -> None:
    guides = Guides(tokenizer, tokenizer.vocab_size, GuideLimits(kept=2))
    guides.of(choice("a"), 99)
    for text in "bcdefb":
        with pytest.raises(GuideError):
            guides.of(choice(text, ""), 99)
    guides.of(choice("a"), 99)
    assert compiled == [*"abcdefb"]


def test_a_library_that_is_not_there_is_looked_for_once(
    tokenizer: TaskTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[object] = []

    def missing(*args: object) -> None:
        tried.append(args)
        raise GuideError("it is not there")

    monkeypatch.setattr(factory, "Library", missing)
    guides = Guides(tokenizer, tokenizer.vocab_size)
    for text in "abab":
        with pytest.raises(GuideError, match="not there"):
            guides.of(GuideSpec("regex", text=text), 99)
    assert len(tried) == 1


@pytest.mark.parametrize("spec", [choice("ab", "ba"), GuideSpec("regex", text="ab|ba")])
def test_guides_of_one_text_do_not_move_each_other(
    tokenizer: TaskTokenizer, spec: GuideSpec
) -> None:
    guides = Guides(tokenizer, tokenizer.vocab_size)
    one, other = guides.of(spec, 99), guides.of(spec, 99)
    before = allowed(other)
    one.advance(ids(before[:1]))
    assert allowed(one) != before
    assert allowed(other) == before
    assert allowed(guides.of(spec, 99)) == before


def test_threads_share_what_one_of_them_compiled(
    tokenizer: TaskTokenizer, compiled: list[str]
) -> None:
    guides = Guides(tokenizer, tokenizer.vocab_size, GuideLimits(kept=50))
    texts = [f"{a}{b}" for a in "abcd" for b in "efghij"]
    specs = [choice(t) for t in texts] + [GuideSpec("regex", text=f"{t}+") for t in texts[:5]]
    expected = [allowed(Guides(tokenizer, tokenizer.vocab_size).of(s, 99)) for s in specs[:24]]
    compiled.clear()
    wrong: list[object] = []
    begin = threading.Barrier(2)

    def ask() -> None:
        begin.wait()
        for _ in range(3):
            for spec, first in zip(specs, expected + [None] * 5, strict=True):
                found = allowed(guides.of(spec, 99))
                if not found or (first is not None and found != first):
                    wrong.append(spec)

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert sorted(compiled) == sorted(texts)


def test_threads_that_press_each_other_out_get_what_they_asked_for(
    tokenizer: TaskTokenizer,
) -> None:
    guides = Guides(tokenizer, tokenizer.vocab_size, GuideLimits(kept=1))
    first = {text: tokenizer.encode_outputs([text])[0][0] for text in "abcdef"}
    wrong: list[str] = []

    def ask(texts: str) -> None:
        for text in texts * 20:
            if allowed(guides.of(choice(text), 99)) != [first[text]]:
                wrong.append(text)

    threads = [threading.Thread(target=ask, args=(texts,)) for texts in ("abcdef", "fedcba")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
