"""Attention of packed rows over a KV cache in which each row has a length of its own.

It plugs into any model that calls transformers' attention interface: keys and values of the step
enter the cache at their places, then each group of rows attends to its own part. It decides
nothing about tokens.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from tasc_engine.errors import UnsupportedModel
from tasc_engine.layout import Group, StepLayout

NAME = "tasc_packed"
_CACHE = "tasc_cache"


class RowCache:
    """Keys and values of all layers, ``[layers, rows * length, 2, kv_heads, head_dim]``.

    Memory is taken when it is first used, which is while the model is loaded. What lies behind a
    row's length is left over from rejected drafts or earlier requests, is finite, and is masked.

    Args:
        length: Places of a row: its tokens, and room for a draft behind them.
    """

    def __init__(self, layers: int, rows: int, length: int) -> None:
        self.layers = layers
        self.rows = rows
        self.length = length
        self.layout: StepLayout | None = None
        self._pool: Tensor | None = None

    def begin(self, layout: StepLayout) -> None:
        """Nodes that the last step kept move to where they belong; then the layout is taken in."""
        if self._pool is not None and layout.moves.numel():
            source, target = layout.moves
            self._pool.index_copy_(1, target, self._pool.index_select(1, source))
        self.layout = layout

    def attend(
        self, layer: int, query: Tensor, kv: Tensor, scale: float,
        window: int | None = None, softcap: float | None = None,
    ) -> Tensor:  # fmt: skip
        """Write the step's keys and values, then attend to each row's own.

        Args:
            query: ``[N, heads, head_dim]``.
            kv: ``[N, 2, kv_heads, head_dim]`` keys, then values.
            scale: Of the scores.
            window: Tokens a query looks back, itself included; None for all.
            softcap: Scores s become ``softcap * tanh(s / softcap)``.

        Returns:
            ``[N, heads, head_dim]``.
        """
        layout, pool = self._current(), self._pool_for(kv)[layer]
        # A mask hides a finite number only, and what is left over must be hidden from later rows.
        pool.index_copy_(0, layout.places, kv.nan_to_num(0.0, 0.0, 0.0))
        cache = pool.view(self.rows, self.length, *kv.shape[1:])
        seen = [_attend_group(g, query, cache, scale, window, softcap) for g in layout.groups]
        if len(seen) == 1 and len(layout.groups[0].packed) == len(query):
            return seen[0]
        out = torch.empty_like(query)
        for group, part in zip(layout.groups, seen, strict=True):
            out.index_copy_(0, group.packed, part)
        return out

    @torch.inference_mode()
    def copied(self, row: int, tokens: int) -> Tensor:
        """``[layers, tokens, 2, kv_heads, head_dim]`` of a row's first tokens."""
        if self._pool is None:
            raise RuntimeError("the cache is empty; a forward comes first")
        return self._pool[:, row * self.length : row * self.length + tokens].clone()

    @torch.inference_mode()
    def paste(self, row: int, kv: Tensor) -> None:
        """Put what `copied` gave at the beginning of a row."""
        if self._pool is not None:
            self._pool[:, row * self.length : row * self.length + kv.shape[1]] = kv

    @torch.inference_mode()
    def clear(self) -> None:
        """Forget what a trial forward left; the memory stays."""
        if self._pool is not None:
            self._pool.zero_()
        self.layout = None

    def _pool_for(self, kv: Tensor) -> Tensor:
        if self._pool is None:
            shape = (self.layers, self.rows * self.length, *kv.shape[1:])
            self._pool = torch.zeros(shape, dtype=kv.dtype, device=kv.device)
        if self._pool.shape[2:] != kv.shape[1:]:
            raise UnsupportedModel(
                f"layers have keys and values of {tuple(self._pool.shape[3:])} and "
                f"{tuple(kv.shape[2:])} heads and places; all layers must be alike"
            )
        return self._pool

    def _current(self) -> StepLayout:
        if self.layout is None:
            raise RuntimeError("the cache has no step layout; forwards go through Target only")
        return self.layout


def _attend_group(
    group: Group, query: Tensor, cache: Tensor, scale: float, window: int | None,
    softcap: float | None,
) -> Tensor:  # fmt: skip
    """``[n, heads, dim]`` of the group's tokens."""
    _, heads, dim = query.shape
    kv = cache[group.begin : group.end, : group.kv_length]
    kv_heads, (rows, places) = kv.shape[3], group.gather.shape
    shared = heads // kv_heads
    # Query heads that share a KV head become more queries of it: no copy of keys and values.
    padded = query if group.full else query[group.gather]
    padded = padded.view(rows, places, kv_heads, shared, dim).permute(0, 2, 3, 1, 4)
    padded = padded.reshape(rows, kv_heads, shared * places, dim)
    bias = group.bias(shared, query.dtype, window)
    key, value = kv[:, :, 0].transpose(1, 2), kv[:, :, 1].transpose(1, 2)
    if softcap is None:
        seen = nn.functional.scaled_dot_product_attention(
            padded, key, value, attn_mask=bias, scale=scale
        )
    else:
        seen = _capped(padded, key, value, bias, scale, softcap)
    seen = seen.view(rows, kv_heads, shared, places, dim).permute(0, 3, 1, 2, 4)
    seen = seen.reshape(rows * places, heads, dim)
    return seen if group.full else seen[group.padded]


def _capped(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float, softcap: float
) -> Tensor:
    """Attention whose scores are capped, as in Gemma 2; the operations of transformers' own."""
    scores = torch.matmul(query, key.transpose(2, 3)) * scale
    scores = torch.tanh(scores / softcap) * softcap + bias
    return torch.matmul(scores.softmax(-1, dtype=torch.float32).to(query.dtype), value)


def _packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    cache: RowCache = getattr(module, _CACHE)
    if kwargs.get("s_aux") is not None:
        raise UnsupportedModel("the model's attention has sinks (s_aux), which are not supported")
    if key.shape != value.shape:
        raise UnsupportedModel(
            f"keys have {key.shape[-1]} places a head, values {value.shape[-1]}; must be the same"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    kv = torch.stack((key[0], value[0])).permute(2, 0, 1, 3)
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    out = cache.attend(layer, query[0].transpose(0, 1), kv, scale, sliding_window, softcap)
    return out[None], None


AttentionInterface.register(NAME, _packed_attention)


def attention_layers(model: Any) -> int:
    """How many layers of a model attend."""
    indices = {m.layer_idx for m in model.modules() if getattr(m, "layer_idx", None) is not None}
    return max(indices, default=-1) + 1


def attach(model: Any, cache: RowCache) -> None:
    """Make every attention layer of ``model`` use ``cache``.

    Raises:
        UnsupportedModel: The model does not call transformers' attention interface.
    """
    for module in model.modules():
        if getattr(module, "layer_idx", None) is not None:
            setattr(module, _CACHE, cache)
    try:
        model.set_attn_implementation(NAME)
    except ValueError as error:
        raise UnsupportedModel(f"{type(model).__name__}: {error}") from error
