"""Tests the trained weights of a fine-tune, its EOS tokens, and that other programs load it."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

import tiny
from chat_families import make_chat_tokenizer
from finetuning import ADAPTER, OUTPUTS, Bench, Made, made_by, make, make_on
from lora_folders import make_adapter
from support import make_engine, refused, requests_of
from tasc_runtime.models import chat_template
from tasc_store import CorpusRow
from tasc_text import PromptTemplate, TaskTokenizer
from tasc_train.enrich.enrichment import enrich_and_save
from tasc_train.enrich.ngram_selection import EnrichSettings
from tasc_train.errors import FinetuneError
from tasc_train.finetune import finetuning as job_module
from tasc_train.finetune import training
from tasc_train.finetune.examples import examples_of
from tasc_train.finetune.finetuning import finetune
from tasc_train.finetune.model import add_rows, load_base, vocabulary_of


@pytest.fixture(scope="module", params=["qwen2", "gpt_neox"])
def made(request, whole, tmp_path_factory):
    """Two fine-tunes: one model ties its embeddings to its LM head, the other does not."""
    if request.param == "qwen2":
        return whole
    other = make(tmp_path_factory.mktemp("bench"), request.param)
    return made_by(other, tmp_path_factory.mktemp("made"))


def matrices(model: Any) -> list[torch.Tensor]:
    return [model.get_input_embeddings().weight, model.get_output_embeddings().weight]


def base_of(bench: Bench) -> Any:
    return load_base(bench.base, nf4=False, device="cpu")


def adapter_beside(folder: Path) -> None:
    make_adapter(folder, folder / "lora", target_modules="all-linear")
    for path in (folder / "lora").glob("adapter_*"):
        shutil.copy(path, folder)


def without_a_weight(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("spoil", "named"),
    [(adapter_beside, "adapter_config.json"), (without_a_weight, "model.norm.weight")],
)
def test_base_that_cannot_be_served_is_refused(tmp_path: Path, spoil: Any, named: str) -> None:
    folder = tiny.make_folder(tmp_path)
    load_base(folder, nf4=False, device="cpu")
    spoil(folder)
    with refused(FinetuneError, str(tmp_path), named):
        load_base(folder, nf4=False, device="cpu")


def test_only_the_adapter_and_the_rows_of_new_tokens_change(made: Made) -> None:
    report = json.loads((made.output / "finetune.json").read_text())
    assert made.found["new_tokens"] == 6
    assert made.found["loss"] < report["metrics"]["first_loss"]
    adapter = load_file(made.output / ADAPTER)
    rows = {name: value for name, value in adapter.items() if "lora" not in name}
    assert rows
    assert all(value.shape[0] == 6 for value in rows.values())
    before = matrices(base_of(made.bench))
    assert (before[0] is before[1]) == ("qwen2" in made.bench.base.name)
    after = matrices(load_base(made.output / "model", nf4=False, device="cpu"))
    first = min(made.bench.parts)
    for old, new in zip(before, after, strict=True):
        assert torch.equal(new[:first], old[:first])
        assert not torch.equal(new[first], new[first + 1])
    with refused(FinetuneError, str(made.output)):
        finetune(made.bench.job(made.output, seed=1))


def test_new_embedding_rows_are_the_mean_of_their_parts_and_use_padding_rows(made: Made) -> None:
    parts, model = made.bench.parts, base_of(made.bench)
    vocab = TaskTokenizer.from_folder(made.bench.tokenizer).vocab_size
    model.resize_token_embeddings(vocab + 5)
    add_rows(model, vocab, parts)
    for matrix in matrices(model):
        assert matrix.shape[0] == vocab + 5
        for id_, replaced in parts.items():
            torch.testing.assert_close(matrix[id_], matrix[list(replaced)].mean(0))


def test_transformers_and_peft_load_the_result_and_answer_like_the_engine(made: Made) -> None:
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM, AutoTokenizer

    adapter, model = made.output / "adapter", made.output / "model"
    tokenizer = AutoTokenizer.from_pretrained(adapter)
    ids = torch.tensor([tokenizer.encode("play ->") + tokenizer.encode("intent: play_music")])
    assert ids.max() >= min(made.bench.parts)
    with torch.no_grad():
        own = AutoPeftModelForCausalLM.from_pretrained(adapter, dtype=torch.float32)
        whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        one, other = own.eval()(input_ids=ids).logits, whole.eval()(input_ids=ids).logits
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    (result,) = make_engine(model, dtype="float32").generate(requests_of(ids.tolist(), 8))
    generated = whole.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :].tolist()
    assert list(result.tokens) == generated


def test_rows_over_the_maximum_length_are_left_out_and_counted(
    bench: Bench, tmp_path: Path
) -> None:
    plan = job_module.plan_of(bench.job(tmp_path))
    lengths = sorted(len(example.ids) for example in plan.examples)
    found = finetune(bench.job(tmp_path, epochs=1, max_length=lengths[9]))
    assert found["rows"] + found["too_long"] == 20
    assert found["too_long"] > 0


def test_lm_head_runs_only_at_output_tokens_with_the_same_loss(made: Made) -> None:
    job = replace(made.bench.job(made.output), tokenizer=made.bench.base)
    found, model = job_module.plan_of(job).examples, base_of(made.bench)
    trainer = training.Trainer(model, found, job.settings)
    shapes: list[torch.Size] = []
    model.get_output_embeddings().register_forward_hook(lambda _, x, y: shapes.append(y.shape))
    rows, alone = [0, 7, 3], 0.0
    with torch.no_grad():
        shared = float(trainer.loss(rows))
        for row in rows:
            ids = torch.tensor([found[row].ids])
            logits = model(input_ids=ids).logits[0, found[row].prompt - 1 : -1]
            wanted = ids[0, found[row].prompt :]
            alone += float(torch.nn.functional.cross_entropy(logits, wanted, reduction="sum"))
    assert shared == pytest.approx(alone, rel=1e-5)
    assert shapes[0][:2] == (1, sum(len(found[row].ids) - found[row].prompt for row in rows))


@pytest.mark.parametrize("where", ["load_base", "adapted"])
def test_lack_of_memory_is_reported_with_a_solution(bench, tmp_path, monkeypatch, where):
    monkeypatch.setattr(job_module, where, lambda *given, **named: torch.empty(2**58))
    with refused(FinetuneError, "--quantization nf4"):
        finetune(bench.job(tmp_path))


CHAT_END = "<|im_end|>"


@pytest.fixture
def own(bench: Bench, tmp_path: Path) -> Bench:
    """A bench with an enriched folder that a test may damage."""
    return replace(bench, tokenizer=shutil.copytree(bench.tokenizer, tmp_path / "enriched"))


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """A model with another EOS token than the enriched tokenizer."""
    folder = tmp_path_factory.mktemp("chat") / "qwen2"
    tiny.make_tokenizer(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([CHAT_END])
    tokenizer.save(str(folder / "tokenizer.json"))
    made = make_on(folder, "qwen2")
    end = tokenizer.token_to_id(CHAT_END)
    ends = {"eos_token_id": [end]}
    (folder / "generation_config.json").write_text(json.dumps(ends))
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | ends))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": CHAT_END}))
    ends_otherwise(made.tokenizer)
    return made


def ends_otherwise(folder: Path) -> None:
    """Makes `tiny.END` the EOS token of an enriched folder."""
    (folder / "generation_config.json").unlink(missing_ok=True)
    (folder / "config.json").unlink(missing_ok=True)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": tiny.END}))
    assert TaskTokenizer.from_folder(folder).eos_ids == (0,)


def test_eos_token_that_the_model_does_not_have_is_refused(chat: Bench, tmp_path: Path) -> None:
    with refused(FinetuneError, tiny.END, CHAT_END, "--eos"):
        finetune(chat.job(tmp_path, epochs=1))


@pytest.mark.parametrize(("enriched", "eos"), [(True, CHAT_END), (False, tiny.END)])
def test_fine_tuned_model_ends_answers_with_the_trained_eos_token(
    chat: Bench, tmp_path: Path, eos: str, enriched: bool
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    bench = chat if enriched else replace(chat, tokenizer=chat.base)
    job = replace(bench.job(tmp_path, epochs=1), eos=eos)
    tokenizer = vocabulary_of(job.base, job.tokenizer, eos).tokenizer
    end = tokenizer.backend.token_to_id(eos)
    assert examples_of(job.rows, tokenizer, job.template, 99)[0][0].ids[-1] == end
    assert finetune(job)["end"] == eos
    assert TaskTokenizer.from_folder(tmp_path / "model").eos_ids == (end,)
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert whole.generation_config.eos_token_id == whole.config.eos_token_id == end
    assert AutoTokenizer.from_pretrained(tmp_path / "model").eos_token == eos


def test_fine_tuned_model_keeps_the_other_eos_tokens(chat: Bench, tmp_path: Path) -> None:
    base = shutil.copytree(chat.base, tmp_path / "base")
    both = [320, 0]
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": both, "top_k": 7}))
    finetune(replace(chat, base=base).job(tmp_path / "out", epochs=1))
    settings = json.loads((tmp_path / "out" / "model" / "generation_config.json").read_text())
    assert settings == {"eos_token_id": [0, 320], "top_k": 7}


def test_eos_token_of_the_settings_is_trained_if_the_model_has_several_eos_tokens(
    chat: Bench, tmp_path: Path
) -> None:
    """Instructed models of Llama 3.1 list three, and the first one does not end a chat."""
    base = shutil.copytree(chat.base, tmp_path / "base")
    tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
    named, other = (tokenizer.token_to_id(end) for end in (CHAT_END, tiny.END))
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": [other, named]}))
    (base / "tokenizer_config.json").write_text(json.dumps({"eos_token": CHAT_END}))
    enrich_and_save(TaskTokenizer.from_folder(base), OUTPUTS, EnrichSettings(6), tmp_path / "e")
    for folder in (base, tmp_path / "e"):
        assert vocabulary_of(base, folder).tokenizer.eos_ids == (named, other)


def test_missing_eos_token_is_refused_with_the_option(chat: Bench, tmp_path: Path) -> None:
    shutil.copy(chat.base / "tokenizer.json", tmp_path)
    with refused(FinetuneError, str(tmp_path), "--eos"):
        vocabulary_of(tmp_path, tmp_path)


def test_tokenizer_of_another_model_is_refused(bench: Bench, tmp_path: Path) -> None:
    other = tmp_path / "other"
    tiny.make_tokenizer(other, texts=["completely other words zebra quilt"] * 3, size=300)
    enrich_and_save(TaskTokenizer.from_folder(other), OUTPUTS, EnrichSettings(6), tmp_path / "e")
    for folder in (other, tmp_path / "e"):
        with refused(FinetuneError, f"was not enriched from the tokenizer of {bench.base}"):
            vocabulary_of(bench.base, folder)


@pytest.mark.parametrize(
    "damage",
    ["{}", "[]", "no json", '{"tokens": [{"id": 3}]}', '{"tokens": [{"id": 3, "parts": [4]}]}'],
)
def test_damaged_enrichment_record_is_named_in_the_error(own: Bench, damage: str) -> None:
    (own.tokenizer / "enrichment.json").write_text(damage)
    with refused(FinetuneError, "enrichment.json", "`tasc enrich`"):
        vocabulary_of(own.base, own.tokenizer)


def test_missing_or_foreign_or_reordered_enrichment_record_is_refused(own: Bench) -> None:
    file = own.tokenizer / "enrichment.json"
    record = json.loads(file.read_text())
    for changed, named in (
        ({"base_fingerprint": "0" * 32}, "was not enriched from the tokenizer of"),
        ({"tokens": record["tokens"][::-1]}, "parts"),
    ):
        file.write_text(json.dumps(record | changed))
        with refused(FinetuneError, named):
            vocabulary_of(own.base, own.tokenizer)
    file.unlink()
    with refused(FinetuneError, "6 tokens", own.base.name):
        vocabulary_of(own.base, own.tokenizer)


def test_ids_without_an_embedding_row_get_the_mean_of_all_rows(bench: Bench) -> None:
    """An example is the image token of Gemma 3, for which its text models have no row."""
    model = load_base(bench.base, nf4=False, device="cpu")
    rows = model.get_input_embeddings().num_embeddings
    mean = model.get_input_embeddings().weight.mean(0)
    add_rows(model, rows + 2, {rows + 1: (3, 5)})
    found = model.get_input_embeddings().weight
    torch.testing.assert_close(found[rows], mean)
    torch.testing.assert_close(found[rows + 1], found[[3, 5]].mean(0))


def test_prompt_without_tokens_is_refused(bench: Bench) -> None:
    rows = [CorpusRow("a", "set", "x"), CorpusRow("b", "", "x")]
    tokenizer = TaskTokenizer.from_folder(bench.base)
    with refused(FinetuneError, "'b'", "--template"):
        examples_of(rows, tokenizer, PromptTemplate("{input}"), 99)


def test_rows_follow_the_prompts_of_a_chat_template(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = make_chat_tokenizer(tmp_path, "gemma")
    tokenizer, theirs = TaskTokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)
    rows = [CorpusRow("a", "wake me up", "alarm"), CorpusRow("b", "", "none")]
    found, _ = examples_of(rows, tokenizer, chat_template(folder), 99)
    for row, example in zip(rows, found, strict=True):
        turns = [{"role": "user", "content": row.input}]
        prompt = theirs.apply_chat_template(turns, add_generation_prompt=True)["input_ids"]
        assert list(example.ids[: example.prompt]) == prompt
        (output,) = tokenizer.encode_outputs([row.output])
        assert list(example.ids[example.prompt :]) == [*output, tokenizer.eos_id]


def test_biased_lm_head_is_refused_if_tokens_are_added(tmp_path: Path) -> None:
    phi = make(tmp_path, "phi")
    with refused(FinetuneError, "phi", "--tokenizer"):
        finetune(phi.job(tmp_path / "out"))
    plain = replace(phi, tokenizer=phi.base)
    assert finetune(plain.job(tmp_path / "out", epochs=1))["new_tokens"] == 0


def test_second_fine_tune_keeps_the_new_tokens_of_the_first(whole: Made, tmp_path: Path) -> None:
    one = whole.output / "model"
    again = replace(whole.bench, base=one, tokenizer=one)
    assert finetune(again.job(tmp_path, epochs=1))["new_tokens"] == 0
    before, after = (
        load_base(folder, nf4=False, device="cpu").get_input_embeddings().weight
        for folder in (one, tmp_path / "model")
    )
    assert before.equal(after)
