"""Tests the findings of `tasc doctor` on folders with one fault each, and on others."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, MixtralConfig
from typer.testing import CliRunner

from lora_folders import cut, make_adapter
from tasc_engine.config import EngineConfig
from tasc_engine.errors import OutOfMemory
from tasc_engine.kv.device_memory import DeviceMemory
from tasc_engine.model.loading import ModelSource
from tasc_engine.model.target import Target
from tasc_jobs.cli.main import app
from tasc_jobs.demo.tasks import HERE, MODEL, TASKS
from tasc_jobs.doctor import KINDS, Examination, Report, examine, memory_finding
from tasc_jobs.errors import UsageError
from tasc_runtime.llm import LLM, Completions
from tiny import END, SHAPE, make_folder, make_tokenizer

WEIGHTS, ADAPTER, CONFIG = "model.safetensors", "lora", "tokenizer_config.json"
EXAMINE = f"""
import json, sys
from tasc_jobs.doctor import Examination, examine
for model in sys.argv[1:]:
    report = examine(Examination(model, model + "/{ADAPTER}"))
    print(json.dumps({{**report.as_json, "torch": "torch" in sys.modules}}))
"""
SMALL: dict[str, Any] = {"rows": 2, "context": 64, "device": "cpu"}


def changed(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def config(**values: Any) -> Callable[[Path], None]:
    return lambda folder: changed(folder / "config.json", **values)


def lost(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def cut_off(folder: Path) -> None:
    path = folder / WEIGHTS
    path.write_bytes(path.read_bytes()[:-100])


def without_shard(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "model-00001-of-00002.safetensors")
    placed = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": placed}))


def more_tokens(folder: Path) -> None:
    path = folder / "tokenizer.json"
    token = {"id": 400, "content": "<new>", "special": True, "normalized": False}
    token |= dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    changed(path, added_tokens=[*json.loads(path.read_text())["added_tokens"], token])


def more_ends(folder: Path) -> None:
    more_tokens(folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 400]}')


def other_end(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": 5}')


def repetition_penalty(folder: Path) -> None:
    changed(folder / "generation_config.json", repetition_penalty=1.1)


def adapter_with_another_end(folder: Path) -> None:
    make_tokenizer(folder / ADAPTER)
    (folder / ADAPTER / "generation_config.json").write_text('{"eos_token_id": 5}')


def appended_end(folder: Path) -> None:
    end = {"SpecialToken": {"id": END, "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    known = {END: {"id": END, "ids": [0], "tokens": [END]}}
    processor = {"type": "TemplateProcessing", "single": [text, end], "pair": [text, text]}
    changed(folder / "tokenizer.json", post_processor={**processor, "special_tokens": known})


def without_a_tensor(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    tensors.pop(next(name for name in tensors if "down_proj" in name))
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})


def with_a_layer_more(folder: Path) -> None:
    """Adds weights of a layer that is not in config.json."""
    more = {"model.layers.9.mlp.up_proj.weight": torch.ones(4, 4)}
    save_file(load_file(folder / WEIGHTS) | more, folder / WEIGHTS, {"format": "pt"})


def adapter_beside(folder: Path) -> None:
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy(folder / ADAPTER / name, folder)


def weights_as(name: str) -> Callable[[Path], None]:
    """Returns a function that renames the weights to a file of another program."""

    def change(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / WEIGHTS).rename(folder / name)

    return change


def adapter_alone(folder: Path) -> None:
    adapter_beside(folder)
    for name in ("config.json", WEIGHTS):
        (folder / name).unlink()


# By name: how a folder is broken, and the subject of its finding before or by loading.
BEFORE_LOADING: dict[str, tuple[Callable[[Path], None], str]] = {
    "no folder": (shutil.rmtree, "model"),
    "empty": (lambda folder: (shutil.rmtree(folder), folder.mkdir()), "model"),
    "no config": (lost("config.json"), "model"),
    "config no JSON": (lambda folder: (folder / "config.json").write_text("{"), "model"),
    "a state of convolutions": (config(layer_types=["conv", "full_attention"]), "model"),
    "an adapter beside the weights": (adapter_beside, "model"),
    "GPTQ": (config(quantization_config={"quant_method": "gptq", "bits": 4}), "model"),
    "AWQ": (config(quantization_config={"quant_method": "awq", "bits": 4}), "model"),
    "AWQ of before": (lambda folder: (folder / "quant_config.json").write_text("{}"), "model"),
    "MLX": (config(quantization={"bits": 4, "group_size": 64}), "model"),
    "GGUF beside settings": (weights_as("model.Q4_K_M.gguf"), "model"),
    "ONNX": (weights_as("onnx/model.onnx"), "model"),
    "pickled": (weights_as("pytorch_model.bin"), "model"),
    "an adapter as the model": (adapter_alone, "model"),
    "no weights": (lost(WEIGHTS), "model"),
    "weights cut off": (cut_off, "model"),
    "shard missing": (without_shard, "model"),
    "encoder-decoder": (config(model_type="t5", is_encoder_decoder=True), "model"),
    "no tokenizer": (lost("tokenizer.json"), "model"),
    "more tokens than embeddings": (config(vocab_size=100), "tokenizer"),
    "an end without an embedding": (more_ends, "tokenizer"),
    "adapter without config": (lost(f"{ADAPTER}/adapter_config.json"), "adapter"),
    "adapter of another model": (lambda folder: cut(folder / ADAPTER), "adapter"),
}
BY_LOADING: dict[str, tuple[Callable[[Path], None], str]] = {
    "no model type": (config(model_type=None), "load"),
    "unknown architecture": (config(model_type="nonesuch"), "load"),
    "code of its own": (config(model_type="own", auto_map={"AutoConfig": "own.Own"}), "load"),
    "no causal LM": (config(model_type="clip"), "load"),
    "a setting of a wrong type": (config(hidden_act=7, rms_norm_eps="x"), "load"),
    "wrong shapes": (config(intermediate_size=80), "load"),
    "a tensor is missing": (without_a_tensor, "load"),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_folder(tmp_path_factory.mktemp("doctor") / "base", dtype=torch.float32)
    make_adapter(folder, folder / ADAPTER, r=2, target_modules=["up_proj"])
    return folder


def levels(report: Report) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for finding in report.findings:
        found.setdefault(finding.level, set()).add(finding.subject)
    return found


def test_unusable_folder_has_one_failure_and_needs_no_torch(base, tmp_path):
    broken = {name: tmp_path / name for name in BEFORE_LOADING}
    for name, folder in broken.items():
        BEFORE_LOADING[name][0](Path(shutil.copytree(base, folder)))
    ran = subprocess.run(
        [sys.executable, "-c", EXAMINE, *map(str, broken.values())],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    for name, line in zip(BEFORE_LOADING, ran.stdout.splitlines(), strict=True):
        report = json.loads(line)
        failed = [f["subject"] for f in report["findings"] if f["level"] == "fail"]
        assert failed == [BEFORE_LOADING[name][1]], name
        assert (report["works"], report["torch"]) == (False, False), name
        assert all("\n" not in f["text"] for f in report["findings"]), name


@pytest.mark.parametrize("name", BY_LOADING)
def test_failed_model_load_is_reported_as_one_finding(
    name: str, base: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(base, tmp_path / "broken"))
    break_it, subject = BY_LOADING[name]
    break_it(folder)
    report = examine(Examination(str(folder), **SMALL))
    assert levels(report)["fail"] == {subject}
    assert len(report.in_words.splitlines()) == len(report.findings)


def test_working_model_is_loaded_and_timed(base: Path, tmp_path: Path) -> None:
    weights = load_file(base / WEIGHTS)
    base = Path(shutil.copytree(base, tmp_path / "twice"))  # as some are on the hub
    others = {name.removeprefix("model."): tensor for name, tensor in weights.items()}
    save_file(others, base / "consolidated.safetensors")
    report = examine(Examination(str(base), f"{base}/{ADAPTER}", **SMALL))
    assert report.works
    by_subject = {finding.subject: finding for finding in report.findings}
    assert by_subject.keys().isdisjoint({"end of answers", "end of prompts", "generation defaults"})
    source, shape = ModelSource(base), EngineConfig(rows=2, max_model_len=64)
    target = Target.load(source, shape)
    figures = by_subject["memory"].figures
    assert figures["kv_bytes"] == target.cache.copied(0, 2 * 64 + 1).nbytes
    assert figures["weights_bytes"] == sum(tensor.nbytes for tensor in weights.values())
    speeds = [f.figures for f in report.findings if f.subject == "speed"]
    assert [speed["rows"] for speed in speeds] == [1, 2]
    assert all(0 < speed["step_s"] < 60 for speed in speeds)


def test_mixture_of_experts_is_loaded(tmp_path: Path) -> None:
    make_tokenizer(tmp_path)
    shape = MixtralConfig(**SHAPE, vocab_size=320, num_local_experts=2)
    AutoModelForCausalLM.from_config(shape, dtype=torch.float32).save_pretrained(tmp_path)
    found = levels(examine(Examination(str(tmp_path), **SMALL)))
    assert "fail" not in found
    assert {"load", "speed"} <= found["ok"]


def test_memory_that_a_container_uses_is_not_free(base: Path, tmp_path: Path, monkeypatch) -> None:
    for name, text in (
        ("max", "400000000"),
        ("current", "300000000"),
        ("stat", "anon 1\nfile 2\ninactive_file 50000000\n"),
    ):
        (tmp_path / f"memory.{name}").write_text(text)
    monkeypatch.setattr("tasc_jobs.doctor.CGROUP", tmp_path)
    report = examine(Examination(str(base), **SMALL))
    (memory,) = (finding for finding in report.findings if finding.subject == "memory")
    assert memory.figures["free_bytes"] == 150_000_000


@pytest.mark.parametrize(
    ("rows_that_fit", "level", "named"),
    [(4.5, "ok", "beside the weights"), (2.5, "warn", "2 rows"), (0.5, "fail", "--context")],
)
def test_gpu_memory_beside_the_weights_is_compared_with_rows(base, rows_that_fit, level, named):
    asked = Examination(str(base), rows=4, context=64, device="cuda")
    plenty = DeviceMemory(10**12, 10**12, 0)
    figures = memory_finding(asked, base, 64, "cuda", plenty).figures
    row = figures["kv_bytes"] / 4
    taken = rows_that_fit * row + EngineConfig().prefix_cache_bytes
    free = round(figures["weights_bytes"] + taken / 0.9)
    found = memory_finding(asked, base, 64, "cuda", DeviceMemory(10**12, free, 0))
    assert found.level == level
    assert named in found.text
    assert abs(found.figures["room_bytes"] - rows_that_fit * row) < 2


def test_model_larger_than_the_memory_is_not_loaded(base: Path) -> None:
    huge = {**SMALL, "rows": 4096, "context": 10**9}
    report = examine(Examination(str(base), **huge))
    assert levels(report)["fail"] == {"memory"}
    assert "load" not in {finding.subject for finding in report.findings}


@pytest.mark.parametrize(
    ("change", "subject"),
    [
        (lambda folder: make_tokenizer(folder / ADAPTER, ["entirely other words"], 280), "adapter"),
        (adapter_with_another_end, "adapter"),
        (with_a_layer_more, "load"),
        (more_tokens, "tokenizer"),
        (other_end, "end of answers"),
        (repetition_penalty, "generation defaults"),
        (appended_end, "end of prompts"),
        (lambda folder: changed(folder / CONFIG, add_eos_token=True), "end of prompts"),
    ],
)
def test_doubtful_folders_have_a_warning(base, tmp_path, change, subject):
    folder = Path(shutil.copytree(base, tmp_path / "other"))
    change(folder)
    report = examine(Examination(str(folder), f"{folder}/{ADAPTER}", **SMALL))
    assert subject in levels(report)["warn"]
    assert report.works


def test_command_exits_with_1_if_a_finding_is_a_failure(tmp_path):
    adapter = HERE / "adapters" / next(iter(TASKS))
    words = ["doctor", str(MODEL), "--adapter", str(adapter), "--rows", "2", "--context", "64"]
    ran = CliRunner().invoke(app, [*words, "--json"])
    assert ran.exit_code == 0, ran.output
    assert json.loads(ran.stdout)["works"]
    wrong = CliRunner().invoke(app, ["doctor", str(tmp_path / "nothing")])
    assert wrong.exit_code == 1
    assert {line.split()[0] for line in wrong.stdout.splitlines()} <= {"ok", "warn", "fail"}
    assert CliRunner().invoke(app, ["doctor"]).exit_code == 2


@pytest.mark.parametrize("wrong", [{"dtype": "float8"}, {"device": "quantum"}])
def test_unknown_dtypes_and_devices_are_usage_errors(base: Path, wrong: dict[str, str]) -> None:
    with pytest.raises(UsageError):
        examine(Examination(str(base), **{**SMALL, **wrong}))


def test_kinds_of_weights_are_compared_by_speed_and_answers(tmp_path: Path) -> None:
    folder, rows = make_folder(tmp_path / "llama", "llama"), tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"input": text}) + "\n" for text in ("a b", "c", "b a")))
    options = ["doctor", str(folder), "--rows", "2", "--context", "64", "--json"]
    done = CliRunner().invoke(app, [*options, "--compare", str(rows)])
    findings = {found["subject"]: found for found in json.loads(done.stdout)["findings"]}
    kinds = list(KINDS)
    assert [findings[kind]["figures"]["answers"] for kind in kinds] == [3, 3, 3]
    assert findings[kinds[0]]["figures"]["equal"] == 3
    speeds = {kind: findings[kind]["figures"]["tokens_per_s"] for kind in kinds}
    assert max(speeds, key=lambda kind: speeds[kind]) in findings["fastest"]["text"]


def test_changed_answers_and_kinds_without_memory_are_told(tmp_path: Path, monkeypatch) -> None:
    folder, rows = make_folder(tmp_path / "llama", "llama"), tmp_path / "rows.jsonl"
    rows.write_text('{"input": "a b"}')
    real, seen = LLM.__init__, list[str]()

    def made(self: LLM, *args: Any, **options: Any) -> None:
        seen.append(options["dtype"])
        if options.get("quantization"):
            raise OutOfMemory("no room")
        real(self, *args, **options)
        if seen == ["float32", "float32", "bfloat16"]:
            answer = self.generate("a b", draft=False)[0]
            changed = Completions([replace(answer, text="another")])
            monkeypatch.setattr(self, "generate", lambda *a, **k: changed, raising=False)

    monkeypatch.setattr(LLM, "__init__", made)
    report = examine(Examination(str(folder), compare=rows, **SMALL))
    findings = {found.subject: found for found in report.findings}
    assert report.works
    assert findings["bfloat16"].figures["equal"] == 0
    assert "no room" in findings["int8-dynamic"].text


def test_kind_that_a_model_does_not_support_is_left_out(tmp_path: Path) -> None:
    folder, rows = make_folder(tmp_path / "neox", "gpt_neox"), tmp_path / "rows.jsonl"
    rows.write_text('{"input": "a b"}')
    report = examine(Examination(str(folder), compare=rows, **SMALL))
    findings = {found.subject: found for found in report.findings}
    assert report.works
    assert "silu" in findings["int8-dynamic"].text
    assert findings["bfloat16"].figures["answers"] == 1


@pytest.mark.parametrize(
    ("content", "part"), [("", "no rows"), ('{"input": 3}', "line 1"), ("{", "line 1")]
)
def test_file_without_inputs_is_refused(content: str, part: str, tmp_path: Path) -> None:
    folder, rows = make_folder(tmp_path / "llama", "llama"), tmp_path / "rows.jsonl"
    rows.write_text(content)
    with pytest.raises(UsageError, match=part):
        examine(Examination(str(folder), compare=rows, **SMALL))
