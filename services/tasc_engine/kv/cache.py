"""The KV cache, and attention of packed rows over it; each row has its own slots and length.

The cache works with any model that calls transformers' attention interface. The keys and values of
a step are written to their slots. Then each token attends to the visible tokens of its own row. The
device and data type select the implementation.
"""

import logging
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AttentionInterface

from tasc_engine.errors import OutOfMemory, UnsupportedModel, is_out_of_memory
from tasc_engine.kernels.cpu.attention import CompiledRows
from tasc_engine.kernels.gpu.attention import FusedRows, available
from tasc_engine.kernels.torch_attention import RowByRow
from tasc_engine.kv.device_memory import Room
from tasc_engine.layout import Int64, StepLayout

NAME = "tasc_packed"
_CACHE = "tasc_cache"
MIN_SLOTS = 16  # for the trial forwards when a model is loaded
log = logging.getLogger(__name__)


class RowCache:
    """Keys and values of all layers, ``[layers, slots + 1, 2, kv_heads, head_dim]``.

    `KVAllocator` assigns slots to rows. Memory is allocated at the first forward pass, while the
    model is loaded. Slots after a row's length hold finite values of rejected drafts or earlier
    requests, and no token attends to these slots. The last slot belongs to no row. It receives the
    tokens that pad a step to a fixed size.

    Args:
        slots: Maximum number of slots.
        nbytes: Maximum bytes; None for as many as ``slots`` need.
        longest: Maximum slots of one row; None if one row may hold all slots.
        room: Bytes that the device has for the cache; None if it was not asked. A row of
            ``longest`` slots must fit.
        exact: Whether the bits of a token's attention must not depend on other tokens; CPU only.

    Attributes:
        host, device: The layout of the current or last step that ran outside a CUDA graph.
        pending_moves: ``int64[2, k]``, slots of accepted draft tokens, from and to. The next
            forward pass copies them before it writes anything.
        windows: The sliding window of each layer that the model's own code ran; None for a layer
            without a window.
    """

    def __init__(
        self,
        layers: int,
        slots: int,
        nbytes: int | None = None,
        longest: int | None = None,
        room: Room | None = None,
        exact: bool = False,
    ) -> None:
        self.layers, self._exact = layers, exact
        self.windows = dict[int, int | None]()
        self.host: StepLayout[Int64] | None = None
        self.device: StepLayout[Tensor] | None = None
        self.pending_moves = _no_moves()
        self._most, self._nbytes, self._longest = slots, nbytes, longest or slots
        self._room = room
        self._pool: Tensor | None = None
        self._rows: RowByRow | CompiledRows | FusedRows | None = None

    @property
    def slots(self) -> int:
        """Number of slots; before the first forward pass, the number requested."""
        return self._most if self._pool is None else self._pool.shape[1] - 1

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all layers; known after the first forward pass."""
        assert self._pool is not None, "a forward comes first"
        return self._pool[:, 0].nbytes

    def begin(self, host: StepLayout[Int64], device: StepLayout[Tensor]) -> None:
        """Moves the accepted nodes of the last step to their slots, then sets the new layout."""
        self.move(device.moves)
        self.host, self.device = host, device
        if self._rows is not None:
            self._rows.begin(host, device)

    def move(self, moves: Tensor) -> None:
        """Makes the pending moves.

        All slots are read before any slot is written. If memory runs out, the moves remain pending.

        Args:
            moves: ``int64[2, k]``, the pending moves on the device.
        """
        if self._pool is not None and moves.numel():
            source, target = moves
            self._pool.index_copy_(1, target, self._pool.index_select(1, source))
            self.pending_moves = _no_moves()

    def drop_moves(self, first: int, end: int) -> None:
        """Drops pending moves from slots ``first`` to ``end - 1``; another row may use them now."""
        if not self.pending_moves.size:
            return
        source = self.pending_moves[0]
        self.pending_moves = self.pending_moves[:, (source < first) | (source >= end)]

    def pool(self, layer: int, kv_heads: int, head_dim: int, like: Tensor) -> Tensor:
        """Returns the keys and values of one layer."""
        if self._pool is None:
            self._pool = self._taken(kv_heads, head_dim, like)
            exact = CompiledRows(self._pool, exact=True) if self._exact else None
            self._rows = exact or _rows_of(self._pool, self._longest)
            self._rows.begin(self.current, self._on_device)
        if self._pool.shape[3:] != (kv_heads, head_dim):
            raise UnsupportedModel(
                f"layers have keys and values of {tuple(self._pool.shape[3:])} and of "
                f"{(kv_heads, head_dim)} (heads, head size); all layers must have the same"
            )
        return self._pool[layer]

    def keep(self, layer: int, kv: Tensor) -> None:
        """Writes the step's keys and values, ``[N, 2, kv_heads, head_dim]``."""
        pool = self.pool(layer, kv.shape[2], kv.shape[3], kv)
        # No inf or NaN is stored: a later row may use this slot, and masks hide only finite values.
        pool.index_copy_(0, self._on_device.slots, kv.nan_to_num(0.0, 0.0, 0.0))

    def attend(
        self,
        layer: int,
        query: Tensor,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """Computes attention of the step's tokens, whose keys and values must be in the cache.

        Args:
            query: ``[N, heads, head_dim]``.
            scale: Factor of the scores.
            window: Number of tokens that a query attends to, including itself; None for all.
            softcap: Scores s become ``softcap * tanh(s / softcap)``.

        Returns:
            ``[N, heads, head_dim]``; the next call may overwrite it.
        """
        assert self._rows is not None, "keys and values come before queries"
        return self._rows.attend(layer, query, scale, window, softcap)

    def bits(self, layer: int, kv_heads: int, head_dim: int, like: Tensor) -> NDArray[Any]:
        """Returns one layer's keys and values as a flat array for compiled code; CPU only."""
        if self._rows is None:
            self.pool(layer, kv_heads, head_dim, like)
        assert isinstance(self._rows, CompiledRows), "compiled code runs on a CPU"
        return self._rows.bits(layer)

    def all_bits(self, kv_heads: int, head_dim: int, like: Tensor) -> NDArray[Any]:
        """Returns the keys and values of all layers as `bits` does."""
        self.bits(0, kv_heads, head_dim, like)
        assert isinstance(self._rows, CompiledRows), "compiled code runs on a CPU"
        return self._rows.all_bits

    @property
    def current(self) -> StepLayout[Int64]:
        if self.host is None:
            raise RuntimeError("the cache has no step layout; forwards go through Target only")
        return self.host

    @property
    def _on_device(self) -> StepLayout[Tensor]:
        assert self.device is not None, "a forward begins with a layout"
        return self.device

    @torch.inference_mode()
    def copied(self, first: int, tokens: int) -> Tensor:
        """Returns a copy of adjacent slots, ``[layers, tokens, 2, kv_heads, head_dim]``."""
        if self._pool is None:
            raise RuntimeError("the cache is empty; run a forward before copying")
        return self._pool[:, first : first + tokens].clone()

    @torch.inference_mode()
    def paste(self, first: int, kv: Tensor) -> None:
        """Writes a result of `copied` to the slots from ``first`` on."""
        if self._pool is not None:
            self._pool[:, first : first + kv.shape[1]] = kv

    @torch.inference_mode()
    def shift(self, first: int, to: int, tokens: int) -> None:
        """Moves adjacent slots, with their pending moves.

        If memory for one layer's copy is missing, nothing is moved.
        """
        if self._pool is not None:
            held = torch.empty_like(self._pool[0, :tokens])
            for layer in self._pool:
                held.copy_(layer[first : first + tokens])
                layer[to : to + tokens] = held
        own = (self.pending_moves >= first) & (self.pending_moves < first + tokens)
        self.pending_moves[own] -= first - to

    @torch.inference_mode()
    def clear(self) -> None:
        """Zeroes the slots after a trial forward pass; the memory stays allocated."""
        if self._pool is not None:
            self._pool.zero_()
        self.host = self.device = None

    def _taken(self, kv_heads: int, head_dim: int, like: Tensor) -> Tensor:
        each = self.layers * 2 * kv_heads * head_dim * like.element_size()
        slots = self._most if self._nbytes is None else min(self._most, self._nbytes // each - 1)
        if slots < min(MIN_SLOTS, self._most):
            raise ValueError(
                f"kv_cache_bytes is {self._nbytes}, room for {slots} tokens of {each} bytes; "
                f"at least {(MIN_SLOTS + 1) * each} bytes are needed, and more than "
                f"{(self._most + 1) * each} are not used"
            )
        if self._room is not None:
            slots = min(slots, self._fitting(slots, each, self._room))
        log.info("the KV cache holds %d tokens of %d bytes", slots, each)
        shape = (self.layers, slots + 1, 2, kv_heads, head_dim)
        try:
            return torch.zeros(shape, dtype=like.dtype, device=like.device)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise OutOfMemory(
                f"a KV cache of {slots} tokens of {each} bytes, {slots * each} bytes in all, does "
                f"not fit the memory of {like.device}; lower rows (each takes "
                f"{self._longest * each} bytes), max_model_len ({self._longest}) or kv_cache_bytes"
            ) from error

    def _fitting(self, slots: int, each: int, room: Room) -> int:
        """The slots that fit the room.

        Raises:
            OutOfMemory: A row of the maximum length does not fit.
        """
        fitting, row = room.nbytes // each - 1, min(self._longest, slots)
        if fitting < row:
            raise OutOfMemory(
                f"the KV cache of one row of max_model_len {self._longest} takes {row * each} "
                f"bytes, but {room.nbytes} are left for it: {room.reason}; lower max_model_len or "
                "prefix_cache_bytes, use a smaller dtype or quantization nf4, or give more memory"
            )
        if fitting < slots:
            log.warning(
                "the KV cache holds %d tokens instead of %d, so that %d rows of max_model_len %d "
                "fit at a time, and longer queues are possible: %s; lower rows or max_model_len",
                fitting, slots, fitting // self._longest, self._longest, room.reason,
            )  # fmt: skip
        return fitting


def _no_moves() -> Int64:
    return np.zeros((2, 0), np.int64)


def _rows_of(pool: Tensor, longest: int) -> RowByRow | CompiledRows | FusedRows:
    if pool.device.type == "cpu":
        return CompiledRows(pool)
    fits = available(pool.dtype, pool.shape[-1], pool.device)
    return FusedRows(pool, longest) if fits else RowByRow(pool)


def on_device(layout: StepLayout[Int64], device: torch.device) -> StepLayout[Tensor]:
    """Copies a layout's arrays to a device as tensors, in one transfer."""
    arrays = [np.ascontiguousarray(array) for array in vars(layout).values()]
    if device.type == "cpu":
        return StepLayout(*(torch.from_numpy(array) for array in arrays))
    flat = torch.from_numpy(np.concatenate([array.reshape(-1) for array in arrays]))
    parts = flat.to(device, non_blocking=True).split([array.size for array in arrays])
    tensors = (part.view(array.shape) for part, array in zip(parts, arrays, strict=True))
    return StepLayout(*tensors)


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
            f"keys have head size {key.shape[-1]} and values {value.shape[-1]}; both must be equal"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    cache.windows[layer] = sliding_window
    cache.keep(layer, torch.stack((key[0], value[0])).permute(2, 0, 1, 3))
    out = cache.attend(layer, query[0].transpose(0, 1), scale, sliding_window, softcap)
    return out[None], None


AttentionInterface.register(NAME, _packed_attention)


def attention_layers(model: Any) -> int:
    """Returns the number of attention layers of a model."""
    indices = {m.layer_idx for m in model.modules() if getattr(m, "layer_idx", None) is not None}
    return max(indices, default=-1) + 1


def attach(model: Any, cache: RowCache) -> None:
    """Makes every attention layer of ``model`` use ``cache``.

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
