"""Tests tokens as clients receive them: their bytes form the answer, their offsets fit it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

import tiny
from support import replace
from tasc_protocol import GenerationResult, Output, Request, Timings, TokenLogprob
from tasc_runtime.protocol import AnswerTexts, TokenTexts
from tasc_text import TaskTokenizer

TEXTS = st.text(st.sampled_from("ab é東🙂\n."), max_size=12)


def logprobs(ids, top=()):
    return [TokenLogprob(i, -float(i), top) for i in ids]


@given(text=TEXTS, cut=st.integers(0, 12))
def test_token_bytes_form_the_text_and_offsets_count_characters(tokenizer, text, cut):
    """Token texts from two calls equal those from one."""
    (ids,) = tokenizer.encode_outputs([text])
    found = TokenTexts(tokenizer, tokenizer.eos_ids).of(logprobs(ids))
    twice = TokenTexts(tokenizer, ())
    assert twice.of(logprobs(ids[:cut])) + twice.of(logprobs(ids[cut:])) == found
    assert b"".join(t.utf8 for t in found).decode() == text
    front = b""
    for token in found:
        assert token.offset == len(front.decode(errors="ignore"))
        front += token.utf8


def test_incomplete_character_counts_as_one_character_in_offsets(tokenizer):
    cut = tokenizer.encode_outputs(["é"])[0][0]
    assert tokenizer.token_bytes(cut) == "é".encode()[:1]
    whole = tokenizer.encode_outputs(["a"])[0][0]
    ids = [cut, whole, cut, cut, whole]
    text = tokenizer.decode(ids)
    offsets = [t.offset for t in TokenTexts(tokenizer, ()).of(logprobs(ids))]
    assert offsets == [0, 1, 2, 3, 4]
    assert [text[offset] == "a" for offset in offsets] == [i == whole for i in ids]


def test_end_of_sequence_token_is_omitted_only_at_the_end_of_an_answer(tokenizer):
    (ids,) = tokenizer.encode_outputs(["ab"])
    ended = [*ids, tokenizer.eos_id]
    assert len(TokenTexts(tokenizer, tokenizer.eos_ids).of(logprobs(ended))) == len(ids)
    *_, end, behind = TokenTexts(tokenizer, ()).of(logprobs([*ended, ids[0]]))
    assert end.utf8 == tiny.END.encode()
    assert end.offset == behind.offset == 2, "it has no text in the answer"


def test_leading_blank_that_the_decoder_drops_is_not_counted_in_offsets(tmp_path):
    pieces = Tokenizer(models.WordLevel({"▁a": 0, "▁b": 1, "</s>": 2}, unk_token="</s>"))
    pieces.decoder = decoders.Metaspace()
    pieces.save(str(tmp_path / "tokenizer.json"))
    tokenizer = TaskTokenizer(tmp_path / "tokenizer.json", [2])
    assert tokenizer.decode([0, 1]) == "a b"
    first, second = TokenTexts(tokenizer, [2]).of(logprobs([0, 1, 2]))
    assert (first.utf8, second.utf8) == (b" a", b" b")
    assert (first.offset, second.offset) == (0, 1)


@pytest.fixture(scope="module")
def pieces(tmp_path_factory):
    """A tokenizer like SentencePiece: words begin with blanks, which decoders drop at the start."""
    words = ["▁The", "▁capital", "▁of", "▁France", "<s>", "</s>", "<|user|>"]
    made = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, words[-1]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    made.add_special_tokens(words[4:])
    made.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 4)])
    path = tmp_path_factory.mktemp("pieces") / "tokenizer.json"
    made.save(str(path))
    return TaskTokenizer(path, [5])


def echoed(tokenizer, prompt, answer, *, stream=False, committed=0):
    """Returns the outputs of an echoed prompt and its answer, with one token per step."""
    ids = prompt if isinstance(prompt, tuple) else tuple(tokenizer.encode_prompt(prompt))
    given = answer[:committed]
    call = Request("1", prompt, echo=True, logprobs=0, committed_ids=given)
    request = replace(call, prompt=ids, max_tokens=9, stream=stream)
    texts = AnswerTexts(tokenizer, call, request)
    scored = [*(() if given else logprobs(ids[1:])), *logprobs(answer[committed:])]
    result = GenerationResult(
        *("1", answer, tokenizer.decode(answer), "stop", len(ids), Timings(0, 0, 0)),
        logprobs=tuple(scored),
    )
    if not stream:
        return [texts.output(Output("1", answer[-1:], result.text, result), None)]
    found, sent = [], len(tokenizer.decode(given))
    for n in range(committed + 1, len(answer) + 1):
        text, last = tokenizer.decode(answer[:n])[sent:], n == len(answer)
        new, scored = (
            (scored, []) if last else (scored[: -(len(answer) - n)], scored[-(len(answer) - n) :])
        )
        made = Output("1", answer[n - 1 : n], text, result if last else None, tuple(new))
        found.append(texts.output(made, None))
        sent += len(text)
    return found


ECHOED = {
    "text": ("The capital", "The capital of France", [0, 0, 3, 11, 14, 21]),
    "ids": ((4, 0, 1), "The capital of France", [0, 0, 3, 11, 14, 21]),
    "markers in a text": (
        "The<|user|>The capital",
        "The<|user|>The capital of France",
        [0, 0, 3, 11, 14, 22, 25, 32],
    ),
    "markers in ids": ((4, 0, 6, 1), "The capital of France", [0, 0, 3, 3, 11, 14, 21]),
    "no text": ((4,), "of France", [0, 0, 2, 9]),
}


@pytest.mark.parametrize("answer", [(2, 3, 5), (6, 2, 3, 5)], ids=["", "marker first"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("prompt", "text", "offsets"), ECHOED.values(), ids=ECHOED)
def test_answer_after_an_echoed_prompt_keeps_its_blank(
    pieces, prompt, text, offsets, stream, answer
):
    offsets = [*offsets[:-3], *offsets[-3:-2] * (len(answer) - 3), *offsets[-3:]]
    found = echoed(pieces, prompt, answer, stream=stream)
    assert "".join(output.text for output in found) == text
    assert stream or found[-1].result.text == text
    tokens = [token for output in found for token in output.token_texts]
    assert [token.offset for token in tokens] == offsets
    for committed in range(1, len(answer)) if stream else ():
        rest = echoed(pieces, prompt, answer, stream=True, committed=committed)
        sent = "".join(output.text for output in found[:committed])
        assert sent + "".join(output.text for output in rest) == text
        ends = [token.offset for output in rest for token in output.token_texts]
        assert ends == offsets[len(offsets) - len(answer) + committed :]


def test_likeliest_tokens_have_their_bytes_in_order(tokenizer):
    (ids,) = tokenizer.encode_outputs(["é"])
    top = ((ids[0], -0.1), (tokenizer.eos_id, -3.0), (tokenizer.vocab_size + 5, -9.0))
    (found,) = TokenTexts(tokenizer, ()).of(logprobs(ids[:1], top))
    named = [tokenizer.token_bytes(ids[0]), tiny.END.encode(), b""]
    assert found.top == tuple(zip(named, (-0.1, -3.0, -9.0), strict=True))
    assert found.logprob == -float(ids[0])
