"""Texts come back from an enriched tokenizer as from the base, whatever its family."""

import json
import random
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

import tiny
from tasc_jobs.enrich.algorithm import EnrichSettings, enrich
from tasc_jobs.enrich.errors import FamilyError
from tasc_jobs.enrich.family import Growing
from tasc_jobs.enrich.saving import require_same_texts
from tasc_text import TaskTokenizer

OUTPUTS = [f"intent: {a}_{b}, slots: {{{c}}}" for a in ("play", "set") for b in ("music", "alarm")
           for c in ("", "time: nine", "café: crème brûlée", "x\ny")] * 3  # fmt: skip
ALPHABET = [*"aeit:_, {}\n\t", "  ", "é", "e\u0301", "日", "🙂", "\u2581", "ﬁ", "intent: ", "play_",
            "_music", ", slots", "time: nine", tiny.END, "\u200b", "\x00"]  # fmt: skip
NFC, ISOLATED = normalizers.NFC(), "isolated"
BYTES = {
    "gpt2": (None, pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "neox": (NFC, pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "olmo": (
        None,
        pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(r" ?\p{L}+|\p{N}{1,3}|\s+|."), ISOLATED),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        ),
    ),
    "falcon": (
        None,
        pre_tokenizers.Sequence(
            [
                pre_tokenizers.Punctuation("contiguous"),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
                pre_tokenizers.Digits(individual_digits=False),
            ]
        ),
    ),
}


def byte_level(name: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    normalizer, tokenizer.pre_tokenizer = BYTES[name]
    if normalizer:
        tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(OUTPUTS, trainer(alphabet, 300, [tiny.END]))
    return tokenizer


def sentencepiece() -> Tokenizer:
    """As Llama 2's and Phi-3's: a mark for blanks and in front of texts, bytes for what is rare."""
    mark = "\u2581"
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend(mark), normalizers.Replace(" ", mark)]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(mark, " "), decoders.ByteFallback(), decoders.Fuse(),
         decoders.Strip(" ", 1, 0)]
    )  # fmt: skip
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    texts = [text for text in OUTPUTS if text.isascii() and "\n" not in text]
    tokenizer.train_from_iterator(texts, trainer([], 340, ["<unk>", *bytes_]))
    state = json.loads(tokenizer.to_str())  # bytes are tokens of the model, as in these families
    state["added_tokens"] = [t for t in state["added_tokens"] if t["content"] == "<unk>"]
    made = Tokenizer.from_str(json.dumps(state))
    made.add_special_tokens([tiny.END])
    return made


def trainer(alphabet: list[str], size: int, special: list[str]) -> trainers.BpeTrainer:
    return trainers.BpeTrainer(
        vocab_size=size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )


MAKERS = {**{name: lambda name=name: byte_level(name) for name in BYTES}, "phi-3": sentencepiece}


@pytest.fixture(scope="module", params=MAKERS)
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TaskTokenizer:
    path = tmp_path_factory.mktemp("base") / "tokenizer.json"
    tokenizer = MAKERS[request.param]()
    tokenizer.save(str(path))
    return TaskTokenizer(path, [tokenizer.token_to_id(tiny.END)])


def test_ten_thousand_random_texts_are_read_back_as_before(base: TaskTokenizer) -> None:
    found = enrich(base, OUTPUTS, EnrichSettings(40))
    assert found.tokens[-1].length < found.length / 4
    chance = random.Random(3)
    pieces = [*ALPHABET, *(text[chance.randint(0, 9) :] for text in OUTPUTS)]
    texts = ["".join(chance.choices(pieces, k=chance.randint(0, 12))) for _ in range(10_000)]
    require_same_texts(base.backend, found.tokenizer, [*texts, *OUTPUTS])
    used = {id_ for e in found.tokenizer.encode_batch(texts) for id_ in e.ids}
    assert used & {token.id for token in found.tokens}


def test_every_new_token_that_is_left_in_outputs_is_found_again(base: TaskTokenizer) -> None:
    found = enrich(base, OUTPUTS, EnrichSettings(40))
    last = found.tokens[-1]
    encoded = found.tokenizer.encode_batch(OUTPUTS, add_special_tokens=False)
    assert sum(len(e.ids) for e in encoded) == last.length
    assert any(last.id in e.ids for e in encoded)


def test_text_without_new_tokens_is_encoded_as_before(base: TaskTokenizer) -> None:
    found = enrich(base, OUTPUTS, EnrichSettings(40))
    for text in ("zebra", " zebra", "Z\n\nz", f"zebra{tiny.END} zebra", "日zé", ""):
        assert found.tokenizer.encode(text).ids == base.backend.encode(text).ids


def test_a_changed_text_is_told() -> None:
    base, other = byte_level("gpt2"), byte_level("gpt2")
    other.normalizer = normalizers.Lowercase()
    with pytest.raises(FamilyError, match="'Play' is read back as 'play'"):
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
        with pytest.raises(FamilyError, match=said):
            Growing(tokenizer)


def test_a_folder_of_it_is_loaded_by_transformers(base: TaskTokenizer, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    from tasc_jobs.enrich.saving import save

    settings = EnrichSettings(20)
    found = enrich(base, OUTPUTS, settings)
    saved = save(found, settings, base, tmp_path / "enriched")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "enriched")
    for text in OUTPUTS[:8]:
        ids = saved.backend.encode(text, add_special_tokens=False).ids
        assert loaded.encode(text, add_special_tokens=False) == ids
        assert loaded.decode(ids) == base.decode(base.backend.encode(text).ids)
    assert loaded.eos_token == tiny.END
    record = json.loads((tmp_path / "enriched" / "enrichment.json").read_text())
    assert [token["id"] for token in record["tokens"]] == [t.id for t in found.tokens]
    assert TaskTokenizer.from_folder(tmp_path / "enriched").fingerprint == saved.fingerprint
