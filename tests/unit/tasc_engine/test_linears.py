"""Linear layers laid out for the CPU give what ``linear`` gives."""

import logging

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from tasc_engine import linears
from tasc_engine.linears import Linear, lay_out_linears

# bfloat16 has 8 bits: the result is rounded once, on either way.
CLOSE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2**-7}
BIASES = [(False, False, False), (True, True, True), (True, False, True)]


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    return float((found - expected).double().norm() / expected.double().norm())


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("biased", BIASES)
@pytest.mark.parametrize("tokens", [1, 9])
def test_joined_layers_give_each_layers_output(
    dtype: torch.dtype, biased: tuple[bool, ...], tokens: int
) -> None:
    torch.manual_seed(0)
    weights = [torch.randn(out, 48).to(dtype) for out in (32, 16, 8)]
    biases = [
        torch.randn(len(w)).to(dtype) if b else None for w, b in zip(weights, biased, strict=True)
    ]
    x = torch.randn(tokens, 48).to(dtype)
    expected = [functional.linear(x, w, b) for w, b in zip(weights, biases, strict=True)]
    assert relative(Linear.of(weights, biases)(x), torch.cat(expected, -1)) < CLOSE[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biased", [False, True])
def test_a_large_layer_alone_gives_its_output(dtype: torch.dtype, biased: bool) -> None:
    torch.manual_seed(0)
    weight = torch.randn(1024, 1024).to(dtype)
    bias = torch.randn(1024).to(dtype) if biased else None
    x = torch.randn(5, 1024).to(dtype)
    expected = functional.linear(x, weight, bias)
    assert relative(Linear.of([weight], [bias])(x), expected) < CLOSE[dtype]


@pytest.mark.parametrize("dtype", CLOSE)
def test_no_tokens_give_no_output(dtype: torch.dtype) -> None:
    assert Linear(torch.ones(3, 4, dtype=dtype))(torch.ones(0, 4, dtype=dtype)).shape == (0, 3)


def test_the_dense_weight_can_be_had_back() -> None:
    weight = torch.randn(24, 40).bfloat16()
    assert torch.equal(Linear(weight).weight, weight)


def test_without_the_operation_it_is_linear_and_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(linears, "_onednn", object())
    monkeypatch.setattr(linears, "_gains", lambda weight: True)
    monkeypatch.setattr(linears, "_without_layout", set())
    weight, x = torch.randn(8, 4), torch.randn(2, 4)
    with caplog.at_level(logging.INFO, "tasc_engine.linears"):
        made = [Linear(weight) for _ in range(3)]
    assert len(caplog.records) == 1
    for linear in made:
        assert not linear.laid_out
        assert torch.equal(linear(x), functional.linear(x, weight))


def tied_model(dtype: torch.dtype) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).to(dtype).eval()


@torch.inference_mode()
def test_a_tied_model_laid_out_keeps_its_logits_and_embedding() -> None:
    model = tied_model(torch.bfloat16)
    ids, embedding = torch.arange(12)[None], model.get_input_embeddings().weight.clone()
    expected = model(ids).logits
    lay_out_linears(model)
    assert relative(model(ids).logits, expected) < 0.02
    assert torch.equal(model.get_input_embeddings().weight, embedding)
    if torch.backends.mkldnn.is_available() and Linear(embedding).laid_out:
        assert not [m for m in model.modules() if type(m) is nn.Linear]
        assert torch.equal(model.lm_head.weight, embedding)


def test_where_nothing_gains_nothing_is_replaced() -> None:
    model = tied_model(torch.float64)
    before = list(model.modules())
    lay_out_linears(model)
    assert list(model.modules()) == before


@torch.inference_mode()
def test_a_subclass_stays_and_a_shared_layer_stays_shared() -> None:
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
