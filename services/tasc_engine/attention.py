"""Attention of packed rows over a KV cache in which each row has a length of its own.

It plugs into any model that calls transformers' attention interface: keys and values of the step
enter the cache at (row, position), then each group of rows attends to its own part. It decides
nothing about tokens.
"""

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface

from tasc_engine.errors import UnsupportedModel
from tasc_engine.layout import Group, StepLayout

NAME = "tasc_packed"
_CACHE = "tasc_cache"


class RowCache:
    """Keys and values of all layers, ``[rows, kv_heads, length, head_dim]`` each.

    Memory is taken when a layer is first used, which is while the model is loaded. What lies
    behind a row's length is left over from rejected drafts or earlier requests and is never seen.
    """

    def __init__(self, rows: int, length: int) -> None:
        self.rows = rows
        self.length = length
        self.layout: StepLayout | None = None
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}

    @property
    def layers(self) -> int:
        return len(self._keys)

    def write(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store the step's ``[kv_heads, N, head_dim]`` and return the layer's whole cache."""
        layout = self._current()
        if layer not in self._keys:
            self._keys[layer] = self._allocate(key)
            self._values[layer] = self._allocate(value)
        keys, values = self._keys[layer], self._values[layer]
        keys[layout.rows, :, layout.positions[0]] = key.transpose(0, 1)
        values[layout.rows, :, layout.positions[0]] = value.transpose(0, 1)
        return keys, values

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Write keys and values, then attend: ``[1, heads, N, d]`` to ``[1, N, heads, d]``."""
        keys, values = self.write(layer, key[0], value[0])
        out = query.new_empty(query.shape[2], query.shape[1], values.shape[3])
        for group in self._current().groups:
            out[group.packed] = _attend_group(group, query[0], keys, values, scale)
        return out[None]

    def clear(self) -> None:
        """Forget what a trial forward left; the memory stays."""
        for tensor in (*self._keys.values(), *self._values.values()):
            tensor.zero_()
        self.layout = None

    def _allocate(self, like: Tensor) -> Tensor:
        heads, _, dim = like.shape
        return like.new_zeros(self.rows, heads, self.length, dim)

    def _current(self) -> StepLayout:
        if self.layout is None:
            raise RuntimeError("the cache has no step layout; forwards go through Target only")
        return self.layout


def _attend_group(
    group: Group, query: Tensor, keys: Tensor, values: Tensor, scale: float
) -> Tensor:
    rows, places = group.gather.shape
    heads, _, dim = query.shape
    kv_heads = keys.shape[1]
    shared = heads // kv_heads
    key = keys[group.begin : group.end, :, : group.kv_length]
    value = values[group.begin : group.end, :, : group.kv_length]
    # Query heads that share a KV head become more queries of it: no copy of keys and values.
    padded = query[:, group.gather].reshape(kv_heads, shared, rows, places, dim)
    padded = padded.permute(2, 0, 1, 3, 4).reshape(rows, kv_heads, shared * places, dim)
    mask = group.mask.repeat(1, 1, shared, 1)
    seen = nn.functional.scaled_dot_product_attention(
        padded, key, value, attn_mask=mask, scale=scale
    )
    seen = seen.reshape(rows, kv_heads * shared, places, values.shape[3])
    return seen.transpose(1, 2).flatten(0, 1)[group.padded]


def _packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    cache: RowCache = getattr(module, _CACHE)
    _refuse_what_we_cannot_mask(cache, kwargs)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return cache.attend(int(module.layer_idx), query, key, value, scale), None  # type: ignore[arg-type]


def _refuse_what_we_cannot_mask(cache: RowCache, kwargs: dict[str, Any]) -> None:
    window = kwargs.get("sliding_window")
    if window is not None and window < cache.length:
        raise UnsupportedModel(
            f"the model's layers look back {window} tokens only and a row may hold {cache.length}; "
            f"set max_model_len to {window} or less"
        )
    for name in ("softcap", "s_aux"):
        if kwargs.get(name) is not None:
            raise UnsupportedModel(f"the model's attention uses {name}, which is not supported")


AttentionInterface.register(NAME, _packed_attention)


def attach(model: Any, cache: RowCache) -> None:
    """Make every attention layer of ``model`` use ``cache``.

    Raises:
        UnsupportedModel: The model does not call transformers' attention interface.
    """
    layers = [m for m in model.modules() if getattr(m, "layer_idx", None) is not None]
    for layer in layers:
        setattr(layer, _CACHE, cache)
    try:
        model.set_attn_implementation(NAME)
    except ValueError as error:
        raise UnsupportedModel(f"{type(model).__name__}: {error}") from error
