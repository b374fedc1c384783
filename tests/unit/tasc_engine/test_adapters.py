"""Rows of several adapters, and of none, share a forward; each gets what its merged model says."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_folders import (
    ROWS,
    SPACE,
    feeds,
    logits_by_transformers,
    logits_of,
    make_adapter,
    merged_logits,
    of_rows,
    relative,
)
from safetensors.torch import load_file, save_file
from torch import nn

from paired import paired
from tasc_engine import adapters as adapters_module
from tasc_engine import target as target_module
from tasc_engine.adapters import AdaptedModule
from tasc_engine.config import EngineConfig
from tasc_engine.errors import UnsupportedModel
from tasc_engine.gpu.graphs import GraphedForward, Limits
from tasc_engine.layout import lay_out
from tasc_engine.loading import ModelSource
from tasc_engine.low_rank import MaskedTokens
from tasc_engine.target import Target
from tasc_jobs.demo.tasks import HERE, MODEL, TASKS
from tiny import make_folder

# Norm of the difference over that of the logits. What is added is rounded by itself instead of with
# the weights it would be merged into: measured, 8e-16, 6e-7 and 0.012.
CLOSE = {"float64": 1e-12, "float32": 5e-6, "bfloat16": 0.03}
CONFIG = EngineConfig(rows=len(ROWS), max_model_len=SPACE, prefill_chunk=16)
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
NEOX = ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"]
UP = "model.layers.0.mlp.up_proj"
ARCHITECTURES = ("llama", "qwen2", "gpt_neox")
Folders = tuple[Path, tuple[Path, Path]]


def make_two(folder: Path, architecture: str, every: list[str], some: list[str]) -> Folders:
    """One of many ranks in all layers, one of an odd rank in some."""
    base = make_folder(folder / "base", architecture)
    first = make_adapter(
        base, folder / "first", 1, r=4, lora_alpha=6, target_modules=every,
        rank_pattern={every[0]: 17, f"layers.1.*{every[-1]}": 2}, alpha_pattern={every[1]: 11},
    )  # fmt: skip
    second = make_adapter(
        base, folder / "second", 2, r=3, lora_alpha=5, target_modules=some, use_rslora=True,
        layers_to_transform=[0],
    )  # fmt: skip
    return base, (first, second)


@pytest.fixture(scope="module")
def folders_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Folders]:
    @cache
    def of(architecture: str) -> Folders:
        folder, neox = tmp_path_factory.mktemp(architecture), architecture == "gpt_neox"
        every, some = (NEOX, NEOX[:2]) if neox else (ALL, ["k_proj", "up_proj"])
        return make_two(folder, architecture, every, some)

    return of


@pytest.fixture(params=ARCHITECTURES)
def folders(request: Any, folders_of: Callable[[str], Folders]) -> Folders:
    return folders_of(request.param)


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A base, and an adapter that changes one layer."""
    base = make_folder(tmp_path_factory.mktemp("base"))
    return base, make_adapter(
        base, base / "adapter", r=4, target_modules=["up_proj"], layers_to_transform=[0]
    )


def load(folders: Folders, dtype: str = "float64", **source: Any) -> Target:
    base, (first, second) = folders
    named = (("first", first), ("second", second))
    return Target.load(ModelSource(base, dtype=dtype, adapters=named, **source), CONFIG)


def sources(folders: Folders, dtype: str) -> list[ModelSource]:
    """The base, and each adapter merged."""
    return [ModelSource(folders[0], adapter, dtype) for adapter in (None, *folders[1])]


def through_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target_module, "lean", lambda *args: None)


def by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters_module, "CompiledTokens", lambda adapters: MaskedTokens())


WAYS = {
    "as it is": (),
    "modules": (through_modules,),
    "torch": (by_torch,),
    "both": (through_modules, by_torch),
}


@pytest.mark.parametrize(("architecture", "way", "dtype"), paired(ARCHITECTURES, WAYS, by=CLOSE))
def test_each_row_gets_what_its_merged_model_says(
    folders_of: Any, architecture: str, dtype: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for change in WAYS[way]:
        change(monkeypatch)
    assert_merged_alike(load(folders_of(architecture), dtype), folders_of(architecture), dtype)


def assert_merged_alike(target: Target, folders: Folders, dtype: str) -> None:
    merged = [Target.load(source, CONFIG) for source in sources(folders, dtype)]
    assert relative(logits_of(target, ROWS), merged_logits(merged, ROWS)) < CLOSE[dtype]


def test_each_row_gets_what_transformers_says_of_its_merged_model(folders: Folders) -> None:
    """Whose norms and turns are float32 in any dtype."""
    expected = logits_by_transformers(sources(folders, "float64"), ROWS)
    assert relative(logits_of(load(folders), ROWS), expected) < 1e-6


def test_adapters_change_what_rows_say_and_none_changes_nothing(folders: Folders) -> None:
    """Positive control of the test above."""
    target = load(folders)
    plain = [(0, *part) for _, *part in ROWS]
    base = Target.load(ModelSource(folders[0], dtype="float64"), CONFIG)
    untouched = logits_of(target, plain)
    assert torch.equal(untouched, logits_of(base, plain))
    for number in (1, 2):
        rows = [(number, *part) for _, *part in ROWS]
        assert relative(logits_of(target, rows), untouched) > 0.01


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_a_row_gets_the_same_whichever_adapters_its_neighbours_use(
    folders: Folders, dtype: str
) -> None:
    """To the last bit: the shapes of products are the same."""
    target, parts = load(folders, dtype), [part for _, *part in ROWS]
    for own in (0, 1, 2):
        mixed = [
            (number, *part) for number, part in zip((1, own, 2, 0, 2, 1, 0), parts, strict=True)
        ]
        alike = [(own, *part) for part in parts]
        found = [of_rows(logits_of(target, rows), rows, [1]) for rows in (mixed, alike)]
        assert torch.equal(*found)


class Again:
    """A recorder that runs again what it is told to record."""

    def record(self, run: Any) -> Any:
        run()
        return run

    def wait(self) -> None:
        pass


@torch.inference_mode()
def test_a_padded_step_of_a_graph_carries_them(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recorded while nobody has an adapter, replayed with rows that have."""
    by_torch(monkeypatch)
    target, rows = load(folders), [(n, a + b - 1, 1, tree) for n, a, b, tree in ROWS]
    cache = target.cache
    expected = logits_of(target, rows)
    limits = Limits(rows=9, tokens=40, moves=4, scratch=cache.places)
    graphs = GraphedForward(target._forward, cache, limits, target.device, Again())
    step = lay_out(feeds(rows)[1])
    graphs.warm_up()
    for _ in range(2):
        found = graphs.logits(step)
        assert found is not None
        assert relative(found, expected) < CLOSE["float64"]


def test_adapters_have_numbers_by_their_names(folders: Folders) -> None:
    target = load(folders)
    assert target.adapters == ("first", "second")
    assert [target.adapter_number(name) for name in (None, "first", "second")] == [0, 1, 2]
    with pytest.raises(ValueError, match="'third'; the target has first, second"):
        target.adapter_number("third")
    bare = Target.load(ModelSource(folders[0]), CONFIG)
    assert bare.adapters == ()
    with pytest.raises(ValueError, match="'first'; the target has none"):
        bare.adapter_number("first")


def test_a_layer_that_the_model_has_not_is_refused(up: Any, tmp_path: Path) -> None:
    """An adapter of another architecture."""
    other = make_folder(tmp_path / "other", "gpt_neox")
    expected = r"adapter a changes model\.layers\.0\.mlp\.up_proj, which GPTNeoX.* does not have"
    with pytest.raises(UnsupportedModel, match=expected):
        Target.load(ModelSource(other, adapters=(("a", up[1]),)), CONFIG)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("up_proj", "down_proj", r".*layers\.0\.mlp\.down_proj of \[64, 32\].* has \[32, 64\]"),
        (UP, "lm_head", "changes lm_head, of .*embeddings.*merge it"),
        (UP, "model.embed_tokens", "changes model.embed_tokens, of .*embeddings.*merge it"),
        (UP, "model.layers.0.mlp", "changes model.layers.0.mlp, of .*MLP.*merge it"),
    ],
)
def test_what_is_no_linear_layer_of_its_shape_inside_the_model_is_refused(
    up: Any, tmp_path: Path, old: str, new: str, said: str
) -> None:
    rename(up[1], tmp_path / "renamed", old, new)
    with pytest.raises(UnsupportedModel, match=f"adapter a {said}"):
        Target.load(ModelSource(up[0], adapters=(("a", tmp_path / "renamed"),)), CONFIG)


def rename(path: Path, to: Path, old: str, new: str) -> None:
    """A copy of an adapter whose weights have other names."""
    to.mkdir()
    (to / "adapter_config.json").write_text((path / "adapter_config.json").read_text())
    tensors = load_file(path / "adapter_model.safetensors")
    renamed = {key.replace(old, new): tensor for key, tensor in tensors.items()}
    assert renamed.keys() != tensors.keys()
    save_file(renamed, to / "adapter_model.safetensors")


def test_a_layer_that_is_given_some_tokens_only_is_refused() -> None:
    """A layer of experts: whose tokens it is given is not known."""
    tokens = MaskedTokens()
    tokens.begin(torch.zeros(6, dtype=torch.int64))
    layer = AdaptedModule(nn.Linear(4, 4), lambda x, y: None, tokens, "experts.0")
    assert layer(torch.ones(1, 6, 4)).shape == (1, 6, 4)
    with pytest.raises(UnsupportedModel, match=r"experts\.0 is given 3 of a step's 6 tokens"):
        layer(torch.ones(3, 4))


@pytest.mark.parametrize(
    "dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow("compiles for seconds"))]
)
def test_the_shipped_adapters_in_one_batch_say_what_each_merged_says(dtype: str) -> None:
    folders = [HERE / "adapters" / task for task in TASKS]
    named = tuple(zip(TASKS, folders, strict=True))
    target = Target.load(ModelSource(MODEL, dtype=dtype, adapters=named), CONFIG)
    assert_merged_alike(target, (MODEL, (folders[0], folders[1])), dtype)
