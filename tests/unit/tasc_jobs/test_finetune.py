"""A fine-tune trains what it should, and is loaded by others."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from finetuning import ADAPTER, Bench, Made, made_by, make
from support import refused
from tasc_draft import DraftIndex, DraftSettings, NgramProposer
from tasc_engine import Engine, EngineConfig, GenerationRequest, ModelSource, Target
from tasc_jobs.errors import FinetuneError
from tasc_jobs.finetune import finetuning as job_module
from tasc_jobs.finetune import training
from tasc_jobs.finetune.finetuning import finetune
from tasc_jobs.finetune.model import add_rows, load_base
from tasc_text import TaskTokenizer


@pytest.fixture(scope="module", params=["qwen2", "gpt_neox"])
def made(
    request: pytest.FixtureRequest, whole: Made, tmp_path_factory: pytest.TempPathFactory
) -> Made:
    """The embeddings of the one are its LM head, too; those of the other are not."""
    if request.param == "qwen2":
        return whole
    other = make(tmp_path_factory.mktemp("bench"), request.param)
    return made_by(other, tmp_path_factory.mktemp("made"))


def matrices(model: Any) -> list[torch.Tensor]:
    return [model.get_input_embeddings().weight, model.get_output_embeddings().weight]


def base_of(bench: Bench) -> Any:
    return load_base(bench.base, nf4=False, device="cpu")


def test_only_the_adapter_and_the_new_rows_change(made: Made) -> None:
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
    with pytest.raises(FinetuneError):
        finetune(made.bench.job(made.output))


def test_new_rows_begin_as_the_mean_of_their_parts_and_padding_is_used_first(made: Made) -> None:
    parts, model = made.bench.parts, base_of(made.bench)
    vocab = TaskTokenizer.from_folder(made.bench.tokenizer).vocab_size
    model.resize_token_embeddings(vocab + 5)
    add_rows(model, vocab, parts)
    for matrix in matrices(model):
        assert matrix.shape[0] == vocab + 5
        for id_, its in parts.items():
            torch.testing.assert_close(matrix[id_], matrix[list(its)].mean(0))


def test_transformers_and_peft_load_it_and_say_what_the_engine_says(made: Made) -> None:
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
    (result,) = engine_of(model).generate([GenerationRequest("1", tuple(ids[0].tolist()), 8)])
    said = whole.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :].tolist()
    assert list(result.tokens) == said


def engine_of(folder: Path) -> Engine:
    tokenizer, config = TaskTokenizer.from_folder(folder), EngineConfig(rows=2, max_model_len=64)
    target = Target.load(ModelSource(folder, dtype="float32"), config)
    index = DraftIndex.empty(tokenizer.fingerprint, target.vocab_size)
    proposer = NgramProposer(
        DraftSettings(), rows=2, capacity=64, vocab_size=target.vocab_size,
        eos_ids=tokenizer.eos_ids, index=index,
    )  # fmt: skip
    return Engine(target, tokenizer, proposer, config)


def test_rows_that_are_too_long_are_left_out_and_counted(bench: Bench, tmp_path: Path) -> None:
    with refused(FinetuneError, "--max-length"):
        finetune(bench.job(tmp_path / "refused", max_length=3))
    assert not (tmp_path / "refused").exists()  # somebody else may want the place
    plan = job_module.plan_of(bench.job(tmp_path))
    lengths = sorted(len(example.ids) for example in plan.examples)
    found = finetune(bench.job(tmp_path, epochs=1, max_length=lengths[9]))
    assert found["rows"] + found["too_long"] == 20
    assert found["too_long"] > 0


def test_the_head_runs_only_where_something_is_said_and_the_loss_is_the_same(made: Made) -> None:
    job = replace(made.bench.job(made.output), tokenizer=made.bench.base)
    found, model = job_module.plan_of(job).examples, base_of(made.bench)
    trainer = training.Trainer(model, found, job.settings)
    seen: list[torch.Size] = []
    model.get_output_embeddings().register_forward_hook(lambda _, x, y: seen.append(y.shape))
    rows, alone = [0, 7, 3], 0.0
    with torch.no_grad():
        shared = float(trainer.loss(rows))
        for row in rows:
            ids = torch.tensor([found[row].ids])
            logits = model(input_ids=ids).logits[0, found[row].prompt - 1 : -1]
            wanted = ids[0, found[row].prompt :]
            alone += float(torch.nn.functional.cross_entropy(logits, wanted, reduction="sum"))
    assert shared == pytest.approx(alone, rel=1e-5)
    assert seen[0][:2] == (1, sum(len(found[row].ids) - found[row].prompt for row in rows))


@pytest.mark.parametrize("where", ["load_base", "adapted"])
def test_too_little_memory_is_said_in_words(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setattr(job_module, where, lambda *given, **named: torch.empty(2**58))
    with refused(FinetuneError, "--quantization nf4"):
        finetune(bench.job(tmp_path))
