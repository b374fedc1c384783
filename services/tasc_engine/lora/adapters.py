"""Applies several adapters to one base model; each row uses one adapter or none.

Each token of a step has its row's adapter number, 0 for no adapter. The adapter's result is added
to the layer's own output, so rows with different adapters, or with none, share a forward. This
module handles layers of models and weights of adapters, but no files or requests. A layer is
``picked`` if it sees only the tokens that need logits, as after the last layer's attention.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from tasc_engine.errors import UnsupportedModel
from tasc_engine.kernels.gpu.attention import available
from tasc_engine.kv.cache import RowCache
from tasc_engine.lora.adapter_files import Adapter
from tasc_engine.lora.low_rank import (
    AdapterTokens,
    Addition,
    CompiledTokens,
    GroupedTokens,
    MaskedTokens,
)

Matmul = Callable[[Tensor], Tensor]  # the product of linear layers, with their bias


class Adapters:
    """The adapters of one target.

    Args:
        model: The base model, a transformers causal LM.
        adapters: The adapters, numbered from 1 in this order.

    Raises:
        UnsupportedModel: An adapter changes a layer that is missing in the model, is not a linear
            layer between embeddings and head, or has another shape.
    """

    def __init__(self, model: Any, adapters: Sequence[Adapter] = ()) -> None:
        self._adapters = adapters
        for adapter in adapters:
            _check_fit(adapter, model)
        self._like: Tensor = model.get_input_embeddings().weight.detach()
        self._count, self._used = 0, False
        self._every, self._picked = (_tokens_of(self._like, len(adapters)) for _ in range(2))

    def used_in(self, cache: RowCache) -> bool:
        """Whether a row of the step whose layout the cache holds uses an adapter."""
        return bool(self._adapters) and bool(cache.current.adapters.any())

    def begin(self, cache: RowCache, logits_indices: Tensor | None) -> None:
        """Note each token's adapter number, before the first layer of a forward pass.

        If the step's layout on the host has no adapter, the forward makes no additions at all.

        Args:
            cache: The cache that holds the step's layout.
            logits_indices: ``int64[M]``, the tokens that need logits; None for all.
        """
        if self._adapters:
            assert cache.device is not None, "a forward begins with a layout"
            numbers = cache.device.adapters
            self._count, self._used = len(numbers), self.used_in(cache)
        if self._used:
            self._every.begin(numbers)
            left = numbers if logits_indices is None else numbers.index_select(0, logits_indices)
            self._picked.begin(left)

    def around(
        self, matmul: Matmul, layers: Sequence[str], widths: Sequence[int], picked: bool
    ) -> Matmul:
        """Returns ``matmul`` with the additions of adapters; unchanged if there are none.

        Args:
            matmul: Computes joined linear layers, and concatenates their outputs.
            layers: The names of these layers in the model.
            widths: Number of outputs of each layer.
            picked: Whether these layers see only the tokens that need logits.
        """
        tokens = self._picked if picked else self._every
        addition = self._addition(tokens, layers, widths)
        if addition is None:
            return matmul

        def adapted(x: Tensor) -> Tensor:
            y = matmul(x)
            addition(x, y)
            return y

        return adapted

    def attach(self, model: nn.Module) -> None:
        """Replace each adapted layer by an `AdaptedModule`, which must see all tokens of a step."""
        for name in sorted({name for adapter in self._adapters for name in adapter.layers}):
            parent, _, own = name.rpartition(".")
            linear: Any = model.get_submodule(name)
            addition = self._addition(self._every, [name], [linear.out_features])
            assert addition is not None, "an adapter changes this layer"
            module = AdaptedModule(linear, addition, lambda: self._count, name)
            setattr(model.get_submodule(parent), own, module)

    def _addition(
        self, tokens: AdapterTokens, layers: Sequence[str], widths: Sequence[int]
    ) -> Addition | None:
        weights = [[adapter.layers.get(name) for name in layers] for adapter in self._adapters]
        if not any(w for own in weights for w in own):
            return None
        add = tokens.addition(weights, widths, self._like)

        def add_if_used(x: Tensor, y: Tensor) -> None:
            if self._used:
                add(x, y)

        return add_if_used


def _tokens_of(like: Tensor, adapters: int) -> AdapterTokens:
    if like.device.type == "cpu":
        return CompiledTokens(adapters)
    grouped = available(like.dtype, device=like.device)
    return GroupedTokens(adapters) if grouped else MaskedTokens()


class AdaptedModule(nn.Module):
    """A linear layer of a model, with the adapters' addition to its output.

    Args:
        count: Returns the number of tokens of the step.
    """

    def __init__(
        self, linear: nn.Linear, addition: Addition, count: Callable[[], int], name: str
    ) -> None:
        super().__init__()
        self.linear = linear  # a child module, which is laid out like other layers
        self._addition, self._count, self._name = addition, count, name
        self.in_features, self.out_features = linear.in_features, linear.out_features

    @property
    def weight(self) -> Tensor:
        # Some architectures read the dtype or device of a layer's weight.
        return self.linear.weight

    @property
    def bias(self) -> Tensor | None:
        return self.linear.bias

    def forward(self, x: Tensor) -> Tensor:
        given = x.numel() // self.in_features
        if given != self._count():
            raise UnsupportedModel(
                f"{self._name} gets {given} of a step's {self._count()} tokens, so the rows "
                "of these tokens are unknown; merge the adapter"
            )
        y: Tensor = self.linear(x)
        self._addition(x, y)
        return y


def _check_fit(adapter: Adapter, model: nn.Module) -> None:
    whole = type(model).__name__
    outside = (model.get_input_embeddings(), model.get_output_embeddings())  # type: ignore[operator]
    for name, weights in adapter.layers.items():
        try:
            layer = model.get_submodule(name)
        except AttributeError:
            raise UnsupportedModel(
                f"adapter {adapter.name} changes {name}, which {whole} does not have; name the "
                "base model that it was trained for"
            ) from None
        if not isinstance(layer, nn.Linear) or layer in outside:
            kind = "embeddings" if layer in outside else type(layer).__name__
            raise UnsupportedModel(
                f"adapter {adapter.name} changes {name} ({kind}); one of several adapters may "
                "change only linear layers between embeddings and head: merge the adapter"
            )
        own = [weights.up.shape[0], weights.down.shape[1]]
        if own != [layer.out_features, layer.in_features]:
            raise UnsupportedModel(
                f"adapter {adapter.name} changes {name} with shape {own}, but the base model's "
                f"layer has {[layer.out_features, layer.in_features]}; name the model that it was "
                "trained for"
            )
