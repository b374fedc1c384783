"""A fine-tune learns its own model's tokens and ends, and refuses another's."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

import tiny
from finetuning import OUTPUTS, Bench, Made, make, make_on
from support import refused
from tasc_jobs.enrich.enrichment import enrich_and_save
from tasc_jobs.enrich.ngram_selection import EnrichSettings
from tasc_jobs.errors import FinetuneError
from tasc_jobs.finetune.examples import examples_of
from tasc_jobs.finetune.finetuning import finetune
from tasc_jobs.finetune.model import add_rows, load_base, vocabulary_of
from tasc_store import CorpusRow
from tasc_text import PromptTemplate, TaskTokenizer

CHAT_END = "<|im_end|>"


@pytest.fixture
def own(bench: Bench, tmp_path: Path) -> Bench:
    """One with an enriched folder that a test may damage."""
    return replace(bench, tokenizer=shutil.copytree(bench.tokenizer, tmp_path / "enriched"))


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """A model whose settings end answers by another token than its tokenizer's do."""
    folder = tmp_path_factory.mktemp("chat") / "qwen2"
    tiny.make_tokenizer(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([CHAT_END])
    tokenizer.save(str(folder / "tokenizer.json"))
    made = make_on(folder, "qwen2")
    end = tokenizer.token_to_id(CHAT_END)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [end]}))
    ends_otherwise(made.tokenizer)
    return made


def ends_otherwise(folder: Path) -> None:
    """An enriched folder that ends by `tiny.END`."""
    (folder / "generation_config.json").unlink(missing_ok=True)
    (folder / "config.json").unlink(missing_ok=True)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": tiny.END}))
    assert TaskTokenizer.from_folder(folder).eos_ids == (0,)


def test_an_end_that_the_model_does_not_end_by_is_refused(chat: Bench, tmp_path: Path) -> None:
    with refused(FinetuneError, tiny.END, CHAT_END, "--eos"):
        finetune(chat.job(tmp_path, epochs=1))


OTHER_PAIR = pytest.mark.slow("each end, with and without new tokens, is daily")


@pytest.mark.parametrize(
    ("enriched", "eos"),
    [
        (True, CHAT_END),
        (False, tiny.END),
        pytest.param(False, CHAT_END, marks=OTHER_PAIR),
        pytest.param(True, tiny.END, marks=OTHER_PAIR),
    ],
)
def test_what_is_made_ends_by_what_was_learnt(
    chat: Bench, tmp_path: Path, eos: str, enriched: bool
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    bench = chat if enriched else replace(chat, tokenizer=chat.base)
    job = replace(bench.job(tmp_path, epochs=1), eos=eos)
    learnt = vocabulary_of(job.base, job.tokenizer, eos).tokenizer
    end = learnt.backend.token_to_id(eos)
    assert examples_of(job.rows, learnt, job.template, 99)[0][0].ids[-1] == end
    assert finetune(job)["end"] == eos
    assert TaskTokenizer.from_folder(tmp_path / "model").eos_ids == (end,)
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert whole.generation_config.eos_token_id == whole.config.eos_token_id == end
    assert AutoTokenizer.from_pretrained(tmp_path / "model").eos_token == eos


def test_one_of_the_models_ends_is_learnt_and_the_others_stay(chat: Bench, tmp_path: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(chat.base, base)
    both = [320, 0]
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": both, "top_k": 7}))
    finetune(replace(chat, base=base).job(tmp_path / "out", epochs=1))
    settings = json.loads((tmp_path / "out" / "model" / "generation_config.json").read_text())
    assert settings == {"eos_token_id": [0, 320], "top_k": 7}


def test_of_several_ends_that_of_the_settings_is_learnt(chat: Bench, tmp_path: Path) -> None:
    """Llama 3.1's instructed models list three, the first of which ends no chat."""
    base = tmp_path / "base"
    shutil.copytree(chat.base, base)
    tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
    named, other = (tokenizer.token_to_id(end) for end in (CHAT_END, tiny.END))
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": [other, named]}))
    (base / "tokenizer_config.json").write_text(json.dumps({"eos_token": CHAT_END}))
    enrich_and_save(TaskTokenizer.from_folder(base), OUTPUTS, EnrichSettings(6), tmp_path / "e")
    for folder in (base, tmp_path / "e"):
        assert vocabulary_of(base, folder).tokenizer.eos_ids == (named, other)


def test_where_nothing_names_an_end_the_option_is_named(chat: Bench, tmp_path: Path) -> None:
    shutil.copy(chat.base / "tokenizer.json", tmp_path)
    with refused(FinetuneError, str(tmp_path), "--eos"):
        vocabulary_of(tmp_path, tmp_path)


def test_a_tokenizer_of_another_model_is_refused(bench: Bench, tmp_path: Path) -> None:
    other = tmp_path / "other"
    tiny.make_tokenizer(other, texts=["completely other words zebra quilt"] * 3, size=300)
    enrich_and_save(TaskTokenizer.from_folder(other), OUTPUTS, EnrichSettings(6), tmp_path / "e")
    for folder in (other, tmp_path / "e"):
        with refused(FinetuneError, f"was not enriched from the tokenizer of {bench.base}"):
            vocabulary_of(bench.base, folder)


def test_a_record_of_another_model_is_refused(own: Bench) -> None:
    change(own.tokenizer, base_fingerprint="0" * 32)
    with refused(FinetuneError, "was not enriched from the tokenizer of"):
        vocabulary_of(own.base, own.tokenizer)


def change(folder: Path, **changes: object) -> None:
    file = folder / "enrichment.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize(
    "damage",
    ["{}", "[]", "no json", '{"tokens": [{"id": 3}]}', '{"tokens": [{"id": 3, "parts": [4]}]}'],
)
def test_a_damaged_record_is_named(own: Bench, damage: str) -> None:
    (own.tokenizer / "enrichment.json").write_text(damage)
    with refused(FinetuneError, "enrichment.json", "`tasc enrich`"):
        vocabulary_of(own.base, own.tokenizer)


def test_a_token_may_not_stand_for_a_later_one(own: Bench) -> None:
    tokens = json.loads((own.tokenizer / "enrichment.json").read_text())["tokens"]
    change(own.tokenizer, tokens=tokens[::-1])
    with refused(FinetuneError, "enrichment.json", "parts"):
        vocabulary_of(own.base, own.tokenizer)


def test_tokens_that_no_record_explains_are_refused(own: Bench) -> None:
    (own.tokenizer / "enrichment.json").unlink()
    with refused(FinetuneError, "6 tokens", own.base.name):
        vocabulary_of(own.base, own.tokenizer)


def test_ids_of_the_base_beyond_its_rows_get_the_mean_of_all(bench: Bench) -> None:
    """As an image's token of Gemma 3, which its text models have no row for."""
    model = load_base(bench.base, nf4=False, device="cpu")
    rows = model.get_input_embeddings().num_embeddings
    mean = model.get_input_embeddings().weight.mean(0)
    add_rows(model, rows + 2, {rows + 1: (3, 5)})
    found = model.get_input_embeddings().weight
    torch.testing.assert_close(found[rows], mean)
    torch.testing.assert_close(found[rows + 1], found[[3, 5]].mean(0))


def test_a_head_with_a_bias_learns_no_new_tokens(tmp_path: Path) -> None:
    phi = make(tmp_path, "phi")
    with refused(FinetuneError, "phi", "--tokenizer"):
        finetune(phi.job(tmp_path / "out"))
    plain = replace(phi, tokenizer=phi.base)
    assert finetune(plain.job(tmp_path / "out", epochs=1))["new_tokens"] == 0


def test_a_model_that_has_learnt_new_tokens_keeps_them(whole: Made, tmp_path: Path) -> None:
    one = whole.output / "model"
    again = replace(whole.bench, base=one, tokenizer=one)
    assert finetune(again.job(tmp_path, epochs=1))["new_tokens"] == 0
    before, after = (
        load_base(folder, nf4=False, device="cpu").get_input_embeddings().weight
        for folder in (one, tmp_path / "model")
    )
    assert before.equal(after)


def test_a_prompt_without_a_token_is_refused_by_its_row(bench: Bench) -> None:
    rows = [CorpusRow("a", "set", "x"), CorpusRow("b", "", "x")]
    tokenizer = TaskTokenizer.from_folder(bench.base)
    with refused(FinetuneError, "'b'", "--template"):
        examples_of(rows, tokenizer, PromptTemplate("{input}"), 99)
