"""Attention of packed draft trees over the KV pool as one fused GPU kernel, written in Triton.

Each program processes a few tokens of one row with the query heads that share a KV head, and a part
of the row's context. If contexts are cut into parts, a second kernel joins their results (tree
attention: Miao et al. 2024, arXiv 2305.09781; online softmax over blocks: Dao 2023, arXiv
2307.08691; parts of a context: Dao et al. 2023, Flash-Decoding). The nodes that a token sees are
bits of an integer, tested in registers, so no mask is written to memory. Grids depend on shapes
only, so a captured call serves every layout of the same shapes.

Triton comes with the CUDA builds of torch. Without it, this module can be imported, but `available`
returns False.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tasc_engine.kernels.gpu.compiling import REGISTERS, jit, power
from tasc_engine.layout import Int64, StepLayout

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

# With TRITON_INTERPRET=1 at import, Triton runs kernels slowly on the CPU, for tests.
INTERPRETED = triton is not None and not isinstance(tl.max, triton.JITFunction)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_HEAD_DIM = 256
_MAX_SPLITS = 32
_MIN_SPLIT = 64  # minimum keys of a program
_PROGRAMS = 264  # two for each of the 132 multiprocessors of a Hopper GPU
_MIN_LINES = 16  # minimum query lines of a program; matrix units need them
_KEY_BYTES = 8192  # maximum bytes of keys that a program holds at a time
_WIDE = 64 * 64  # maximum sums that four warps hold; an eighth of it beside float32 products


def available(
    dtype: torch.dtype = torch.bfloat16, head_dim: int = 64, device: torch.device | None = None
) -> bool:
    """Whether `attend` supports these keys on this device: Triton, and an Ampere or later GPU.

    The meta device counts as such a GPU: without memory, kernels can be compiled but not run.
    """
    fits = dtype in DTYPES and head_dim <= MAX_HEAD_DIM
    if triton is None or not fits:
        return False
    if INTERPRETED or (device is not None and device.type == "meta"):
        return True
    on_gpu = torch.cuda.is_available() and (device is None or device.type == "cuda")
    return on_gpu and torch.cuda.get_device_capability(device) >= (8, 0)


def attend(
    query: Tensor, pool: Tensor, layout: StepLayout[Tensor], scale: float, longest: int,
    window: int | None = None, softcap: float | None = None,
) -> Tensor:  # fmt: skip
    """Computes attention of tokens; the step's own keys and values must be in the pool already.

    Nothing waits for the device. Only the values in ``layout`` decide which slots are seen.

    Args:
        query: ``[N, heads, D]`` in one of ``DTYPES``; only D must be contiguous.
        pool: ``[slots, 2, kv_heads, D]`` of one layer, in the same dtype, contiguous.
        layout: The layout on the query's device. A row may have no tokens.
        scale: Factor of the scores, which are summed in float32.
        longest: Maximum slots of a row; decides how finely contexts are cut.
        window: A token at p sees position j only if ``p - j < window``; None for all.
        softcap: Scores s become ``softcap * tanh(s / softcap)``.

    Returns:
        ``[N, heads, D]``; zeros for a token that sees no slot. Nothing is written for tokens that
        belong to no row.

    Raises:
        ValueError: A shape, a stride or a dtype differs from the above.
    """
    _check(query, pool)
    tokens, heads, dim = query.shape
    rows, kv_heads, width = layout.kv_starts.shape[0], pool.shape[2], power(dim, 16)
    shared = heads // kv_heads
    together = min(shared, _MIN_LINES)
    lines = _lines(together * -(-tokens // rows), width, query.dtype)
    each = lines // together
    tiles, columns = min(tokens, tokens // each + rows), kv_heads * -(-shared // together)
    splits = _splits(tiles * columns, longest)
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    parts = sums = out
    if splits > 1:
        parts = query.new_empty((tokens, heads, splits, dim), dtype=torch.float32)
        sums = query.new_empty((tokens, heads, splits), dtype=torch.float32)
    _attention[(tiles, columns, splits)](
        query, pool, out, parts, sums, layout.positions, layout.visible_lens, layout.tree,
        layout.query_offsets,
        layout.kv_starts, layout.trunks, layout.nodes, scale, softcap or 1.0, window or 0, rows,
        query.stride(0), query.stride(1), kv_heads=kv_heads, shared=shared, together=together,
        each=each, lines=lines, dim=dim, width=width, keys=_keys(width * query.element_size()),
        most_rows=power(rows, 16), split=splits > 1, windowed=window is not None,
        capped=softcap is not None, num_warps=_warps(lines * width, query.dtype), num_stages=2,
        maxnreg=REGISTERS,
    )  # fmt: skip
    if splits > 1:
        padded = power(splits, 16)
        _join[(tokens * heads,)](out, parts, sums, splits, most_splits=padded, dim=dim, width=width)
    return out


def _check(query: Tensor, pool: Tensor) -> None:
    heads, dim, kv_heads = query.shape[1], query.shape[2], pool.shape[2]
    if query.dtype not in DTYPES or pool.dtype != query.dtype:
        raise ValueError(f"queries are {query.dtype}, keys {pool.dtype}; use one of {DTYPES}")
    if dim != pool.shape[3] or dim > MAX_HEAD_DIM or heads % kv_heads:
        raise ValueError(
            f"{heads} query heads of {dim} and {kv_heads} key heads of {pool.shape[3]}: sizes must "
            f"be equal and at most {MAX_HEAD_DIM}, the number of query heads a multiple of the "
            "number of key heads; use other attention"
        )
    if query.stride(2) != 1 or not pool.is_contiguous():
        raise ValueError("each query head, and the whole pool, must be contiguous in memory")


def _lines(lines: int, width: int, dtype: torch.dtype) -> int:
    # Sums, and products of float32, are in registers, which hold so many lines.
    most = 16 if dtype == torch.float32 else 32 if width > 128 else 64
    return min(most, power(lines, _MIN_LINES))


def _warps(sums: int, dtype: torch.dtype) -> int:
    return 8 if sums > (_WIDE // 8 if dtype == torch.float32 else _WIDE) else 4


def _keys(bytes_each: int) -> int:
    return max(16, min(64, _KEY_BYTES // bytes_each))


def _splits(programs: int, longest: int) -> int:
    splits = min(_MAX_SPLITS, -(-longest // _MIN_SPLIT))
    return max(1, min(splits, _PROGRAMS // programs))


# Kernels are specialised for shapes, which `Target.warm_up` covers, but not for values that vary
# between steps. The parts of a layout are concatenated, so their addresses vary too.
@jit(
    do_not_specialize=["window", "rows"],
    do_not_specialize_on_alignment=[
        "positions", "visible_lens", "tree", "query_offsets", "kv_starts", "trunks", "nodes"
    ],
)  # fmt: skip
def _attention(
    query: tl.tensor, pool: tl.tensor, out: tl.tensor, parts: tl.tensor, sums: tl.tensor,
    positions: tl.tensor, visible_lens: tl.tensor, tree: tl.tensor,
    query_offsets: tl.tensor, kv_starts: tl.tensor,
    trunks: tl.tensor, nodes: tl.tensor, scale: tl.tensor, softcap: tl.tensor, window: tl.tensor,
    rows: tl.tensor, query_token: tl.tensor, query_head: tl.tensor, kv_heads: tl.constexpr,
    shared: tl.constexpr, together: tl.constexpr, each: tl.constexpr, lines: tl.constexpr,
    dim: tl.constexpr, width: tl.constexpr, keys: tl.constexpr, most_rows: tl.constexpr,
    split: tl.constexpr, windowed: tl.constexpr, capped: tl.constexpr,
) -> None:  # fmt: skip
    row, tile = _row_of(query_offsets, rows, each, most_rows)
    if row >= rows:
        return
    first, trunk, many = tl.load(kv_starts + row), tl.load(trunks + row), tl.load(nodes + row)
    row_end = tl.load(query_offsets + row + 1)
    line, place = tl.arange(0, lines), tl.arange(0, width)[None, :]
    kv_head = tl.program_id(1) % kv_heads
    within = tl.program_id(1) // kv_heads * together + line % together
    token = tl.load(query_offsets + row) + tile * each + line // together
    real = (line < each * together) & (token < row_end) & (within < shared)
    head = kv_head * shared + within
    at = tl.load(positions + token, mask=real, other=0)
    sees = tl.load(visible_lens + token, mask=real, other=0)
    bits = tl.load(tree + token, mask=real, other=0)
    target = (token * (kv_heads * shared) + head) * tl.num_programs(2) + tl.program_id(2)
    low, stop = _span(at, sees, bits, real, trunk + many, window, keys, windowed)
    if split and low >= stop:
        tl.store(sums + target, tl.full([lines], float("-inf"), tl.float32), mask=real)
        return

    inside = place < dim
    own = token[:, None] * query_token + head[:, None] * query_head + place
    asked = tl.load(query + own, mask=real[:, None] & inside, other=0.0)
    highest = tl.full([lines], float("-inf"), tl.float32)
    total, mixed = tl.zeros([lines], tl.float32), tl.zeros([lines, width], tl.float32)
    for begin in range(low, stop, keys):
        j = begin + tl.arange(0, keys)
        held = (j < stop)[:, None] & inside
        lies = pool + ((first + j) * (2 * kv_heads) + kv_head)[:, None] * dim + place
        score = _scores(asked, tl.load(lies, mask=held, other=0.0), scale, softcap, capped)
        nodes_at = positions + row_end - many
        visible = _visible(j, stop, at, sees, bits, trunk, many, nodes_at, window, windowed)
        score = tl.where(visible, score, float("-inf"))
        higher = tl.maximum(highest, tl.max(score, 1))
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        weight, fade = tl.exp(score - safe[:, None]), tl.exp(highest - safe)
        value = tl.load(lies + kv_heads * dim, mask=held, other=0.0)
        total = total * fade + tl.sum(weight, 1)
        mixed = mixed * fade[:, None]
        mixed += tl.dot(weight.to(value.dtype), value, input_precision="ieee")
        highest = higher
    total = tl.where(total == 0.0, 1.0, total)
    mixed = mixed / total[:, None]
    written = target[:, None] * dim + place
    if split:
        tl.store(parts + written, mixed, mask=real[:, None] & inside)
        tl.store(sums + target, highest + tl.log(total), mask=real)
    else:
        tl.store(out + written, mixed.to(out.dtype.element_ty), mask=real[:, None] & inside)


@jit()
def _row_of(
    query_offsets: tl.tensor, rows: tl.tensor, each: tl.constexpr, most_rows: tl.constexpr
) -> tl.tensor:
    """This program's row (at least ``rows`` if it has none), and its tile within the row."""
    at = tl.arange(0, most_rows)
    starts = tl.load(query_offsets + at, mask=at < rows, other=0)
    ends = tl.load(query_offsets + at + 1, mask=at < rows, other=0)
    tiles = (ends - starts + each - 1) // each
    tile = tl.program_id(0)
    row = tl.sum((tl.cumsum(tiles, 0) <= tile).to(tl.int32), 0)
    return row, tile - tl.sum(tl.where(at < row, tiles, 0), 0)


@jit()
def _span(
    at: tl.tensor, sees: tl.tensor, bits: tl.tensor, real: tl.tensor, end: tl.tensor,
    window: tl.tensor, keys: tl.constexpr, windowed: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Begin and end of this program's part of the slots that the tile's tokens may see."""
    stop = tl.max(sees, 0)
    if tl.max((bits != 0).to(tl.int32), 0) > 0:
        stop = end
    low = stop * 0
    if windowed:  # a node's slot is never before its position
        low = tl.maximum(tl.min(tl.where(real, at, end), 0) - window + 1, 0)
    splits = tl.num_programs(2)
    share = ((stop - low + splits - 1) // splits + keys - 1) // keys * keys
    low += tl.program_id(2) * share
    return low, tl.minimum(stop, low + share)


@jit()
def _scores(
    asked: tl.tensor, key: tl.tensor, scale: tl.tensor, softcap: tl.tensor, capped: tl.constexpr
) -> tl.tensor:
    score = tl.dot(asked, tl.trans(key), input_precision="ieee") * scale
    if capped:  # tanh from an exponential that cannot overflow
        small = tl.exp(-2.0 * tl.abs(score / softcap))
        score = tl.where(score < 0, -softcap, softcap) * (1.0 - small) / (1.0 + small)
    return score


@jit()
def _visible(
    j: tl.tensor, stop: tl.tensor, at: tl.tensor, sees: tl.tensor, bits: tl.tensor,
    trunk: tl.tensor, many: tl.tensor, nodes_at: tl.tensor, window: tl.tensor,
    windowed: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Which tokens see which of the slots ``j``; no token sees slots from ``stop`` on."""
    node = j - trunk
    known = (node >= 0) & (node < many)
    # A shift by the full number of bits is undefined.
    bit = (bits[:, None] >> tl.minimum(tl.maximum(node, 0), 62)[None, :]) & 1
    visible = ((j[None, :] < sees[:, None]) | ((bit != 0) & known[None, :])) & (j < stop)[None, :]
    if windowed:
        there = tl.where(known, tl.load(nodes_at + node, mask=known, other=0), j)
        visible = visible & (at[:, None] - there[None, :] < window)
    return visible


@jit(do_not_specialize=["splits"])
def _join(
    out: tl.tensor, parts: tl.tensor, sums: tl.tensor, splits: tl.tensor,
    most_splits: tl.constexpr, dim: tl.constexpr, width: tl.constexpr,
) -> None:  # fmt: skip
    line = tl.program_id(0).to(tl.int64)
    part, place = tl.arange(0, most_splits), tl.arange(0, width)
    logs = tl.load(sums + line * splits + part, mask=part < splits, other=float("-inf"))
    highest = tl.max(logs, 0)
    weight = tl.exp(logs - tl.where(highest == float("-inf"), 0.0, highest))
    # A part in which no token sees a slot may not have been written.
    lies = parts + (line * splits + part)[:, None] * dim + place[None, :]
    here = (logs > float("-inf"))[:, None] & (place[None, :] < dim)
    mixed = tl.sum(tl.load(lies, mask=here, other=0.0) * weight[:, None], 0)
    total = tl.sum(weight, 0)
    mixed = mixed / tl.where(total == 0.0, 1.0, total)
    tl.store(out + line * dim + place, mixed.to(out.dtype.element_ty), mask=place < dim)


class FusedRows:
    """Computes attention for all rows of a step; see `RowByRow`.

    Args:
        longest: Maximum slots of a row.
    """

    def __init__(self, pool: Tensor, longest: int) -> None:
        self._pool = pool
        self._longest = longest

    def begin(self, host: StepLayout[Int64], device: StepLayout[Tensor]) -> None:
        """Sets the layout of a step."""
        self._step = device

    def attend(
        self, layer: int, query: Tensor, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        """See `RowCache.attend`."""
        return attend(query, self._pool[layer], self._step, scale, self._longest, window, softcap)
