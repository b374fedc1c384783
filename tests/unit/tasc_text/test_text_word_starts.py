"""Tests which tokens begin a word, based on their text inside a sentence."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tasc_jobs.demo.tasks import MODEL
from tasc_text import TaskTokenizer
from tiny import SENTENCES


def words(tokenizer: TaskTokenizer, text: str) -> list[str]:
    """The words of a text that begins with a letter; a decoder may drop blanks at the begin."""
    ids = tokenizer.encode_outputs([text])[0]
    starts = [0, *(n for n in range(1, len(ids)) if tokenizer.word_starts[ids[n]]), len(ids)]
    ends = [len(tokenizer.decode(ids[:n])) for n in starts]
    return [text[begin:end] for begin, end in pairwise(ends)]


def write(folder: Path, tokenizer: Tokenizer) -> TaskTokenizer:
    tokenizer.save(str(folder / "tokenizer.json"))
    return TaskTokenizer(folder / "tokenizer.json", [0])


def metaspace(folder: Path) -> TaskTokenizer:
    """A tokenizer like converted SentencePiece models, with a mark for the blank."""
    pieces = ("</s>", "▁", "a", "b", "▁a", "▁b", "▁▁", "\n", "\t", ".", "▁.", "é")
    tokenizer = Tokenizer(
        models.BPE(
            vocab={piece: at for at, piece in enumerate(pieces)},
            merges=[("▁", "a"), ("▁", "b"), ("▁", "▁"), ("▁", ".")],
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    tokenizer.add_special_tokens(["</s>"])
    return write(folder, tokenizer)


@pytest.mark.parametrize("sentence", SENTENCES)
def test_byte_level_words_are_separated_by_blanks(byte_level, sentence):
    found = words(byte_level, sentence)
    assert found == [w if n == 0 else f" {w}" for n, w in enumerate(sentence.split(" "))]
    assert len(found) > 2


def test_words_of_other_tokenizers_are_separated_by_blanks(byte_fallback, tmp_path):
    demo = TaskTokenizer.from_folder(MODEL)
    assert words(demo, "isn't it, that one\nDET NOUN") == [
        "isn't", " it,", " that", " one", "\nDET", " NOUN",
    ]  # fmt: skip
    assert words(byte_fallback, "ab a. n't é\nb\tb") == ["ab", " a.", " n't", " é", "\nb", "\tb"]
    assert words(metaspace(tmp_path), "ab a. é") == ["ab", " a.", " é"]


def test_metaspace_pieces_with_a_leading_blank_begin_a_word(tmp_path: Path) -> None:
    tokenizer = metaspace(tmp_path)
    starts = {
        piece: bool(tokenizer.word_starts[at])
        for piece, at in tokenizer.backend.get_vocab().items()
    }
    assert starts.pop("</s>")
    assert {piece for piece, begins in starts.items() if begins} == {
        "▁", "▁a", "▁b", "▁▁", "▁.", "\n", "\t",
    }  # fmt: skip


def test_pieces_without_a_decoder_are_decoded_as_written(tmp_path: Path) -> None:
    pieces = {"<end>": 0, "a": 1, " a": 2, "\na": 3}
    tokenizer = write(tmp_path, Tokenizer(models.WordLevel(pieces, unk_token="<end>")))
    assert tokenizer.word_starts.tolist() == [True, False, True, True, True]


def test_special_tokens_unused_ids_and_the_document_mark_begin_a_word(tmp_path: Path) -> None:
    pieces = {"<end>": 0, "a": 1, "other end": 2, "b": 6}
    tokenizer = Tokenizer(models.WordLevel(pieces, unk_token="<end>"))
    tokenizer.add_special_tokens(["<begin>"])
    tokenizer.add_tokens([AddedToken("task", special=False)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    found = TaskTokenizer(tmp_path / "tokenizer.json", [0, 2])
    special, plain = (found.backend.token_to_id(token) for token in ("<begin>", "task"))
    assert {at for at, begins in enumerate(found.word_starts) if not begins} == {1, 6, plain}
    assert {special, 3} <= set(np.flatnonzero(found.word_starts).tolist())
    assert len(found.word_starts) == found.vocab_size + 1
    assert found.word_starts[found.vocab_size]


def test_word_start_table_is_cached_and_read_only(byte_level: TaskTokenizer) -> None:
    starts = byte_level.word_starts
    assert starts is byte_level.word_starts
    assert (starts.flags.writeable, starts.dtype) == (False, bool)
