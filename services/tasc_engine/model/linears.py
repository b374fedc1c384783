"""Linear layers whose weight is laid out once for the CPU, several of one input as one.

oneDNN lays a weight out for its kernels at each call of ``linear``; for the few tokens of a
decoding step that takes longer than the product itself. It knows weights, not what they are for.
"""

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

logger = logging.getLogger(__name__)

# Tokens the layout is chosen for: those of a usual step. Measured, it serves 256 as well.
_TOKENS = 8
# In float32 oneDNN takes up to half the time of MKL at 4 to 64 tokens, but more at a single one
# and for weights that stay in a core's cache; bfloat16 gains at every size.
_FLOAT32_FROM = 1 << 20

_onednn = torch.ops.mkldnn
# The overload by its name: looking for it takes a tenth of a small product's time.
_product: Any = getattr(_onednn._linear_pointwise, "default", None)
_without_layout: set[str] = set()  # reasons that have been logged


class Linear:
    """``x @ weight.T + bias``; on a CPU that gains from it, over a weight laid out once.

    Args:
        weight: ``[out, in]``; not kept where it is laid out.
        bias: ``[out]`` or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.in_features = weight.shape[1]
        self.out_features = weight.shape[0]
        self._bias = None if bias is None else bias.detach()
        packed = _lay_out(weight.detach(), self._bias) if _gains(weight) else None
        self.laid_out = packed is not None
        self._weight = weight.detach() if packed is None else packed

    @classmethod
    def of(cls, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> "Linear":
        """Join layers that read the same input; their outputs lie one behind the other.

        Args:
            weights: ``[out_i, in]`` each, of one dtype and device.
            biases: ``[out_i]`` or None for each; if some have one, the others get zeros.
        """
        if len(weights) == 1:
            return cls(weights[0], biases[0])
        with torch.no_grad():
            return cls(torch.cat(list(weights)), _joined(weights, biases))

    @classmethod
    def joining(cls, *layers: nn.Linear) -> "Linear":
        """:meth:`of` the weights and biases of ``layers``."""
        return cls.of([layer.weight for layer in layers], [layer.bias for layer in layers])

    def __call__(self, x: Tensor) -> Tensor:
        """``[..., in]`` to a new ``[..., out]``, of the weight's dtype both."""
        if self.laid_out:
            out: Tensor = _product(x, self._weight, self._bias, "none", [], "")
            return out
        return functional.linear(x, self._weight, self._bias)

    @property
    def weight(self) -> Tensor:
        """The dense ``[out, in]`` weight; a copy each time where it is laid out."""
        return self._weight.to_dense() if self.laid_out else self._weight


def lay_out_linears(model: nn.Module) -> None:
    """Replace each plain ``nn.Linear`` inside ``model`` that gains from it, in place.

    Subclasses (quantised layers, say) stay as they are. The dense weight goes with the layer
    that is replaced, unless someone else has it: an embedding tied to the LM head keeps it.
    """
    replaced: dict[nn.Module, nn.Module] = {}  # a layer used in two places is laid out once
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if type(child) is nn.Linear and _gains(child.weight):
                if child not in replaced:
                    replaced[child] = _LaidOut(Linear(child.weight, child.bias))
                setattr(parent, name, replaced[child])


class _LaidOut(nn.Module):
    """A :class:`Linear` in a model's tree; for inference only, it has no parameters."""

    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self._linear = linear
        self.in_features = linear.in_features
        self.out_features = linear.out_features

    @property
    def weight(self) -> Tensor:
        # Some architectures ask a layer for its weight's dtype or device.
        return self._linear.weight

    @property
    def bias(self) -> Tensor | None:
        return self._linear._bias

    def forward(self, x: Tensor) -> Tensor:
        return self._linear(x)


def _joined(weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Tensor | None:
    if all(bias is None for bias in biases):
        return None
    pairs = zip(weights, biases, strict=True)
    return torch.cat([w.new_zeros(w.shape[0]) if b is None else b for w, b in pairs])


def _gains(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.float32:
        return weight.numel() >= _FLOAT32_FROM
    return weight.dtype == torch.bfloat16


def _lay_out(weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """The weight as oneDNN wants it, tried once; None where this torch or CPU cannot."""
    try:
        with torch.no_grad():
            packed: Tensor = _onednn._reorder_linear_weight(weight.contiguous(), _TOKENS)
            trial = weight.new_zeros(1, weight.shape[1])
            _product(trial, packed, bias, "none", [], "")
    except (AttributeError, RuntimeError, TypeError) as error:
        reason = str(error).partition("\n")[0]
        if reason not in _without_layout:
            _without_layout.add(reason)
            logger.info("weights are not laid out for the CPU, steps are slower: %s", reason)
        return None
    return packed
