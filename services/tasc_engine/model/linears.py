"""Linear layers whose weights are laid out once for the CPU; layers with the same input are joined.

oneDNN lays a weight out for its kernels at each call of ``linear``. For the few tokens of a
decoding step, that takes longer than the product itself. Quantised layers keep their own code.
"""

import logging
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

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
        weights, biases = [each.weight for each in layers], [each.bias for each in layers]
        if len(layers) == 1:
            return cls(weights[0], biases[0])
        with torch.no_grad():
            whole, bias = torch.cat(weights), None
            if any(b is not None for b in biases):
                pairs = zip(weights, biases, strict=True)
                bias = torch.cat([w.new_zeros(len(w)) if b is None else b for w, b in pairs])
            for layer, part in zip(layers, whole.split([len(w) for w in weights]), strict=True):
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
    replaced: dict[nn.Module, nn.Module] = {}  # a layer used in two places is laid out once
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if type(child) is nn.Linear and _gains(child.weight):
                if child not in replaced:
                    replaced[child] = Linear(child.weight, child.bias)
                setattr(parent, name, replaced[child])


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
