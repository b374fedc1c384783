"""What a model cannot do is refused when a task is registered, by option, value and way out."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support import refused
from tasc_jobs.errors import UsageError
from tasc_jobs.tasks.model_folders import BaseModel
from tasc_jobs.tasks.register import check_record
from tasc_runtime.sampling_options import guide_of
from tasc_store import TaskRecord
from tiny import END, SENTENCES


@pytest.fixture(scope="module")
def model(folder: Path) -> BaseModel:
    return BaseModel.open(str(folder), None)


@pytest.fixture
def record(folder: Path, model: BaseModel) -> TaskRecord:
    return TaskRecord("t", str(folder), model.tokenizer.fingerprint, "say {input}\n", max_tokens=64)


def copied(folder: Path, to: Path, **settings: Any) -> Path:
    """The folder with other settings; those that are None are gone."""
    shutil.copytree(folder, to)
    path = to / "config.json"
    changed = {**json.loads(path.read_text()), **settings}
    path.write_text(json.dumps({k: v for k, v in changed.items() if v is not None}))
    return to


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"template": "{input}"},
        {"max_tokens": 511},
        {"stop": ("\n", " ", " and", "東京", "é", "🙂")},
        {"choices": SENTENCES},
        {"choices": (" a", "a ", "\n"), "stop": ("b",)},
        {"choices": ("abc",), "max_tokens": 4},
        {"schema": '{"type": "object", "properties": {"a": {"type": "integer"}}}'},
        {"regex": "[a-z]+"},
    ],
)
def test_what_a_model_can_do_passes(
    record: TaskRecord, model: BaseModel, change: dict[str, Any]
) -> None:
    check_record(replace(record, **change), model)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"max_tokens": 512}, ["--max-tokens is 512", "512 positions"]),
        ({"template": "x" * 600 + "{input}"}, ["--template has ", "512 positions"]),
        ({"template": "\udce6{input}"}, ["--template ", "no character"]),
        ({"stop": ("a", "\udce6\udc9d")}, ["--stop ", "udce6"]),
        ({"stop": ("\ufffd",)}, ["--stop ", "inside a character"]),
        ({"stop": (END,)}, ["--stop ", END]),
        ({"choices": ("ok", f"a{END}b")}, ["--choices: choice 1", END]),
        ({"choices": ("abc",), "max_tokens": 3}, ["--choices: choice 0", "'abc'", "4 tokens"]),
        ({"choices": ("one", "two"), "stop": ("x", "wo")}, ["--choice 'two'", "'wo'"]),
        ({"schema": '{"type": "no such type"}'}, ["--schema: "]),
        ({"regex": "(" * 10}, ["--regex: "]),
        ({"regex": "a{0}"}, ["--regex: "]),
    ],
)
def test_what_a_model_cannot_do_is_named(
    record: TaskRecord, model: BaseModel, change: dict[str, Any], named: list[str]
) -> None:
    check_record(record, model)
    with refused(UsageError, *named) as caught:
        check_record(replace(record, **change), model)
    assert "\n" not in str(caught.value)


def test_each_adapter_is_checked_and_the_one_at_fault_named(
    record: TaskRecord, model: BaseModel, tmp_path: Path
) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    good = str(tmp_path / "good")
    base = AutoModelForCausalLM.from_pretrained(model.folder)
    get_peft_model(base, LoraConfig(r=4, target_modules="all-linear")).save_pretrained(good)
    check_record(replace(record, adapters=(("a", good), ("b", good))), model)
    (tmp_path / "bad").mkdir()
    bad = f"{tmp_path}/bad"
    with refused(UsageError, f"--adapters b={bad}", "adapter_config.json"):
        check_record(replace(record, adapters=(("a", good), ("b", bad))), model)


def test_a_template_of_no_tokens_is_refused(record: TaskRecord, model: BaseModel) -> None:
    class Mute:
        def encode_prompt(self, text: str) -> list[int]:
            return []

    with refused(UsageError, "--template"):
        check_record(record, replace(model, tokenizer=Mute()))


def test_a_model_is_not_quantised_twice(record: TaskRecord, model: BaseModel) -> None:
    check_record(replace(record, quantization="nf4"), model)
    quantized = replace(model, quantized=True)
    check_record(record, quantized)
    with refused(UsageError, "--quantization"):
        check_record(replace(record, quantization="nf4"), quantized)


def test_a_guide_says_what_the_record_says(record: TaskRecord) -> None:
    assert guide_of(record) is None
    found = [guide_of(replace(record, **form)) for form in (
        {"choices": ("a", "b")}, {"schema": "{}"}, {"regex": "a"},
    )]  # fmt: skip
    assert [(g.spec.kind, g.spec.choices, g.spec.text) for g in found if g] == [
        ("choice", ("a", "b"), ""), ("json_schema", (), "{}"), ("regex", (), "a"),
    ]  # fmt: skip


def test_settings_of_a_model_are_read_wherever_they_stand(folder: Path, tmp_path: Path) -> None:
    inner = {"max_position_embeddings": 77, "vocab_size": 999}
    unset = dict.fromkeys(inner)
    for name, settings, found in (
        ("own", {}, (512, 320)),
        ("inside", {**unset, "text_config": inner}, (77, 999)),
        ("older", {**unset, "n_positions": 5}, (5, 320)),
        ("silent", unset, (None, 320)),
    ):
        path = copied(folder, tmp_path / name, **settings, quantization_config={"bits": 4})
        model = BaseModel.open(str(path), None)
        assert (model.positions, model.vocab_size, model.quantized) == (*found, True)


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (lambda f: (f / "tokenizer.json").unlink(), "tokenizer.json"),
        (lambda f: (f / "tokenizer.json").write_text("{"), "tokenizer.json"),
        (lambda f: (f / "config.json").write_text("{"), "config.json"),
        (lambda f: (f / "config.json").write_text('["a"]'), "config.json"),
        (lambda f: (f / "config.json").write_text('{"vocab_size": "a"}'), "vocab_size"),
        (lambda f: (f / "config.json").unlink(), "config.json"),
        (shutil.rmtree, "folder"),
    ],
)
def test_a_folder_that_is_no_model_is_refused(
    folder: Path, tmp_path: Path, spoil: Any, named: str
) -> None:
    spoiled = copied(folder, tmp_path / "model")
    BaseModel.open(str(spoiled), None)
    spoil(spoiled)
    with refused(UsageError, "--model", named):
        BaseModel.open(str(spoiled), None)
