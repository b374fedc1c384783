"""Tests that the registration of a task refuses unsupported options, adapters and drafters."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from lora_folders import make_adapter
from support import refused
from tasc_engine.config import MAX_NODES
from tasc_engine.drafting.neural.card import CARD, DrafterCard, target_fingerprint
from tasc_engine.drafting.neural.files import save_drafter
from tasc_jobs.errors import UsageError
from tasc_jobs.tasks.model_folders import BaseModel, check_adapter
from tasc_jobs.tasks.register import check_record
from tasc_runtime.sampling_options import guide_of
from tasc_store import NeuralDrafting, TaskRecord
from tiny import END, SENTENCES

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def model(folder: Path) -> BaseModel:
    return BaseModel.open(str(folder), None)


@pytest.fixture
def record(folder: Path, model: BaseModel) -> TaskRecord:
    return TaskRecord("t", str(folder), model.tokenizer.fingerprint, "say {input}\n", max_tokens=64)


def copied(folder: Path, to: Path, **settings: Any) -> Path:
    """Copies the folder with other settings; those that are None are removed."""
    shutil.copytree(folder, to)
    set_config(to, **settings)
    return to


def set_config(folder: Path, **settings: Any) -> None:
    path = folder / "config.json"
    changed = {**json.loads(path.read_text()), **settings}
    path.write_text(json.dumps({k: v for k, v in changed.items() if v is not None}))


def adapter_alone(folder: Path, **settings: Any) -> None:
    adapter(folder, **settings)
    for name in ("config.json", WEIGHTS):
        (folder / name).unlink()


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
        {"choices": ("abc", "ab"), "label_end": ","},
        {"choices": ("abc", "ab"), "label_end": ""},
        {"label_end": "\n"},
        {"schema": '{"type": "object", "properties": {"a": {"type": "integer"}}}'},
        {"regex": "[a-z]+"},
    ],
)
def test_valid_record_passes_the_check(
    record: TaskRecord, model: BaseModel, change: dict[str, Any]
) -> None:
    check_record(replace(record, **change), model)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"max_tokens": 512}, ["--max-tokens is 512", "512 positions"]),
        ({"template": "x" * 600 + "{input}"}, ["--template has ", "512 positions"]),
        ({"template": "\udce6{input}"}, ["--template ", "not a character"]),
        ({"stop": ("a", "\udce6\udc9d")}, ["--stop ", "udce6"]),
        ({"stop": ("\ufffd",)}, ["--stop ", "inside a character"]),
        ({"stop": (END,)}, ["--stop ", END]),
        ({"choices": ("ok", f"a{END}b")}, ["--choices: choice 1", END]),
        ({"choices": ("abc",), "max_tokens": 3}, ["--choices: choice 0", "'abc'", "4 tokens"]),
        ({"choices": ("one", "two"), "stop": ("x", "wo")}, ["--choices: ", "'two'", "'wo'"]),
        ({"choices": ("b", "c"), "label_end": END}, [f"--label-end is {END!r}", "'b", "--unset"]),
        ({"label_end": "\udce6"}, ["--label-end is '\\udce6'", "--unset label_end"]),
        ({"schema": '{"type": "no such type"}'}, ["--schema: "]),
        ({"regex": "(" * 10}, ["--regex: "]),
        ({"regex": "a{0}"}, ["--regex: "]),
    ],
)
def test_unsupported_record_value_is_named_in_the_error(record, model, change, named):
    check_record(record, model)
    with refused(UsageError, *named) as caught:
        check_record(replace(record, **change), model)
    assert "\n" not in str(caught.value)


def test_one_faulty_adapter_of_several_is_named_in_the_error(record, model, tmp_path) -> None:
    good = str(make_adapter(model.folder, tmp_path / "good"))
    check_record(replace(record, adapters=(("a", good), ("b", good))), model)
    (tmp_path / "bad").mkdir()
    bad = f"{tmp_path}/bad"
    with refused(UsageError, f"--adapters b={bad}", "adapter_config.json"):
        check_record(replace(record, adapters=(("a", good), ("b", bad))), model)


def test_empty_template_and_second_quantization_are_refused(record, model):
    class Mute:
        controls = model.tokenizer.controls
        spellings, control = model.tokenizer.spellings, model.tokenizer.control

        def encode_prompt(self, text: str, add_special_tokens: bool) -> list[int]:
            return []

        def with_special_tokens(self, ids: list[int]) -> list[int]:
            return ids

    with refused(UsageError, "--template"):
        check_record(record, replace(model, tokenizer=Mute()))
    check_record(replace(record, quantization="nf4"), model)
    quantized = replace(model, quantized=True)
    check_record(record, quantized)
    with refused(UsageError, "--quantization"):
        check_record(replace(record, quantization="nf4"), quantized)


def test_guide_of_a_record_has_its_values(record: TaskRecord) -> None:
    assert guide_of(record) is None
    found = [guide_of(replace(record, **form)) for form in (
        {"choices": ("a", "b")}, {"schema": "{}"}, {"regex": "a"},
    )]  # fmt: skip
    assert [(g.kind, g.choices, g.text) for g in found if g] == [
        ("choice", ("a", "b"), ""), ("json_schema", (), "{}"), ("regex", (), "a"),
    ]  # fmt: skip


def test_nested_and_older_model_settings_are_read(folder: Path, tmp_path: Path) -> None:
    inner = {"max_position_embeddings": 77, "vocab_size": 999}
    unset, quantized = dict.fromkeys(inner), {"quant_method": "bitsandbytes", "load_in_4bit": True}
    for name, settings, found in (
        ("own", {}, (512, 320)),
        ("inside", {**unset, "text_config": inner}, (77, 999)),
        ("older", {**unset, "n_positions": 5}, (5, 320)),
        ("silent", unset, (None, 320)),
    ):
        path = copied(folder, tmp_path / name, **settings, quantization_config=quantized)
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
        (lambda f: (f / WEIGHTS).rename(f / "a.gguf"), "gguf_file='a.gguf'"),
        (lambda f: adapter_alone(f, base_model_name_or_path="org/its-base"), "org/its-base"),
    ],
)
def test_unusable_model_folder_is_refused(folder, tmp_path, spoil, named) -> None:
    spoiled = copied(folder, tmp_path / "model")
    BaseModel.open(str(spoiled), None)
    spoil(spoiled)
    with refused(UsageError, "--model", named):
        BaseModel.open(str(spoiled), None)


MODULE = "model.layers.0.self_attn.q_proj"  # 32 to 32 in tiny models
DOWN = "model.layers.1.mlp.down_proj"  # 64 to 32


def lora(*shapes: tuple[int, int], module: str = MODULE) -> dict[str, torch.Tensor]:
    names = (f"base_model.model.{module}.lora_{part}.weight" for part in "AB")
    return {name: torch.zeros(shape) for name, shape in zip(names, shapes, strict=False)}


def adapter(
    folder: Path,
    shapes: dict[str, tuple[int, int]] | None = None,
    others: dict[str, tuple[int, ...]] | None = None,
    **config: Any,
) -> Path:
    """An adapter of rank 4; shapes are ``(in, out)`` of each module, others of whole weights."""
    folder.mkdir(exist_ok=True)
    given = {"peft_type": "LORA", "r": 4, "base_model_name_or_path": "org/other", **config}
    (folder / "adapter_config.json").write_text(json.dumps(given))
    tensors = {}
    for module, (in_, out) in (shapes or {MODULE: (32, 32), DOWN: (64, 32)}).items():
        tensors |= lora((4, in_), (out, 4), module=module)
    for name, shape in (others or {}).items():
        tensors[f"base_model.model.{name}"] = torch.zeros(shape)
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("shapes", "config"),
    [
        ({"model.layers.0.named.otherwise": (7, 9), MODULE: (32, 32)}, {}),
        ({MODULE: (32, 48)}, {"fan_in_fan_out": True}),
        ({MODULE: (32, 32)}, {"r": 8, "rank_pattern": {"q_proj": 4}}),
    ],
)
def test_adapter_with_unknown_shapes_passes_the_check(folder, tmp_path, shapes, config):
    check_adapter(adapter(tmp_path, shapes, **config), folder)


def test_peft_adapter_and_base_without_local_weights_pass_the_check(
    folder: Path, tmp_path: Path
) -> None:
    check_adapter(make_adapter(folder, tmp_path / "peft"), folder)
    (tmp_path / "base").mkdir()
    check_adapter(adapter(tmp_path / "adapter", {MODULE: (7, 9)}), tmp_path / "base")


@pytest.mark.parametrize("shape", [(48, 32), (32, 48)])
def test_adapter_of_another_model_is_detected_by_its_shapes(folder, tmp_path, shape):
    named = (MODULE, str(list(shape[::-1])), "[32, 32]", "org/other")
    with refused(ValueError, *named) as caught:
        check_adapter(adapter(tmp_path, {DOWN: (64, 32), MODULE: shape}), folder)
    assert DOWN not in str(caught.value)


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (Path.unlink, "adapter_model.safetensors"),
        (lambda p: p.rename(p.with_suffix(".bin")), "adapter_model.bin"),
        (lambda p: p.write_bytes(p.read_bytes()[:40]), "adapter_model.safetensors"),
        (lambda p: p.write_text("version https://git-lfs.github.com/spec/v1\n"), "git lfs pull"),
        (lambda p: p.write_bytes(b""), "adapter_model.safetensors"),
        (lambda p: p.write_bytes((2).to_bytes(8, "little") + b"[]"), "adapter_model.safetensors"),
        (lambda p: save_file({"weight": torch.zeros(1)}, p), "lora_A"),
        (lambda p: save_file(lora((4, 32)), p), MODULE),
        (lambda p: save_file(lora((4, 32), (32, 5)), p), MODULE),
    ],
)
def test_invalid_adapter_weights_are_named_in_the_error(folder, tmp_path, spoil, named) -> None:
    spoilt = adapter(tmp_path)
    check_adapter(spoilt, folder)
    spoil(spoilt / "adapter_model.safetensors")
    with refused(ValueError, named):
        check_adapter(spoilt, folder)


EMBEDDINGS, HEAD = "model.embed_tokens", "lm_head"
DELTA = f"{EMBEDDINGS}.token_adapter.trainable_tokens_delta"


@pytest.mark.parametrize(
    ("others", "config", "named"),
    [
        ({f"{EMBEDDINGS}.weight": (322, 32)}, {}, (EMBEDDINGS, "[322, 32]", "[320, 32]")),
        ({f"{EMBEDDINGS}.base_layer.weight": (322, 32)}, {}, (EMBEDDINGS, "[322, 32]")),
        ({"model.norm.weight": (48,)}, {}, ("model.norm", "[48]")),
        ({f"{HEAD}.modules_to_save.weight": (322, 32)}, {}, (HEAD, "[322, 32]", "[320, 32]")),
        ({DELTA: (1, 32)}, {"trainable_token_indices": [321]}, ("321", "320 embeddings")),
        ({DELTA: (1, 32)}, {"trainable_token_indices": {"embed_tokens": [321]}}, ("321", "320")),
        ({f"{DOWN}.lora_B.bias": (32,)}, {}, (DOWN, "lora_bias")),
    ],
)
def test_non_lora_weights_of_an_adapter_are_compared_with_the_model(
    folder, tmp_path, others, config, named
):
    made = adapter(tmp_path, others=others, **config)
    for base in (folder, tied(folder, tmp_path / "tied")):
        grown = any("32" in word for word in named[1:])
        with refused(ValueError, *named, "merge_and_unload" if grown else ""):
            check_adapter(made, base)


def tied(folder: Path, to: Path) -> Path:
    """Copies the model with a head that has no weights of its own."""
    weights = load_file(copied(folder, to, tie_word_embeddings=True) / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, to / "model.safetensors")
    return to


@pytest.mark.parametrize(
    ("others", "config"),
    [
        ({f"{EMBEDDINGS}.weight": (320, 32)}, {"modules_to_save": ["embed_tokens"]}),
        ({DELTA: (1, 32)}, {"trainable_token_indices": [5]}),
        ({"model.norm.weight": (32,)}, {"modules_to_save": ["norm"]}),
    ],
)
def test_adapter_with_non_lora_weights_must_be_the_only_adapter(
    record, model, tmp_path, others, config
):
    made = str(adapter(tmp_path, others=others, **config))
    check_record(replace(record, adapter=made), model)
    for adapters in ((("a", made),), (("a", made), ("b", made))):
        with refused(UsageError, f"--adapters a={made}", next(iter(config)), "alone"):
            check_record(replace(record, adapters=adapters), model)


def test_adapter_with_a_copy_of_a_quantised_layer_is_refused(record, model, tmp_path: Path) -> None:
    made = str(adapter(tmp_path, others={f"{DOWN}.weight": (32, 64)}))
    check_record(replace(record, adapter=made), model)
    with refused(UsageError, f"--adapter {made}", DOWN, "quantization"):
        check_record(replace(record, adapter=made, quantization="int8"), model)


def test_trained_tokens_that_the_tokenizer_lacks_are_named_in_the_error(
    folder: Path, tmp_path: Path
) -> None:
    """The model has more embedding rows than the tokenizer has tokens."""
    base = copied(folder, tmp_path / "base", vocab_size=352)
    made = adapter(tmp_path / "adapter", others={DELTA: (1, 32)}, trainable_token_indices=[330])
    with refused(ValueError, "330", "320 tokens"):
        check_adapter(made, base)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (None, "adapter_config.json"),
        ("{", "adapter_config.json"),
        ("[]", "adapter_config.json"),
        ('{"peft_type": "LOHA", "r": 4}', "peft_type"),
        *((f'{{"peft_type": "LORA", "r": {r}}}', "r ") for r in ("0", "null", "8")),
    ],
)
def test_adapter_settings_that_cannot_be_served_are_named_in_the_error(
    folder, tmp_path, text, named
) -> None:
    path = adapter(tmp_path) / "adapter_config.json"
    path.unlink() if text is None else path.write_text(text)
    with refused(ValueError, named):
        check_adapter(tmp_path, folder)


@pytest.fixture(scope="module")
def drafter(folder: Path, model: BaseModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("drafter")
    copy = AutoModelForCausalLM.from_pretrained(folder)
    save_drafter(place, copy, DrafterCard("independent", model.tokenizer.fingerprint))
    return place


def with_card(drafter: Path, to: Path, **card: Any) -> Path:
    save_drafter(to, AutoModelForCausalLM.from_pretrained(drafter), DrafterCard(**card))
    return to


def check(model: BaseModel, drafter: Path | str, **how: Any) -> None:
    record = TaskRecord("t", str(model.folder), model.tokenizer.fingerprint, "say {input}\n")
    check_record(replace(record, neural=NeuralDrafting(str(drafter), **how)), model)


def test_drafter_of_the_target_of_the_record_passes_the_check(
    model: BaseModel, drafter: Path, tmp_path: Path
) -> None:
    check(model, drafter)
    check(model, drafter, vocabulary="ranked", ranked_tokens=model.tokenizer.vocab_size)
    own = target_fingerprint(model.folder)
    ours = model.tokenizer.fingerprint
    check(model, with_card(drafter, tmp_path / "e", kind="eagle", tokenizer=ours, target=own))


def test_drafter_of_another_tokenizer_or_target_is_refused_with_both_fingerprints(
    model: BaseModel, drafter: Path, tmp_path: Path
) -> None:
    ours, own = model.tokenizer.fingerprint, target_fingerprint(model.folder)
    other = with_card(drafter, tmp_path / "d", kind="independent", tokenizer="f" * 32)
    with refused(UsageError, f"--drafter {other}", "f" * 32, ours):
        check(model, other)
    other = with_card(drafter, tmp_path / "e", kind="eagle", tokenizer=ours, target="e" * 64)
    with refused(UsageError, "--drafter", "e" * 64, own):
        check(model, other)
    # A target without local weights is compared when it is served.
    without = shutil.ignore_patterns("*.safetensors")
    bare = shutil.copytree(model.folder, tmp_path / "bare", ignore=without)
    check(BaseModel.open(str(bare), None), other)


LOOK = """
import sys
from tasc_jobs.tasks.model_folders import BaseModel
from tasc_jobs.tasks.register import check_record
from tasc_store import NeuralDrafting, TaskRecord
model = BaseModel.open(sys.argv[1], None)
record = TaskRecord("t", sys.argv[1], model.tokenizer.fingerprint, "say {input}\\n")
check_record(record, model)
check_record(TaskRecord(**{**vars(record), "neural": NeuralDrafting(sys.argv[2])}), model)
heavy = {"torch", "transformers"} & set(sys.modules)
print(heavy, "tasc_engine.drafting.neural.card" in sys.modules)
"""


def test_drafter_is_checked_without_torch(model: BaseModel, drafter: Path, tmp_path: Path) -> None:
    ours, own = model.tokenizer.fingerprint, target_fingerprint(model.folder)
    head = with_card(drafter, tmp_path / "e", kind="eagle", tokenizer=ours, target=own)
    command = [sys.executable, "-c", LOOK, str(model.folder), str(head)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "set() True\n"


def test_missing_drafter_and_too_many_ranked_tokens_are_named_in_the_error(model, drafter) -> None:
    for place, named in ((model.folder, CARD), ("./nowhere", "./nowhere")):
        with refused(UsageError, "--drafter", named, "`tasc train-drafter`"):
            check(model, place)
    size = model.tokenizer.vocab_size
    with refused(UsageError, "--ranked-tokens", str(size)):
        check(model, drafter, vocabulary="recent+ranked")


@pytest.mark.parametrize("tree", [(16, 4, MAX_NODES), (2, 32, 1), (1, 32, MAX_NODES)])
def test_draft_tree_is_limited_to_the_size_of_a_step(tree: tuple[int, int, int]) -> None:
    own = NeuralDrafting("d", "neural", "full", 1, *tree)
    assert (own.depth, own.width, own.nodes) == tree
    depth, width, nodes = tree
    for over in ((17, 1, nodes), (1, 33, nodes), (1, 1, MAX_NODES + 1), (17, width, depth)):
        with refused(ValueError, "is"):
            NeuralDrafting("d", "neural", "full", 1, *over)
