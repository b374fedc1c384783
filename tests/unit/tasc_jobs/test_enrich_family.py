"""Texts come back from an enriched tokenizer as from the base, whatever its family."""

import random
import re
from pathlib import Path

import pytest
from enrich_reference import naive
from enrich_tokenizers import MAKERS, MARK, OUTPUTS, byte_level
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

import tiny
from support import refused
from tasc_jobs.enrich.enrichment import require_same_texts
from tasc_jobs.enrich.growing_tokenizer import GrowingTokenizer
from tasc_jobs.enrich.ngram_selection import Enriched, EnrichSettings, enrich
from tasc_jobs.errors import FamilyError
from tasc_text import TaskTokenizer

ALPHABET = [*"aeit:_, {}\n\t", "  ", "é", "e\u0301", "日", "🙂", "\u2581", "ﬁ", "intent: ", "play_",
            "_music", ", slots", "time: nine", tiny.END, "\u200b", "\x00"]  # fmt: skip


@pytest.fixture(scope="module", params=MAKERS)
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TaskTokenizer:
    path = tmp_path_factory.mktemp("base") / "tokenizer.json"
    tokenizer = MAKERS[request.param]()
    tokenizer.save(str(path))
    return TaskTokenizer(path, [tokenizer.token_to_id(tiny.END)])


@pytest.fixture(scope="module")
def found(base: TaskTokenizer) -> Enriched:
    return enrich(base, OUTPUTS, EnrichSettings(40))


@pytest.fixture(scope="module")
def marked(base: TaskTokenizer) -> Enriched:
    return enrich(base, MARKED, EnrichSettings(40))


def test_random_texts_are_read_back_as_before(
    base: TaskTokenizer, found: Enriched, everything: bool
) -> None:
    assert found.tokens[-1].length < found.length / 4
    chance = random.Random(3)
    pieces = [*ALPHABET, *(text[chance.randint(0, 9) :] for text in OUTPUTS)]
    count = 10_000 if everything else 1_000
    texts = ["".join(chance.choices(pieces, k=chance.randint(0, 12))) for _ in range(count)]
    require_same_texts(base.backend, found.tokenizer, [*texts, *OUTPUTS])
    used = {id_ for e in found.tokenizer.encode_batch(texts) for id_ in e.ids}
    assert used & {token.id for token in found.tokens}


def test_every_new_token_that_is_left_in_outputs_is_found_again(found: Enriched) -> None:
    last = found.tokens[-1]
    encoded = found.tokenizer.encode_batch(OUTPUTS, add_special_tokens=False)
    assert sum(len(e.ids) for e in encoded) == last.length
    assert any(last.id in e.ids for e in encoded)


def test_text_without_new_tokens_is_encoded_as_before(base: TaskTokenizer, found: Enriched) -> None:
    for text in ("zebra", " zebra", "Z\n\nz", f"zebra{tiny.END} zebra", "日zé", ""):
        assert found.tokenizer.encode(text).ids == base.backend.encode(text).ids


# Their n-grams end and begin as special tokens do, and one has what is no part of any.
MARKED = ["<row><cell>a</cell></row>", "<row><cell>b</cell></row>", "{x}{ y}", "a |||, <end|>"] * 6


def test_texts_keep_their_special_tokens(
    base: TaskTokenizer, marked: Enriched, everything: bool
) -> None:
    contents = [token.content for token in marked.tokens]
    assert any(content.endswith("<") for content in contents) or "<sep>" in specials(base)
    count = 2_000 if everything else 400
    chance = random.Random(5)
    pieces = [*contents, *MARKED, *specials(base), " ", "<", "<|", "}", "|", "|||"]
    texts = ["".join(chance.choices(pieces, k=chance.randint(1, 6))) for _ in range(count)]
    if has_mark_in_front(base):  # the exception, see the next test
        texts = [text for text in texts if not between_specials(base, text) & {*contents}]
    assert len(texts) > count / 2
    require_same_texts(base.backend, marked.tokenizer, texts)
    for text in texts:
        assert kept(base, base.backend, text) == kept(base, marked.tokenizer, text)


@pytest.mark.parametrize("base", ["phi-3"], indirect=True)
def test_what_is_a_content_letter_by_letter_loses_the_blank_in_front_alone(
    base: TaskTokenizer, marked: Enriched
) -> None:
    contents = [token.content for token in marked.tokens]
    assert {content[0] == MARK for content in contents} == {True, False}
    for content in contents:
        before, after = (t.decode(t.encode(content).ids) for t in (base.backend, marked.tokenizer))
        assert before == (" " if content[0] == MARK else "") + after
        text = f"x{tiny.END}{content}"
        before, after = (t.decode(t.encode(text).ids) for t in (base.backend, marked.tokenizer))
        assert before.replace("x ", "x", 1) == after


def between_specials(base: TaskTokenizer, text: str) -> set[str]:
    return {*re.split("|".join(map(re.escape, specials(base))), text)}


def has_mark_in_front(base: TaskTokenizer) -> bool:
    return "Prepend" in str(base.backend.normalizer)


def specials(base: TaskTokenizer) -> list[str]:
    return [base.backend.id_to_token(id_) for id_ in sorted(base.special_ids)]


def kept(base: TaskTokenizer, tokenizer: Tokenizer, text: str) -> list[int]:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    return [id_ for id_ in ids if id_ in base.special_ids]


def test_no_token_reaches_across_what_texts_are_cut_at(marked: Enriched) -> None:
    for token in marked.tokens:
        encoded = marked.tokenizer.encode(f"x{token.content}", add_special_tokens=False)
        assert token.id in encoded.ids
    assert marked.tokens


@pytest.mark.parametrize("base", sorted({*MAKERS} - {"phi-3", "old-bert"}), indirect=True)
def test_tokens_are_those_of_a_naive_reading_in_every_family(base: TaskTokenizer) -> None:
    outputs = [text for text in OUTPUTS if text.isascii()]
    found = enrich(base, outputs, EnrichSettings(30, 3))
    wanted = naive(base, outputs, EnrichSettings(30, 3))
    assert [(t.content, t.parts, t.count) for t in found.tokens] == wanted
    assert len(wanted) > 9


def test_tokens_that_texts_are_cut_at_are_counted(tmp_path: Path) -> None:
    """They are a part of no n-gram, and cost a step each."""
    tokenizer = byte_level("gpt2")
    tokenizer.add_tokens([AddedToken("  ", special=False, normalized=False)])
    outputs = [f'{{\n  "intent": "{name}",\n  "slots": []\n}}' for name in ("play", "stop")] * 8
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    base = TaskTokenizer(tmp_path / "tokenizer.json", [tokenizer.token_to_id(tiny.END)])
    found = enrich(base, outputs, EnrichSettings(6))
    before, after = (t.encode_batch(outputs) for t in (tokenizer, found.tokenizer))
    assert found.length == sum(len(e.ids) for e in before)
    assert found.tokens[-1].length == sum(len(e.ids) for e in after)


def test_what_a_normalizer_makes_otherwise_inside_a_text_is_no_token() -> None:
    tokenizer = byte_level("gpt2")
    assert GrowingTokenizer(tokenizer).content(b" play_") == " play_"
    for normalizer in (normalizers.Strip(), normalizers.Replace(Regex(r"\A"), "_")):
        tokenizer.normalizer = normalizer
        assert GrowingTokenizer(tokenizer).content(b" play_") is None


def test_a_changed_text_is_told() -> None:
    base, other = byte_level("gpt2"), byte_level("gpt2")
    other.normalizer = normalizers.Lowercase()
    with refused(FamilyError, "'Play'", "'play'"):
        require_same_texts(base, other, ["fine", "Play"])


def test_families_that_would_change_texts_are_refused_by_name() -> None:
    metaspace, prefixed, both = byte_level("gpt2"), byte_level("gpt2"), byte_level("gpt2")
    metaspace.pre_tokenizer = pre_tokenizers.Metaspace()
    prefixed.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    both.normalizer = normalizers.Sequence([normalizers.Prepend("_"), normalizers.Lowercase()])
    words = Tokenizer(models.WordPiece({"a": 0}, unk_token="a"))
    for tokenizer, said in (
        (metaspace, "Metaspace"), (prefixed, "add_prefix_space"), (words, "WordPiece"),
        (both, "Prepend, Lowercase"),
    ):  # fmt: skip
        with refused(FamilyError, said):
            GrowingTokenizer(tokenizer)
