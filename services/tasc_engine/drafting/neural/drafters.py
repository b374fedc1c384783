"""The two kinds of drafter, and their layers with a separate KV cache.

An EAGLE-style head shares the target's embedding and LM head; an independent drafter is a small
model. A row's committed inputs are its trunk. In the cache, the nodes of a draft follow the trunk,
level by level, until new committed inputs overwrite them.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tasc_draft import Drafts
from tasc_engine.config import MAX_NODES
from tasc_engine.errors import UnsupportedModel
from tasc_engine.kernels.gpu.attention import available
from tasc_engine.kv.cache import RowCache, on_device
from tasc_engine.layout import ForwardBatch, Int32, Int64, StepLayout, lay_out
from tasc_engine.model.decoder import LeanDecoder
from tasc_engine.model.linears import Linear


class Backbone:
    """The layers of a Llama-like decoder for a number of rows.

    Args:
        decoder: A decoder with positions for ``capacity`` tokens.
        capacity: Maximum number of tokens of one row without drafts.

    Raises:
        UnsupportedModel: A layer has a sliding window, which drafting by levels does not support.
    """

    def __init__(self, decoder: LeanDecoder, rows: int, capacity: int) -> None:
        if decoder.windowed:
            raise UnsupportedModel(
                "the drafter attends over a sliding window; use a drafter without a window "
                "(sliding_window null)"
            )
        self.decoder, self._last = decoder, capacity - 1
        self._capacity = capacity + MAX_NODES
        self._cache = RowCache(decoder.layers, rows * self._capacity, None, self._capacity)
        self._device = decoder.embedding.device
        self._fused = self._device.type == "cuda" and available(
            decoder.embedding.dtype, decoder.head_dim, self._device
        )

    @property
    def cache_bytes(self) -> int:
        """Bytes of keys and values: ``rows * (capacity + MAX_NODES) + 1`` tokens per layer."""
        each = 2 * self.decoder.kv_heads * self.decoder.head_dim * self.decoder.embedding.itemsize
        return (self._cache.slots + 1) * self.decoder.layers * each

    def trunk(
        self, inputs: Tensor, rows: Int32, bases: Int32, context_lens: Int32, sizes: Int32
    ) -> Tensor:
        """Commits new inputs; returns ``[R, D]``, the hidden state at the last input of each row.

        Args:
            inputs: ``[N, D]``, row after row; they are overwritten.
            rows: ``int32[R]``.
            bases: ``int32[R]``, position of each row's first committed input.
            context_lens: ``int32[R]``, number of inputs of each row that are committed already.
            sizes: ``int32[R]``, number of new inputs of each row, at least one.
        """
        offsets = np.concatenate(([0], np.cumsum(sizes))).astype(np.int32)
        n = len(rows)
        batch = ForwardBatch(
            self._kv_starts(rows),
            context_lens,
            np.zeros(offsets[-1], np.int32),
            offsets,
            np.arange(n, dtype=np.int32),
            Drafts.empty(n),
        )
        step = lay_out(batch)
        return self._run(replace(step, positions=step.positions + np.repeat(bases, sizes)), inputs)

    def level(
        self, inputs: Tensor, tree: Tensor, rows: Int32, bases: Int32, trunks: Int32, level: int
    ) -> Tensor:
        """Returns ``[R, W, D]``, the hidden states at the nodes of one level.

        Args:
            inputs: ``[R, W, D]``; they are overwritten.
            tree: ``int64[R, W]``, bits of the expanded nodes that each node sees, including
                itself. The bits of this level start at ``W * (level - 1)``.
            trunks: ``int32[R]``, number of committed inputs of each row.
            level: Depth of the nodes, from 1 on.
        """
        n, width = tree.shape
        before = width * (level - 1)
        kv_starts, long = self._kv_starts(rows), trunks.astype(np.int64)
        slots = (kv_starts + long)[:, None] + before + np.arange(width)
        # Nodes beyond the end of a nearly full row get its last position; the row's draft has no
        # budget for them.
        positions = np.minimum(bases + long - 1 + level, self._last)
        host = StepLayout[Int64](
            ids=np.zeros(n * width, np.int64),
            positions=np.repeat(positions, width),
            slots=slots.reshape(-1),
            visible_lens=np.repeat(long, width),
            # GPU kernels read only the device's layout, so the tree need not be copied to the host.
            tree=np.zeros(n * width, np.int64) if self._fused else tree.flatten().cpu().numpy(),
            adapters=np.zeros(n * width, np.int64),
            logits_indices=np.arange(n * width),
            query_offsets=np.arange(n + 1, dtype=np.int64) * width,
            kv_starts=kv_starts,
            trunks=long,
            nodes=np.full(n, before + width, np.int64),
            moves=np.zeros((2, 0), np.int64),
        )
        return self._run(host, inputs.flatten(0, 1), tree.flatten()).view(n, width, -1)

    def _run(self, step: StepLayout[Int64], inputs: Tensor, tree: Tensor | None = None) -> Tensor:
        device = on_device(step, self._device)
        if tree is not None:
            device = replace(device, tree=tree)
        self._cache.begin(step, device)
        return self.decoder.states(inputs, device.logits_indices, self._cache).clone()

    def _kv_starts(self, rows: Int32) -> NDArray[np.int64]:
        return rows.astype(np.int64) * self._capacity


class Independent:
    """A small causal LM with the target's tokenizer (VocabTrim's independent drafter, Goel et al.
    2025, arXiv 2506.22694)."""

    needs_hidden = False

    def __init__(self, decoder: LeanDecoder, rows: int, capacity: int) -> None:
        self.backbone = Backbone(decoder, rows, capacity)

    def inputs(self, ids: Tensor, hidden: Tensor | None) -> Tensor:
        return self.backbone.decoder.embed(ids)


class Eagle:
    """One layer over the target's last hidden states and the embeddings of the tokens after them
    (EAGLE: Li et al. 2024, arXiv 2401.15077; its drafts are EAGLE-2 trees, arXiv 2406.16858).

    The target does not compute a prompt prefix that is copied from the prefix cache, so the hidden
    states of the prefix are unknown. The head then reads only the tokens after the prefix.

    Args:
        decoder: The head's layer; its embedding is the target's.
        joint: ``[D, 2 D]``, the weight that joins an embedding and a hidden state into one input.
    """

    needs_hidden = True

    def __init__(self, decoder: LeanDecoder, joint: Tensor, rows: int, capacity: int) -> None:
        self.backbone = Backbone(decoder, rows, capacity)
        self._joint = Linear(joint)

    def inputs(self, ids: Tensor, hidden: Tensor | None) -> Tensor:
        assert hidden is not None, "the head reads hidden states"
        embedded: Any = self.backbone.decoder.embed(ids)
        return self._joint(torch.cat((embedded, hidden.to(embedded.dtype)), -1))
