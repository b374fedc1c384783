"""Tests that sent text is always the start of the answer and never has a stop string."""

from collections.abc import Sequence
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tasc_text import IncrementalDetokenizer, TaskTokenizer

SAMPLES = [*"ab \né東🙂", "e\u0301", "👩\u200d👩\u200d👧", "क्ष", "'t", "\ufffd"]
texts = st.lists(st.sampled_from(SAMPLES) | st.text(max_size=3), max_size=12).map("".join)
stops = st.lists(st.text("ab \n🙂", min_size=1, max_size=4), min_size=1, max_size=3)
few = settings(
    deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def split(tokens: Sequence[int], data: st.DataObject) -> list[Sequence[int]]:
    """Returns the tokens in random runs, as a step with drafts emits several at once."""
    runs, begin = [], 0
    while begin < len(tokens):
        end = begin + data.draw(st.integers(1, 4))
        runs.append(tokens[begin:end])
        begin = end
    return runs


def first_stop(text: str, stop: Sequence[str]) -> int:
    return min((at for s in stop if (at := text.find(s)) >= 0), default=-1)


def assert_sent_text_is_a_prefix(tokenizer: TaskTokenizer, runs: list[Sequence[int]]) -> None:
    whole = tokenizer.decode([token for run in runs for token in run])
    answer, sent = IncrementalDetokenizer(tokenizer), ""
    for run in runs:
        assert answer.push(run) == len(run)
        sent += answer.take()
        assert whole.startswith(sent)
    assert answer.take() == ""
    assert not answer.stopped
    assert sent + answer.finish(whole) == whole


@few
@given(texts, st.data())
def test_streamed_texts_add_up_to_the_whole_text(tokenizer, text, data):
    [ids] = tokenizer.encode_outputs([text])
    assert_sent_text_is_a_prefix(tokenizer, split(ids, data))


@few
@given(st.data())
def test_streamed_texts_of_invalid_bytes_add_up_to_the_whole_text(tokenizer, data):
    space = tokenizer.backend.token_to_id("<0x20>")  # a space is a piece, never a byte token
    usable = [i for i in range(tokenizer.vocab_size) if i != space]
    ids = data.draw(st.lists(st.sampled_from(usable), max_size=12))
    assert_sent_text_is_a_prefix(tokenizer, split(ids, data))


@pytest.mark.parametrize("between", [[], ["</s>"]], ids=["at once", "special token between"])
def test_invalid_byte_tokens_become_replacement_characters(byte_fallback, between):
    """A newline stays one until an invalid byte joins its run; then both become U+FFFD."""
    newline, *skipped, invalid = (
        byte_fallback.backend.token_to_id(t) for t in ("<0x0A>", *between, "<0xFE>")
    )
    [a] = byte_fallback.encode_outputs(["a"])
    answer = IncrementalDetokenizer(byte_fallback)
    answer.push([*a, newline, *skipped])
    assert (answer.text, answer.take()) == ("a\n", "a")
    answer.push([invalid, *a, *a])
    assert answer.text == byte_fallback.decode([*a, newline, invalid, *a, *a])
    assert answer.text == "a\ufffd\ufffd a a"
    assert answer.take() == "\ufffd\ufffd a a"


@few
@given(texts, stops, st.data())
def test_answer_is_cut_before_the_first_stop_string(tokenizer, text, stop, data):
    """The reference decodes the whole text again after each token.

    The answer ends with the first token after which the text contains a stop string. A text with an
    incomplete last character is not searched.
    """
    [ids] = tokenizer.encode_outputs([text])
    decoded = [tokenizer.decode(ids[:n]) for n in range(len(ids) + 1)]
    complete = [
        n for n, t in enumerate(decoded) if first_stop(t, stop) >= 0 and not t.endswith("\ufffd")
    ]
    answer, sent, used = IncrementalDetokenizer(tokenizer, stop), "", 0
    for run in split(ids, data):
        used += answer.push(run)
        sent += answer.take()
        assert first_stop(sent, stop) < 0
        if answer.stopped:
            break
    if not complete:
        assert not answer.stopped
        assert sent + answer.finish(decoded[-1]) == decoded[-1]
        return
    assert answer.stopped
    assert used == complete[0]
    assert sent == answer.text == decoded[used][: first_stop(decoded[used], stop)]
    assert answer.finish(answer.text) == ""


class Case(NamedTuple):
    text: str
    stop: list[str]
    sent: list[str]  # by each token, a character each
    stopped: bool = True


CASES = {
    "within a token": Case("a\nb", ["\n"], ["a", ""]),
    "across token borders": Case("aSTOPb", ["STOP"], ["a", "", "", "", ""]),
    "not completed": Case("aSTO", ["STOP"], ["a", "", "", ""], stopped=False),
    "not completed and let go": Case("STOx", ["STOP"], ["", "", "", "STOx"], stopped=False),
    "let go but for a new beginning": Case("SSTOP", ["STOP"], ["", "S", "", "", ""]),
    "a beginning within itself": Case("aabaac", ["aabaac"], [""] * 6),
    "let go to the next possible beginning": Case(
        "aabaabaac", ["aabaac"], ["", "", "", "", "", "aab", "", "", ""]
    ),
    "overlapping, the first completed wins": Case("abcd", ["bcd", "abc"], ["", "", ""]),
    "a shorter one within a longer one": Case("xabcd", ["abcd", "bc"], ["x", "", "", "a"]),
    "at the very beginning": Case("Sab", ["S"], [""]),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_text_that_may_begin_a_stop_string_is_held_back(
    byte_level: TaskTokenizer, case: Case
) -> None:
    ids = [i for character in case.text for i in byte_level.encode_outputs([character])[0]]
    assert len(ids) == len(case.text)
    more = [i for _ in range(2) for i in byte_level.encode_outputs(["q"])[0]]
    answer, sent = IncrementalDetokenizer(byte_level, case.stop), []
    while len(sent) < len(ids) and not answer.stopped:
        answer.push([ids[len(sent)]])
        sent.append(answer.take())
    assert (sent, answer.stopped) == (case.sent, case.stopped)
    at_once = IncrementalDetokenizer(byte_level, case.stop)
    assert at_once.push(ids) == len(sent)
    assert at_once.text == answer.text == "".join(sent) + answer.finish(answer.text)
    keeping = IncrementalDetokenizer(byte_level, case.stop, keep_stop=True)
    assert keeping.push(ids) == len(sent)
    whole = [at_once.text + stop for stop in case.stop] if case.stopped else [at_once.text]
    assert keeping.text in whole
    assert keeping.take() + keeping.finish(keeping.text) == keeping.text
    never = "\n" * 9  # however long another stop string is, one that came too soon does not count
    late = IncrementalDetokenizer(byte_level, [*case.stop, never], min_tokens=len(sent))
    assert (late.push([*ids[: len(sent)], *more]), late.stopped) == (len(sent) + 2, False)
    assert late.text == case.text[: len(sent)] + "qq"
    soon = IncrementalDetokenizer(byte_level, case.stop, min_tokens=len(sent) - 1)
    assert (soon.push(ids), soon.text) == (len(sent), at_once.text)


def test_special_tokens_have_no_text(tokenizer: TaskTokenizer) -> None:
    [ids] = tokenizer.encode_outputs(["ab"])
    answer = IncrementalDetokenizer(tokenizer, ["end"])
    pushed = answer.push([*ids, tokenizer.eos_id])
    assert (pushed, answer.text, answer.stopped) == (len(ids) + 1, "ab", False)
