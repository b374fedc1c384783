"""Algorithm 1 against a naive reading of it, on random corpora; and what becomes no token."""

import random
from pathlib import Path

import pytest
from enrich_reference import naive

import tiny
from support import refused
from tasc_jobs.enrich.ngram_selection import EnrichSettings, enrich, refined
from tasc_text import TaskTokenizer

WORDS = ["set", "alarm", "the", "therapy", "theorem", "in", "at nine", "{}", ": ", "a", "aa", "ab"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TaskTokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny.make_tokenizer(folder)
    return TaskTokenizer.from_folder(folder)


def corpus(seed: int, rows: int = 60) -> list[str]:
    chance = random.Random(seed)
    few = chance.sample(WORDS, 6)
    return [
        chance.choice(["", " "]).join(chance.choices(few, k=chance.randint(0, 9)))
        for _ in range(rows)
    ]


@pytest.mark.parametrize(
    "settings",
    [
        EnrichSettings(12, 2),
        EnrichSettings(12, 4, pcs=0.05),
        EnrichSettings(12, 3, pcs=0.02, pcs_rule="whole"),
        EnrichSettings(12, 4, discount=1),
    ],
)
def test_tokens_are_those_of_a_naive_reading(
    tokenizer: TaskTokenizer, settings: EnrichSettings, everything: bool
) -> None:
    for seed in range(12 if everything else 3):
        found = enrich(tokenizer, corpus(seed), settings)
        wanted = naive(tokenizer, corpus(seed), settings)
        assert [(t.content, t.parts, t.count) for t in found.tokens] == wanted
        assert len(wanted) == 12


def test_the_length_is_what_the_tokenizer_says_after_every_token(tokenizer: TaskTokenizer) -> None:
    texts = corpus(1)
    for budget in range(1, 9):
        found = enrich(tokenizer, texts, EnrichSettings(budget))
        encoded = found.tokenizer.encode_batch(texts, add_special_tokens=False)
        assert found.tokens[-1].length == sum(len(e.ids) for e in encoded) < found.length


def test_the_paper_s_example_is_left_out_by_the_suffix_rule_alone(tmp_path: Path) -> None:
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
def test_a_threshold_that_scores_cannot_have_is_refused(pcs: float) -> None:
    with refused(ValueError, "pcs"):
        EnrichSettings(9, pcs=pcs)


def test_no_more_tokens_than_the_outputs_have_to_give(tokenizer: TaskTokenizer) -> None:
    assert not enrich(tokenizer, ["", ""], EnrichSettings(9)).tokens
    assert not enrich(tokenizer, ["set an alarm"], EnrichSettings(9)).tokens
    alike = enrich(tokenizer, ["set an alarm"] * 5, EnrichSettings(50))
    assert 0 < len(alike.tokens) < 50
    assert alike.tokens[-1].length == 5
    assert not enrich(tokenizer, ["set an alarm"] * 5, EnrichSettings(0)).tokens


def test_special_tokens_and_cut_characters_are_in_no_token(tokenizer: TaskTokenizer) -> None:
    outputs = [f"set{tiny.END}alarm", "日本", "éé"] * 20
    found = enrich(tokenizer, outputs, EnrichSettings(40))
    assert {"日本", "日"} & {t.content for t in found.tokens}
    for token in found.tokens:
        assert tiny.END not in token.content
        assert not tokenizer.special_ids.intersection(token.parts)
    for text in outputs:
        ids = found.tokenizer.encode(text, add_special_tokens=False).ids
        assert found.tokenizer.decode(ids, skip_special_tokens=False) == text


def test_the_budget_is_used_up_while_anything_occurs_twice(tokenizer: TaskTokenizer) -> None:
    outputs = [*corpus(2, rows=12), "the quick brown fox jumps over a lazy dog once"]
    settings = EnrichSettings(10_000, 16)
    found = enrich(tokenizer, outputs, settings)
    assert [(t.content, t.parts, t.count) for t in found.tokens] == naive(
        tokenizer, outputs, settings
    )
    assert found.tokens[-1].count == 2
    assert 10 < len(found.tokens) < 10_000


@pytest.mark.parametrize("seed", range(4))
def test_a_refined_choice_is_never_longer_and_stands_for_the_same_text(
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
        spelled[token.id] = b"".join(
            spelled.get(part) or tokenizer.token_bytes(part) for part in token.parts
        )
        assert spelled[token.id] == token.content.encode()
        assert found.tokenizer.token_to_id(token.content) == token.id


def test_a_token_that_longer_ones_swallowed_makes_room(tokenizer: TaskTokenizer) -> None:
    texts = ["abcabc", "set the alarm at nine", "xyz xyz xyz"] * 9 + ["set the theorem"] * 3
    settings = EnrichSettings(5, 2, rounds=8)
    greedy = enrich(tokenizer, texts, settings)
    assert 0 in greedy.used  # or the test shows nothing
    assert refined(tokenizer, texts, settings).left < greedy.left
