"""Tests Algorithm 1 against a naive version, and that texts are unchanged in all families."""

import random
import re
from collections import Counter
from pathlib import Path

import pytest
from enrich_tokenizers import MAKERS, MARK, OUTPUTS, byte_level
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

import tiny
from support import refused
from tasc_jobs.errors import UsageError
from tasc_text import TaskTokenizer
from tasc_train.enrich.enrichment import require_same_texts
from tasc_train.enrich.growing_tokenizer import GrowingTokenizer
from tasc_train.enrich.ngram_selection import Enriched, EnrichSettings, enrich, refined
from tasc_train.errors import FamilyError

WORDS = ["set", "alarm", "the", "therapy", "theorem", "in", "at nine", "{}", ": ", "a", "aa", "ab"]


def corpus(seed: int, rows: int = 60) -> list[str]:
    chance = random.Random(seed)
    few, between = chance.sample(WORDS, 6), ["", " "]
    words = (chance.choices(few, k=chance.randint(0, 9)) for _ in range(rows))
    return [chance.choice(between).join(row) for row in words]


def naive(base, outputs, settings):
    """A naive Algorithm 1 that counts everything again at every step.

    Returns content, parts and count of each new token. Does not support tokenizers that write a
    mark before texts.
    """
    tokenizer = Tokenizer.from_str(base.backend.to_str())
    texts: dict[int, bytes] = {}
    used: set[tuple[int, ...]] = set()
    found: list[tuple[str, tuple[int, ...], int]] = []

    def text(id_: int) -> bytes:
        return texts[id_] if id_ in texts else base.token_bytes(id_)

    while len(found) < settings.budget:
        rows = [e.ids for e in tokenizer.encode_batch(list(outputs), add_special_tokens=False)]
        counts = counts_of(rows, settings.n_max, base.special_ids)
        left = {ngram: count for ngram, count in counts.items() if ngram not in used and count > 1}
        if not left:
            break
        best = min(left, key=lambda n: (-(left[n] - settings.discount) * (len(n) - 1), n))
        used.add(best)
        try:
            content = b"".join(map(text, best)).decode()
        except UnicodeDecodeError:
            continue
        if tokenizer.token_to_id(content) is not None or not content.isascii():
            continue
        parts = best[-1:] if settings.pcs_rule == "suffix" else best
        begin = b"".join(map(text, parts))
        tokens = [text(id_) for row in rows for id_ in row if id_ not in base.special_ids]
        colliding = sum(t.startswith(begin) and t != begin for t in tokens)
        if colliding / len(tokens) >= settings.pcs:
            continue
        tokenizer.add_tokens([AddedToken(content, special=False, normalized=True)])
        id_ = tokenizer.token_to_id(content)
        assert id_ is not None
        texts[id_] = content.encode()
        found.append((content, best, left[best]))
    return found


def counts_of(rows, n_max, special):
    sizes = range(2, n_max + 1)
    cuts = ((row, at, n) for row in rows for n in sizes for at in range(len(row) - n + 1))
    ngrams = (tuple(row[at : at + n]) for row, at, n in cuts)
    return Counter(ngram for ngram in ngrams if not special.intersection(ngram))


@pytest.mark.parametrize(
    "settings",
    [
        EnrichSettings(12, 2),
        EnrichSettings(12, 4, pcs=0.05),
        EnrichSettings(12, 3, pcs=0.02, pcs_rule="whole"),
        EnrichSettings(12, 4, discount=1),
    ],
)
def test_selection_equals_a_naive_implementation(tokenizer, settings, everything):
    for seed in range(12 if everything else 3):
        found = enrich(tokenizer, corpus(seed), settings)
        wanted = naive(tokenizer, corpus(seed), settings)
        assert [(t.content, t.parts, t.count) for t in found.tokens] == wanted
        assert len(wanted) == 12


def test_paper_example_is_left_out_only_by_the_suffix_rule(tmp_path: Path) -> None:
    outputs = ["in the", "in therapy", "in theorem"] * 4
    tiny.make_tokenizer(tmp_path, texts=["in the therapy theorem"] * 9, size=300)
    tokenizer = TaskTokenizer.from_folder(tmp_path)
    pieces = {tuple(e.tokens) for e in tokenizer.backend.encode_batch(outputs)}
    assert {("in", "Ġthe"), ("in", "Ġtherapy"), ("in", "Ġtheorem")} == pieces
    suffix = enrich(tokenizer, outputs, EnrichSettings(3, pcs=0.1))
    assert {t.content for t in suffix.tokens} == {"in therapy", "in theorem"}
    assert suffix.collided == 1
    whole = enrich(tokenizer, outputs, EnrichSettings(3, pcs=0.1, pcs_rule="whole"))
    assert {t.content for t in whole.tokens} == {"in the", "in therapy", "in theorem"}


@pytest.mark.parametrize("pcs", [0.0, -0.5, 1.5, float("nan")])
def test_threshold_outside_the_range_of_scores_is_refused(pcs: float) -> None:
    with refused(UsageError, "pcs"):
        EnrichSettings(9, pcs=pcs)


def test_tokens_are_added_while_an_ngram_occurs_twice(tokenizer: TaskTokenizer) -> None:
    assert not enrich(tokenizer, ["", ""], EnrichSettings(9)).tokens
    assert not enrich(tokenizer, ["set an alarm"], EnrichSettings(9)).tokens
    alike = enrich(tokenizer, ["set an alarm"] * 5, EnrichSettings(50))
    assert 0 < len(alike.tokens) < 50
    assert alike.tokens[-1].length == 5
    assert not enrich(tokenizer, ["set an alarm"] * 5, EnrichSettings(0)).tokens
    outputs = [*corpus(2, rows=12), "the quick brown fox jumps over a lazy dog once"]
    settings = EnrichSettings(10_000, 16)
    found, wanted = enrich(tokenizer, outputs, settings), naive(tokenizer, outputs, settings)
    assert [(t.content, t.parts, t.count) for t in found.tokens] == wanted
    assert found.tokens[-1].count == 2
    assert 10 < len(found.tokens) < 10_000


def test_new_tokens_have_no_special_tokens_and_no_partial_characters(
    tokenizer: TaskTokenizer,
) -> None:
    outputs = [f"set{tiny.END}alarm", "日本", "éé"] * 20
    found = enrich(tokenizer, outputs, EnrichSettings(40))
    assert {"日本", "日"} & {t.content for t in found.tokens}
    for token in found.tokens:
        assert tiny.END not in token.content
        assert not tokenizer.special_ids.intersection(token.parts)
    for text in outputs:
        ids = found.tokenizer.encode(text, add_special_tokens=False).ids
        assert found.tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("seed", range(4))
def test_refined_selection_encodes_the_same_text_in_fewer_tokens(
    tokenizer: TaskTokenizer, seed: int
) -> None:
    texts = corpus(seed, 200)
    settings = EnrichSettings(20, 3, rounds=6)
    greedy, found = enrich(tokenizer, texts, settings), refined(tokenizer, texts, settings)
    assert found.left <= greedy.left < found.length == greedy.length
    encoded = found.tokenizer.encode_batch(texts, add_special_tokens=False)
    assert found.left == sum(len(e.ids) for e in encoded)
    spelled: dict[int, bytes] = {}
    for token in found.tokens:
        parts = (spelled.get(part) or tokenizer.token_bytes(part) for part in token.parts)
        spelled[token.id] = b"".join(parts)
        assert spelled[token.id] == token.content.encode()
        assert found.tokenizer.token_to_id(token.content) == token.id


def test_refinement_replaces_tokens_that_longer_tokens_made_unused(
    tokenizer: TaskTokenizer,
) -> None:
    texts = ["abcabc", "set the alarm at nine", "xyz xyz xyz"] * 9 + ["set the theorem"] * 3
    settings = EnrichSettings(5, 2, rounds=8)
    greedy = enrich(tokenizer, texts, settings)
    assert 0 in greedy.used  # otherwise there is nothing to replace
    assert refined(tokenizer, texts, settings).left < greedy.left


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


def test_texts_decode_as_with_the_base_tokenizer(
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
    last = found.tokens[-1]
    encoded = found.tokenizer.encode_batch(OUTPUTS, add_special_tokens=False)
    assert sum(len(e.ids) for e in encoded) == last.length
    assert any(last.id in e.ids for e in encoded)
    for text in ("zebra", " zebra", "Z\n\nz", f"zebra{tiny.END} zebra", "日zé", ""):
        assert found.tokenizer.encode(text).ids == base.backend.encode(text).ids


# The n-grams of these texts start and end like special tokens, and one has an added token.
MARKED = ["<row><cell>a</cell></row>", "<row><cell>b</cell></row>", "{x}{ y}", "a |||, <end|>"] * 6


def test_special_tokens_in_texts_are_kept(
    base: TaskTokenizer, marked: Enriched, everything: bool
) -> None:
    contents = [token.content for token in marked.tokens]
    assert any(content.endswith("<") for content in contents) or "<sep>" in specials(base)
    count = 2_000 if everything else 400
    chance = random.Random(5)
    pieces = [*contents, *MARKED, *specials(base), " ", "<", "<|", "}", "|", "|||"]
    texts = ["".join(chance.choices(pieces, k=chance.randint(1, 6))) for _ in range(count)]
    if "Prepend" in str(base.backend.normalizer):  # see the next test for the exception
        cuts = "|".join(map(re.escape, specials(base)))
        texts = [text for text in texts if not {*re.split(cuts, text)} & {*contents}]
    assert len(texts) > count / 2
    require_same_texts(base.backend, marked.tokenizer, texts)
    for text in texts:
        assert kept(base, base.backend, text) == kept(base, marked.tokenizer, text)


@pytest.mark.parametrize("base", ["phi-3"], indirect=True)
def test_text_that_equals_a_new_token_loses_only_its_leading_blank(
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


def specials(base: TaskTokenizer) -> list[str]:
    return [base.backend.id_to_token(id_) for id_ in sorted(base.special_ids)]


def kept(base: TaskTokenizer, tokenizer: Tokenizer, text: str) -> list[int]:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    return [id_ for id_ in ids if id_ in base.special_ids]


def test_every_new_token_occurs_inside_texts(marked: Enriched) -> None:
    for token in marked.tokens:
        encoded = marked.tokenizer.encode(f"x{token.content}", add_special_tokens=False)
        assert token.id in encoded.ids
    assert marked.tokens


@pytest.mark.parametrize("base", sorted({*MAKERS} - {"phi-3", "old-bert"}), indirect=True)
def test_selection_equals_a_naive_implementation_in_every_family(base: TaskTokenizer) -> None:
    outputs = [text for text in OUTPUTS if text.isascii()]
    found = enrich(base, outputs, EnrichSettings(30, 3))
    wanted = naive(base, outputs, EnrichSettings(30, 3))
    assert [(t.content, t.parts, t.count) for t in found.tokens] == wanted
    assert len(wanted) > 9


def test_added_tokens_that_split_texts_are_counted(tmp_path: Path) -> None:
    """Such tokens are in no n-gram, but each costs a step."""
    tokenizer = byte_level("gpt2")
    tokenizer.add_tokens([AddedToken("  ", special=False, normalized=False)])
    outputs = [f'{{\n  "intent": "{name}",\n  "slots": []\n}}' for name in ("play", "stop")] * 8
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    base = TaskTokenizer(tmp_path / "tokenizer.json", [tokenizer.token_to_id(tiny.END)])
    found = enrich(base, outputs, EnrichSettings(6))
    before, after = (t.encode_batch(outputs) for t in (tokenizer, found.tokenizer))
    assert found.length == sum(len(e.ids) for e in before)
    assert found.tokens[-1].length == sum(len(e.ids) for e in after)


def test_text_that_the_normalizer_changes_does_not_become_a_token() -> None:
    tokenizer = byte_level("gpt2")
    assert GrowingTokenizer(tokenizer).content(b" play_") == " play_"
    for normalizer in (normalizers.Strip(), normalizers.Replace(Regex(r"\A"), "_")):
        tokenizer.normalizer = normalizer
        assert GrowingTokenizer(tokenizer).content(b" play_") is None


def test_tokenizers_that_would_change_texts_are_refused_and_named() -> None:
    base, other = byte_level("gpt2"), byte_level("gpt2")
    other.normalizer = normalizers.Lowercase()
    with refused(FamilyError, "'Play'", "'play'"):
        require_same_texts(base, other, ["fine", "Play"])
    metaspace, prefixed, both = byte_level("gpt2"), byte_level("gpt2"), byte_level("gpt2")
    metaspace.pre_tokenizer = pre_tokenizers.Metaspace()
    prefixed.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    both.normalizer = normalizers.Sequence([normalizers.Prepend("_"), normalizers.Lowercase()])
    words = Tokenizer(models.WordPiece({"a": 0}, unk_token="a"))
    for tokenizer, named in (
        (metaspace, "Metaspace"), (prefixed, "add_prefix_space"), (words, "WordPiece"),
        (both, "Prepend, Lowercase"),
    ):  # fmt: skip
        with refused(FamilyError, named):
            GrowingTokenizer(tokenizer)
