"""Tests that linear layers in CPU layouts, with and without adapters, equal ``linear``."""

import logging
from typing import Any

import pytest
import torch
from adapter_folders import relative
from hypothesis import example, given, settings
from hypothesis import strategies as st
from low_rank_cases import by_definition, cases, numbers, weights_of
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from tasc_engine.lora.low_rank import CompiledTokens, MaskedTokens
from tasc_engine.model import linears
from tasc_engine.model.linears import Linear, lay_out_linears

# bfloat16 has 8 bits: the result is rounded once, on either way.
CLOSE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2**-7}
BIASES = [(False, False, False), (True, True, True), (True, False, True), (False,), (True,)]


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("biased", BIASES)
@pytest.mark.parametrize("tokens", [0, 1, 9])
def test_joined_layers_give_the_outputs_of_the_separate_layers(
    dtype, biased: tuple[bool, ...], tokens
) -> None:
    """The case of a single layer is large enough to gain from the CPU layout in float32."""
    torch.manual_seed(0)
    size, widths = (48, (32, 16, 8)) if len(biased) > 1 else (1024, (1024,))
    layers = [
        nn.Linear(size, width, has_bias, dtype=dtype).requires_grad_(False)
        for width, has_bias in zip(widths, biased, strict=True)
    ]
    x, joined = torch.randn(tokens, size).to(dtype), Linear.joining(*layers)
    assert torch.equal(joined.weight, torch.cat([layer.weight for layer in layers]))
    expected = torch.cat([layer(x) for layer in layers], -1)
    assert relative(joined(x), expected) <= CLOSE[dtype]
    out = torch.empty_like(expected)
    assert joined(x, out) is out
    assert relative(out, expected) <= CLOSE[dtype]
    if len(layers) > 1:  # the separate layers need no memory of their own
        assert len({layer.weight.untyped_storage().data_ptr() for layer in layers}) == 1


def test_missing_operation_falls_back_to_linear_with_one_warning(monkeypatch, caplog) -> None:
    monkeypatch.setattr(linears, "_onednn", object())
    monkeypatch.setattr(linears, "_gains", lambda weight: True)
    monkeypatch.setattr(linears, "_without_layout", set())
    weight, x = torch.randn(8, 4), torch.randn(2, 4)
    with caplog.at_level(logging.INFO, "tasc_engine.model.linears"):
        made = [Linear(weight) for _ in range(3)]
    assert len(caplog.records) == 1
    for linear in made:
        assert not linear.laid_out
        assert torch.equal(linear(x), functional.linear(x, weight))


def tied_model(dtype: torch.dtype) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(dtype).eval()


@torch.inference_mode()
def test_laying_out_a_tied_model_keeps_its_logits() -> None:
    model = tied_model(torch.bfloat16)
    ids, embedding = torch.arange(12)[None], model.get_input_embeddings().weight.clone()
    expected = model(ids).logits
    lay_out_linears(model)
    assert relative(model(ids).logits, expected) < 0.02
    assert torch.equal(model.get_input_embeddings().weight, embedding)
    if torch.backends.mkldnn.is_available() and Linear(embedding).laid_out:
        assert not [m for m in model.modules() if type(m) is nn.Linear]
        assert torch.equal(model.lm_head.weight, embedding)
    wide = tied_model(torch.float64)  # which gains nothing
    before = list(wide.modules())
    lay_out_linears(wide)
    assert list(wide.modules()) == before


@torch.inference_mode()
def test_laying_out_linears_preserves_subclasses_and_shared_layers() -> None:
    class Other(nn.Linear):
        pass

    shared = nn.Linear(16, 16, dtype=torch.bfloat16)
    model = nn.Sequential(shared, nn.Sequential(shared), Other(16, 16, dtype=torch.bfloat16))
    x = torch.randn(2, 3, 16).bfloat16()
    expected = model(x)
    lay_out_linears(model)
    assert type(model[2]) is Other
    assert model[0] is model[1][0]
    assert relative(model(x), expected) < CLOSE[torch.bfloat16]


# Compiled code sums in float32 and rounds once; torch rounds what lies between too.
CLOSE_ADDED = {**CLOSE, torch.float64: 1e-14, torch.float32: 1e-6, torch.float16: 2**-10}
WAYS: dict[str, Any] = {"compiled": CompiledTokens, "torch": lambda adapters: MaskedTokens()}


@pytest.mark.parametrize("dtype", CLOSE_ADDED)
@pytest.mark.parametrize("way", WAYS)
@settings(deadline=None, max_examples=60)
@given(case=cases(), kept=st.sampled_from([torch.float16, torch.bfloat16, torch.float32, None]))
@example(case=([[16, 16], [0, 16]], 64, [64, 32], [1, 2, 1, 2, 1, 2, 1, 2, 0]), kept=None)
@example(case=([[4, 2], [3, 0]], 20, [32, 7], [2, 1, 0, 1, 1, 2, 1]), kept=torch.float16)
@example(case=([[3]], 33, [33], [1]), kept=torch.bfloat16)
def test_low_rank_product_of_each_token_equals_its_definition(
    way: str, dtype, case: Any, kept
) -> None:
    """Weights may have another dtype than inputs. Compiled code reads 16-bit weights directly."""
    ranks, size, widths, own = case
    weights = weights_of(ranks, size, widths, kept or dtype)
    x, y = numbers(len(own), size, dtype=dtype), numbers(len(own), sum(widths), dtype=dtype)
    tokens, expected = WAYS[way](len(ranks)), by_definition(x, y, weights, widths, own)
    add = tokens.addition(weights, widths, torch.zeros(1, dtype=dtype))
    tokens.begin(torch.tensor(own))
    found = y.clone()
    add(x[None], found[None])
    summed = by_definition(x, y, weights, widths, own, size=True)
    assert float((found - expected).norm()) <= CLOSE_ADDED[dtype] * float(summed.norm())
    none = torch.tensor(own) == 0
    assert torch.equal(found[none], y[none])


@pytest.mark.parametrize("way", WAYS)
def test_adapter_numbers_of_the_last_forward_are_forgotten(way: str) -> None:
    """Layers share the arrays made once per forward pass, also if their ranks differ."""
    tokens, layers = WAYS[way](2), []
    for ranks in ([[4], [4]], [[4], [4]], [[1], [0]]):
        weights = weights_of(ranks, 8, [8], torch.float64)
        layers.append((weights, tokens.addition(weights, [8], torch.zeros(1).double())))
    x, y = numbers(3, 8, dtype=torch.float64), torch.zeros(3, 8, dtype=torch.float64)
    for own in ([1, 2, 0], [0, 0, 0], [2, 2, 1]):
        tokens.begin(torch.tensor(own))
        for weights, add in layers:
            found = y.clone()
            add(x, found)
            torch.testing.assert_close(found, by_definition(x, y, weights, [8], own))


@pytest.mark.parametrize("dtype", CLOSE_ADDED)
@settings(deadline=None, max_examples=40)
@given(case=cases())
def test_compiled_low_rank_results_do_not_depend_on_other_tokens(dtype, case) -> None:
    ranks, size, widths, own = case
    weights = weights_of(ranks, size, widths, dtype)
    x, y = numbers(len(own), size, dtype=dtype), numbers(len(own), sum(widths), dtype=dtype)
    tokens = CompiledTokens(len(ranks))
    add = tokens.addition(weights, widths, torch.zeros(1, dtype=dtype))
    together, alone = y.clone(), y.clone()
    tokens.begin(torch.tensor(own))
    add(x, together)
    for t, number in enumerate(own):
        tokens.begin(torch.tensor([number]))
        add(x[t : t + 1], alone[t : t + 1])
    assert torch.equal(together, alone)
