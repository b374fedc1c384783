"""Linear layers whose weights are laid out once for the CPU; layers with the same input are joined.

oneDNN lays a weight out for its kernels at each call of ``linear``. For the few tokens of a
decoding step, that takes longer than the product itself. Layers that bitsandbytes quantised keep
their own code. A `CompiledLinear` computes products by this project's own kernels.
"""

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from tasc_engine.errors import UnsupportedModel
from tasc_engine.kernels.cpu.compiling import Size, bits
from tasc_engine.kernels.cpu.decoder import Rounded, Sums, Weight, project
from tasc_engine.kernels.cpu.products import (
    MOST,
    MOST_INPUTS,
    FloatWeight,
    Int8Weight,
    instructions,
    room_for_sums,
)
from tasc_engine.kernels.cpu.team import Team

logger = logging.getLogger(__name__)

# Number of tokens for which the layout is chosen, as in a usual step. Measurements show that the
# layout also suits 256 tokens.
_TOKENS = 8
# In float32, oneDNN is up to twice as fast as MKL with 4 to 64 tokens, but slower with a single
# token and for weights that stay in a core's cache. bfloat16 gains at every size.
_FLOAT32_FROM = 1 << 20

_onednn = torch.ops.mkldnn
# The overload is fetched once, since its lookup takes a tenth of a small product's time.
_product: Any = getattr(_onednn._linear_pointwise, "default", None)
_without_layout: set[str] = set()  # the reasons that have been logged


class Linear(nn.Module):
    """Computes ``x @ weight.T + bias``; lays out the weight once if the CPU gains from the layout.

    For inference only: the layer has no parameters and calls no hooks.

    Args:
        weight: ``[out, in]``; not kept if it is laid out.
        bias: ``[out]`` or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bias = None if bias is None else bias.detach()
        packed = _lay_out(weight.detach(), self.bias) if _gains(weight) else None
        self.laid_out = packed is not None
        self._weight = weight.detach() if packed is None else packed

    @classmethod
    def joining(cls, *layers: nn.Linear) -> "Linear":
        """Join layers that read the same input; their outputs are concatenated.

        The weights of several layers become views of the joined weight, so that a GPU does not hold
        a model twice while it is loaded.

        Args:
            layers: Layers of one dtype and device; if some have a bias, the others get zeros.
        """
        whole, bias = _concatenated(layers)
        if len(layers) > 1:
            sizes = [layer.out_features for layer in layers]
            for layer, part in zip(layers, whole.split(sizes), strict=True):
                layer.weight.data = part
        return cls(whole, bias)

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Maps ``[..., in]`` to ``[..., out]``; both have the weight's dtype.

        Args:
            out: Receives the result for an ``x`` of two dimensions; None for a new tensor.
        """
        if self.laid_out:
            made: Tensor = _product(x, self._weight, self.bias, "none", [], "")
            return made if out is None else out.copy_(made)
        if out is None:
            return functional.linear(x, self._weight, self.bias)
        if self.bias is None:
            return torch.mm(x, self._weight.T, out=out)
        return torch.addmm(self.bias, x, self._weight.T, out=out)

    @property
    def weight(self) -> Tensor:
        """The dense ``[out, in]`` weight; each access makes a copy if the weight is laid out."""
        return self._weight.to_dense() if self.laid_out else self._weight


class CompiledLinear(nn.Module):
    """Computes ``x @ weight.T + bias`` by compiled code, on a CPU.

    On one machine, the bits of a row's result depend neither on other rows nor on the number of
    threads. Products of int8 numbers are summed exactly, as integers; the sum is rounded once and
    scaled in float32. Other sums are of float32.

    Args:
        packed: The weights of one product, or those of every layer.
        layer: Which of the weights.
        team: The threads; None for a team of this product.
    """

    def __init__(self, packed: Weight, layer: int = 0, team: Team | None = None) -> None:
        super().__init__()
        self.packed, self._layer, self.team = packed, layer, team or Team()
        self.out_features, self.in_features = packed.outputs, packed.inputs
        self._rounds = isinstance(packed, Int8Weight)

    @classmethod
    def rounding(cls, *layers: nn.Linear) -> "CompiledLinear":
        """Rounds float32 weights to int8, by output, and inputs by row.

        Args:
            layers: Layers that read the same input; their outputs are concatenated.
        """
        return cls(int8_joined(*layers))

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Maps ``[..., in]`` to ``[..., out]``: float32 for int8 weights, else of their dtype.

        Args:
            out: Receives the result for an ``x`` of two dimensions; None for a new tensor.
        """
        assert x.shape[-1] == self.in_features, f"x has {x.shape[-1]}, not {self.in_features}"
        rows = x.numel() // self.in_features
        made = x.new_empty((*x.shape[:-1], self.out_features)) if out is None else out
        memory = Rounded.of(rows * self._rounds, self.in_features)
        self.team.run(
            project, bits(x.contiguous()), rows, self.packed, self._layer, memory, fastest(),
            bits(made), own=lambda part, parts: Sums(room_for_sums()),
        )  # fmt: skip
        return made

    @property
    def weight(self) -> Tensor:
        """The dense ``[out, in]`` weight of a single layer; each access makes a copy."""
        whole = self.packed.unpacked()
        if isinstance(self.packed, Int8Weight):
            by_output = self.packed.scales[: self.out_features, None]
            return torch.from_numpy(whole.astype(np.float32) * by_output)
        return torch.from_numpy(whole).view(
            torch.bfloat16 if whole.itemsize == 2 else torch.float32
        )


@cache
def fastest() -> Size:
    """The kind of this processor's fastest instructions."""
    return Size(instructions()[-1])


def int8_joined(*layers: nn.Linear) -> Int8Weight:
    """Rounds the weights of layers that read the same input; their outputs are concatenated.

    Raises:
        UnsupportedModel: There are so many inputs that int32 might not hold a sum.
    """
    weight, bias = _concatenated(layers)
    if weight.shape[1] > MOST_INPUTS:
        raise UnsupportedModel(
            f"int8-dynamic is asked for, and a weight has {weight.shape[1]} inputs, more than "
            f"{MOST_INPUTS}; use dtype bfloat16 or another quantization"
        )
    scales = weight.abs().amax(1) / MOST
    rounded = (weight / scales.where(scales > 0, 1)[:, None]).round().to(torch.int8)
    return Int8Weight.of(rounded.numpy(), scales.numpy(), None if bias is None else bias.numpy())


def packed(layers: Sequence[Sequence[nn.Linear]]) -> FloatWeight:
    """Packs the float32 or bfloat16 weights of one product in each layer.

    Args:
        layers: For each layer, the linear layers whose outputs are concatenated.
    """

    def each() -> Iterator[tuple[NDArray[Any], NDArray[np.float32] | None]]:
        for own in layers:
            weight, bias = _concatenated(own)
            yield (
                bits(weight.contiguous()).reshape(weight.shape),
                (None if bias is None else bias.float().numpy()),
            )

    return FloatWeight.of(len(layers), each())


def _concatenated(layers: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """The joined weights and biases; missing biases are zeros, and None if all are missing."""
    weights = [each.weight.detach() for each in layers]
    weight = weights[0] if len(weights) == 1 else torch.cat(weights)
    if all(each.bias is None for each in layers):
        return weight, None
    biases = [
        w.new_zeros(len(w)) if each.bias is None else each.bias.detach()
        for w, each in zip(weights, layers, strict=True)
    ]
    return weight, torch.cat(biases)


def is_quantised(layer: Any) -> bool:
    """Whether a linear layer is quantised by bitsandbytes, also if peft adds a LoRA to its output.

    The forward of such a layer depends on shapes only. 8-bit layers with an outlier threshold do
    not count: they look for outliers on the host, and a row's result depends on other rows.
    """
    own = getattr(layer, "base_layer", layer)
    if (bitsandbytes := sys.modules.get("bitsandbytes")) is None:
        return False
    four: bool = isinstance(own, bitsandbytes.nn.Linear4bit)
    eight = isinstance(own, bitsandbytes.nn.Linear8bitLt)
    return four or (eight and own.state.threshold == 0)


def product_of(*layers: Any) -> Callable[[Tensor], Tensor]:
    """The product of layers that read the same input; their outputs are concatenated.

    Plain layers are joined. If one is quantised, each is called by itself: a weight that was
    quantised in blocks cannot be joined with another without rounding again.

    Args:
        layers: Layers with one input dtype and device, in evaluation mode.
    """
    if not any(map(is_quantised, layers)):
        return Linear.joining(*layers)
    each = [own if is_quantised(own) else Linear(own.weight, own.bias) for own in layers]
    width = sum(layer.out_features for layer in layers)

    def product(x: Tensor) -> Tensor:
        if not len(x):  # bitsandbytes gives some of these results a wrong shape
            return x.new_empty((0, width))
        outputs = [layer(x) for layer in each]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)

    return product


def lay_out_linears(model: nn.Module) -> None:
    """Replace each plain ``nn.Linear`` inside ``model`` that gains from a layout, in place.

    Subclasses, such as quantised layers, are left unchanged. The dense weight of a replaced layer
    is freed unless another module shares it, such as an embedding tied to the LM head.
    """
    _replace_linears(
        model, lambda layer: Linear(layer.weight, layer.bias) if _gains(layer.weight) else None
    )


def quantise_linears(model: Any, head: bool = True) -> None:
    """Replace each plain ``nn.Linear`` inside ``model`` with one of int8 numbers, in place.

    Args:
        head: Whether this is done to the LM head, too.
    """
    kept = None if head else model.lm_head
    _replace_linears(model, lambda layer: None if layer is kept else CompiledLinear.rounding(layer))


def _replace_linears(model: nn.Module, make: Callable[[nn.Linear], nn.Module | None]) -> None:
    replaced: dict[nn.Module, nn.Module | None] = {}  # a layer used in two places is made once
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if type(child) is not nn.Linear:
                continue
            if child not in replaced:
                replaced[child] = make(child)
            if (made := replaced[child]) is not None:
                setattr(parent, name, made)


def _gains(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.float32:
        return weight.numel() >= _FLOAT32_FROM
    return weight.dtype == torch.bfloat16


def _lay_out(weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """The weight in oneDNN's layout, tested once; None if torch or the CPU does not support it."""
    try:
        with torch.no_grad():
            packed: Tensor = _onednn._reorder_linear_weight(weight.contiguous(), _TOKENS)
            trial = weight.new_zeros(1, weight.shape[1])
            _product(trial, packed, bias, "none", [], "")
    except (AttributeError, RuntimeError, TypeError) as error:
        reason = str(error).partition("\n")[0]
        if reason not in _without_layout:
            _without_layout.add(reason)
            logger.info("weights cannot be laid out for the CPU, so steps are slower: %s", reason)
        return None
    return packed
