"""A fine-tune trains what it should, goes on where it was killed, and is loaded by others."""

import json
import re
import resource
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from finetuning import Bench, make
from tasc_draft import DraftIndex, DraftSettings, NgramProposer
from tasc_engine import Engine, EngineConfig, GenerationRequest, ModelSource, Target
from tasc_jobs.finetune import job as job_module
from tasc_jobs.finetune import training
from tasc_jobs.finetune.checkpoints import Checkpoints
from tasc_jobs.finetune.errors import FinetuneError
from tasc_jobs.finetune.job import CHECKPOINT, finetune
from tasc_jobs.finetune.model import add_rows, load_base
from tasc_text import TaskTokenizer


@pytest.fixture(scope="module", params=[("qwen2", True), ("gpt_neox", False)], ids=str)
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    architecture, tied = request.param
    made = make(tmp_path_factory.mktemp("bench"), architecture, tied=tied)
    own, head = matrices(load_base(made.base, nf4=False, device="cpu"))
    assert (own is head) == tied
    return made


def weights(folder: Path, part: str) -> dict[str, torch.Tensor]:
    return load_file(folder / part)


def test_only_the_adapter_and_the_new_rows_change(bench: Bench, tmp_path: Path) -> None:
    found = finetune(bench.job(tmp_path, dropout=0.0, epochs=12))
    losses = found["loss"]
    assert found["new_tokens"] == 6
    assert losses < json.loads((tmp_path / "finetune.json").read_text())["metrics"]["first_loss"]
    adapter = weights(tmp_path / "adapter", "adapter_model.safetensors")
    rows = {name: value for name, value in adapter.items() if "lora" not in name}
    assert rows
    assert all(value.shape[0] == 6 for value in rows.values())
    before, after = load_base(bench.base, nf4=False, device="cpu"), merged(tmp_path)
    for old, new in zip(matrices(before), matrices(after), strict=True):
        first = min(bench.parts)
        assert torch.equal(new[:first], old[:first])
        assert not torch.equal(new[first], new[first + 1])


def matrices(model: Any) -> list[torch.Tensor]:
    return [model.get_input_embeddings().weight, model.get_output_embeddings().weight]


def merged(folder: Path) -> Any:
    return load_base(folder / "model", nf4=False, device="cpu")


def test_new_rows_begin_as_the_mean_of_their_parts_and_padding_is_used_first(bench: Bench) -> None:
    parts = bench.parts
    vocab = TaskTokenizer.from_folder(bench.tokenizer).vocab_size
    model = load_base(bench.base, nf4=False, device="cpu")
    model.resize_token_embeddings(vocab + 5)
    add_rows(model, vocab, parts)
    for matrix in matrices(model):
        assert matrix.shape[0] == vocab + 5
        for id_, its in parts.items():
            torch.testing.assert_close(matrix[id_], matrix[list(its)].mean(0))


def test_transformers_and_peft_load_it_and_say_what_the_engine_says(
    bench: Bench, tmp_path: Path
) -> None:
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM, AutoTokenizer

    finetune(bench.job(tmp_path))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "adapter")
    ids = torch.tensor([tokenizer.encode("play ->") + tokenizer.encode("intent: play_music")])
    assert ids.max() >= min(bench.parts)
    with torch.no_grad():
        own = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter", dtype=torch.float32)
        whole = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
        one, other = own.eval()(input_ids=ids).logits, whole.eval()(input_ids=ids).logits
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    (result,) = engine_of(tmp_path / "model").generate(
        [GenerationRequest("1", tuple(ids[0].tolist()), 8)]
    )
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


class Killed(Exception):
    """As if the process had ended."""


@pytest.mark.parametrize("step", [1, 4])
def test_a_run_that_was_killed_ends_with_the_weights_of_one_that_was_not(
    bench: Bench, tmp_path: Path, step: int
) -> None:
    def kill(stage: str, done: int, total: int | None) -> None:
        if done == step and not killed:
            killed.append(done)
            raise Killed

    killed: list[int] = []
    finetune(bench.job(tmp_path / "whole"))
    job = replace(bench.job(tmp_path / "killed"), checkpoint_s=0.0)
    with pytest.raises(Killed):
        finetune(job, kill)
    assert not (job.output / "finetune.json").exists()
    seen: list[int] = []
    finetune(job, lambda stage, done, total: seen.append(done))
    assert seen[0] == step - 1  # the step that was killed had no checkpoint yet
    one, other = (
        weights(tmp_path / name / "adapter", "adapter_model.safetensors")
        for name in ("whole", "killed")
    )
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert not (job.output / CHECKPOINT).exists()


def test_other_rows_or_settings_are_not_gone_on_with(bench: Bench, tmp_path: Path) -> None:
    begin(bench, tmp_path)
    with pytest.raises(FinetuneError, match="with another learning_rate;"):
        finetune(bench.job(tmp_path, learning_rate=0.5))
    fewer = replace(bench, rows=bench.rows[1:])
    with pytest.raises(FinetuneError, match="with another rows;"):
        finetune(fewer.job(tmp_path))


def begin(bench: Bench, folder: Path, step: int = 3) -> None:
    def kill(stage: str, done: int, total: int | None) -> None:
        if done == step:
            raise Killed

    with pytest.raises(Killed):
        finetune(replace(bench.job(folder), checkpoint_s=0.0), kill)


def test_a_loss_that_is_no_number_ends_it_and_the_last_checkpoint_stays(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(bench, tmp_path)
    before = state(tmp_path)
    batch_of = job_module.Trainer._loss
    monkeypatch.setattr(
        job_module.Trainer, "_loss", lambda self, rows: batch_of(self, rows) * float("nan")
    )
    with pytest.raises(FinetuneError, match="step 3 of 9 is nan.*--learning-rate in another"):
        finetune(bench.job(tmp_path))
    assert state(tmp_path) == before


def test_a_gradient_that_is_no_number_changes_no_weight(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(bench, tmp_path)
    before, gradient = state(tmp_path), training._gradient

    def overflown(value: torch.nn.Parameter) -> torch.Tensor:
        found = gradient(value)
        found.view(-1)[0] = float("inf")
        return found

    monkeypatch.setattr(training, "_gradient", overflown)
    with pytest.raises(FinetuneError, match="the gradient's norm of step 3 of 9 is inf"):
        finetune(replace(bench.job(tmp_path), checkpoint_s=0.0))
    assert state(tmp_path) == before


def state(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / CHECKPOINT).iterdir()}


def test_a_disk_that_is_full_leaves_the_last_checkpoint(bench: Bench, tmp_path: Path) -> None:
    begin(bench, tmp_path)
    before, limits = state(tmp_path), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(FinetuneError, match=r"that of step 2 stays, make room and run again"):
            finetune(replace(bench.job(tmp_path), checkpoint_s=0.0))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert state(tmp_path) == before
    finetune(bench.job(tmp_path))


def test_a_checkpoint_whose_place_was_being_taken_is_found(bench: Bench, tmp_path: Path) -> None:
    begin(bench, tmp_path)
    folder = tmp_path / CHECKPOINT
    pins = json.loads((folder / "state.json").read_text())["pins"]
    folder.rename(folder.with_name(folder.name + ".older"))
    found = Checkpoints(folder, pins).load()
    assert found is not None
    assert found.step == 2


def test_seconds_and_tokens_are_of_all_pieces_of_a_run(bench: Bench, tmp_path: Path) -> None:
    whole = finetune(bench.job(tmp_path / "whole"))
    tokens = whole["tokens_per_second"] * whole["seconds"]
    output = tmp_path / "killed"
    begin(bench, output, step=4)
    state = json.loads((output / CHECKPOINT / "state.json").read_text())
    for name, spent, before in (
        ("told", {"seconds": 1e6}, 1e6),
        ("of-before-they-were-kept", {"seconds": None, "tokens": None}, 0.0),
    ):
        job = bench.job(tmp_path / name)
        shutil.copytree(output, job.output)
        changed = {k: v for k, v in (state | spent).items() if v is not None}
        (job.output / CHECKPOINT / "state.json").write_text(json.dumps(changed))
        found = finetune(job)
        assert (found["seconds"] > 1e6) == bool(before)
        all_of_it = found["tokens_per_second"] * found["seconds"]
        assert all_of_it == pytest.approx(tokens if before else tokens - state["tokens"])


def test_rows_that_are_too_long_are_left_out_and_counted(bench: Bench, tmp_path: Path) -> None:
    with pytest.raises(FinetuneError, match="none of 20 rows has at most 3 tokens"):
        finetune(bench.job(tmp_path / "refused", max_length=3))
    assert not (tmp_path / "refused").exists()  # somebody else may want the place
    lengths = sorted(
        len(e.ids)
        for e in job_module.examples_of(
            bench.rows, TaskTokenizer.from_folder(bench.tokenizer),
            bench.job(tmp_path).template, 1024,
        )[0]
    )  # fmt: skip
    found = finetune(bench.job(tmp_path, max_length=lengths[9]))
    assert found["rows"] + found["too_long"] == 20
    assert found["too_long"] > 0


def test_what_is_made_is_not_made_again(bench: Bench, tmp_path: Path) -> None:
    finetune(bench.job(tmp_path))
    with pytest.raises(FinetuneError, match="has a fine-tuned model already"):
        finetune(bench.job(tmp_path))


def test_the_head_runs_only_where_something_is_said_and_the_loss_is_the_same(
    bench: Bench, tmp_path: Path
) -> None:
    job = bench.job(tmp_path)
    found, _ = job_module.examples_of(
        bench.rows, TaskTokenizer.from_folder(bench.base), job.template, 99
    )
    model = load_base(bench.base, nf4=False, device="cpu")
    trainer = training.Trainer(model, found, job.settings)
    seen: list[torch.Size] = []
    model.get_output_embeddings().register_forward_hook(lambda _, x, y: seen.append(y.shape))
    rows, alone = [0, 7, 3], 0.0
    with torch.no_grad():
        shared = float(trainer._loss(rows))
        for row in rows:
            ids = torch.tensor([found[row].ids])
            logits = model(input_ids=ids).logits[0, found[row].prompt - 1 : -1]
            wanted = ids[0, found[row].prompt :]
            alone += float(torch.nn.functional.cross_entropy(logits, wanted, reduction="sum"))
    assert shared == pytest.approx(alone, rel=1e-5)
    assert seen[0][:2] == (1, sum(len(found[row].ids) - found[row].prompt for row in rows))


def test_progress_says_loss_and_speed(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begin(bench, tmp_path)
    said: list[str] = []
    finetune(bench.job(tmp_path), say=said.append)
    assert len(said) == 7
    assert all(re.fullmatch(r"loss \d+\.\d{3}, [\d,]+ tokens/s", text) for text in said)
    err = capsys.readouterr().err
    assert "LoRA, frozen weights as they are, on cpu" in err
    assert "going on behind step 2 of 9" in err


@pytest.mark.parametrize("where", ["load_base", "adapted"])
def test_too_little_memory_is_said_in_words(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setattr(job_module, where, lambda *given, **named: torch.empty(2**58))
    said = "too little memory to load .* and an adapter of rank 16; take --quantization nf4"
    with pytest.raises(FinetuneError, match=said):
        finetune(bench.job(tmp_path))


def test_what_became_of_auto_is_gone_on_with(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(bench, tmp_path)
    pins = json.loads((tmp_path / CHECKPOINT / "state.json").read_text())["pins"]
    assert (pins["nf4"], pins["device"], pins["dtype"]) == (False, "cpu", "float32")
    with pytest.raises(FinetuneError, match="with another nf4;"):
        finetune(bench.job(tmp_path, quantization="nf4"))
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        with pytest.raises(FinetuneError, match="with another nf4, device, dtype;"):
            finetune(bench.job(tmp_path))
    finetune(bench.job(tmp_path, quantization="none"))
