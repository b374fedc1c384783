"""Attention in plain torch, row by row, on any device.

It serves rows with many tokens, whose products are large, and devices for which this project has no
kernel.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tasc_engine.layout import Int64, StepLayout


class RowByRow:
    """Computes attention for all or some rows of a step.

    Args:
        pool: Keys and values, ``[layers, slots, 2, kv_heads, head_dim]``.
    """

    def __init__(self, pool: Tensor) -> None:
        self._pool = pool
        self._biases: dict[Any, Tensor] = {}

    def begin(self, host: StepLayout[Int64], device: StepLayout[Tensor]) -> None:
        """Sets the layout of a step."""
        self._step = host
        self._biases.clear()

    def attend(
        self, layer: int, query: Tensor, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        """See `RowCache.attend`."""
        query = query.contiguous()
        out = torch.empty_like(query)
        for row in range(len(self._step.kv_starts)):
            self.attend_row(row, layer, query, scale, window, softcap, out)
        return out

    def attend_row(
        self,
        row: int,
        layer: int,
        query: Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
        out: Tensor,
    ) -> None:
        """Writes one row's part of ``out``."""
        step = self._step
        begin, end = step.query_offsets[row : row + 2]
        first = step.kv_starts[row]
        kv = self._pool[layer, first : first + step.trunks[row] + step.nodes[row]]
        kv_heads, (tokens, heads, dim) = kv.shape[2], (end - begin, *query.shape[1:])
        shared = heads // kv_heads
        # Query heads that share a KV head become more queries of that head; no key is copied.
        asked = query[begin:end].view(tokens, kv_heads, shared, dim).permute(1, 2, 0, 3)
        asked = asked.reshape(1, kv_heads, shared * tokens, dim)
        key, value = kv.permute(1, 2, 0, 3).unsqueeze(1).unbind()
        bias = self._bias(row, shared, window, query)
        if softcap is None:
            attended = nn.functional.scaled_dot_product_attention(
                asked, key, value, attn_mask=bias, scale=scale
            )
        else:
            attended = _capped(asked, key, value, bias, scale, softcap)
        out[begin:end] = attended.view(heads, tokens, dim).transpose(0, 1)

    def _bias(self, row: int, shared: int, window: int | None, like: Tensor) -> Tensor:
        """The bias of the scores, ``[1, 1, shared * tokens, slots]``; made once per step."""
        key = row, shared, window, like.dtype
        if key not in self._biases:
            sees = torch.from_numpy(visible(self._step, row, window)).to(like.device)
            bias = torch.zeros(sees.shape, dtype=like.dtype, device=like.device)
            bias.masked_fill_(~sees, -torch.inf)
            self._biases[key] = bias.repeat(shared, 1)[None, None]
        return self._biases[key]


def visible(step: StepLayout[Int64], row: int, window: int | None) -> np.ndarray[Any, Any]:
    """``bool[tokens, slots]``, the slots that each token of a row sees."""
    begin, end = step.query_offsets[row], step.query_offsets[row + 1]
    trunk, nodes = step.trunks[row], step.nodes[row]
    own, slots = step.positions[begin:end, None], np.arange(trunk + nodes)
    sees: np.ndarray[Any, Any] = slots < step.visible_lens[begin:end, None]
    sees[:, trunk:] = (step.tree[begin:end, None] >> np.arange(nodes)) & 1
    if window is not None:
        positions = np.concatenate((slots[:trunk], step.positions[end - nodes : end]))
        sees &= own - positions < window
    return sees


def _capped(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float, softcap: float
) -> Tensor:
    """Attention with capped scores, as in Gemma 2; uses the same operations as transformers."""
    scores = torch.matmul(query, key.transpose(2, 3)) * scale
    scores = torch.tanh(scores / softcap) * softcap + bias
    return torch.matmul(scores.softmax(-1, dtype=torch.float32).to(query.dtype), value)
