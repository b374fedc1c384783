"""Sampling rules and log-probabilities on a GPU, as kernels written in Triton.

Each call is two launches. The first adjusts the logits of all places in parallel, and stores the
greatest logit and the sum of weights of each block of tokens. The second has one program for each
place. It skips blocks with only small logits, collects the tokens that can be kept, finds the last
kept one by bisection over the bits of the logits, and draws. Nothing is sorted, and nothing waits
for the device. Logits and weights are float64, so the results equal those of the compiled code for
CPUs, except for rounding.

The loops end: a bisection halves 64 bits, and each other loop passes once over the tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

import torch
from numpy.typing import NDArray
from torch import Tensor

from tasc_engine.kernels import IN_PROMPT, MAX_LOGIT
from tasc_engine.kernels.gpu.compiling import REGISTERS, jit

try:
    import triton.language as tl
except ImportError:
    tl = None

Array = TypeVar("Array", NDArray[Any], Tensor)

MOST_ON_PATH: Final = 64  # maximum number of distinct tokens on the path to a place
BLOCK = 64  # tokens with one greatest logit and one sum of weights
TILE = 2048  # tokens that a program processes together
LOT = 256  # penalised or biased tokens that a program looks at together
# Logits processed together, by two launches: 110 places of a vocabulary of 152k tokens. Scratch
# memory takes 12 bytes for each logit.
_AT_ONCE = 1 << 24
# Multiplications and additions are not fused, so that penalties round as on a CPU.
OPTIONS: Final[dict[str, Any]] = {
    "num_warps": 8,
    "num_stages": 1,
    "maxnreg": REGISTERS,
    "enable_fp_fusion": False,
}

INTEGERS = (
    "place", "mask", "sums", "top_k", "token", "bias_begin", "bias_end", "held_begin", "held_end",
    "path_begin", "path_end",
)  # fmt: skip
FLOATS = ("number", "scale", "top_p", "min_p", "repetition", "presence", "frequency")


@dataclass(frozen=True)
class Inputs(Generic[Array]):
    """Inputs of P places: arrays on the host or tensors on the device.

    Attributes:
        integers: ``int64[P, *]`` with the columns `INTEGERS`: the line of logits; the index of the
            mask, -1 for none; 1 if sums of weights are needed; top_k, 0 for all tokens; the token
            to score; and the parts of the lists below that belong to the place.
        floats: ``float64[P, *]`` with the columns `FLOATS`: the random number; the inverse
            temperature, 0 for the greatest logit; and parameters of `Sampling`.
        bias_token: ``int32[*]`` tokens with a bias, distinct for each place.
        bias: ``float64[*]``.
        held_token: ``int32[*]`` tokens to penalise, distinct for each place.
        held: ``int32[*]`` how often each token is in the answer, and the flag `IN_PROMPT`.
        path_token, path_held: ``int32[*]`` the same for tokens on the path to a place. They replace
            equal tokens of ``held_token``.
        masks: ``int32[K, words]``; bit b of word w allows token ``32 * w + b``.
    """

    integers: Array
    floats: Array
    bias_token: Array
    bias: Array
    held_token: Array
    held: Array
    path_token: Array
    path_held: Array
    masks: Array


def choose(logits: Tensor, inputs: Inputs[Tensor], tokens: Tensor) -> None:
    """Chooses the token of each of ``inputs``' places, without waiting for the device.

    Args:
        logits: ``[M, V]`` of any floating dtype.
        tokens: ``int64[M]``; written at the places. -1 if a logit is NaN or positive infinity, or
            if no token is possible.
    """
    for scratch in _adjusted(logits, inputs):
        _choose[(scratch.places,)](
            scratch.line, scratch.ids, scratch.tops, scratch.sums, inputs.integers, inputs.floats,
            tokens, scratch.begin, logits.shape[1], scratch.blocks, integers=len(INTEGERS),
            floats=len(FLOATS), block=BLOCK, tile=TILE, **OPTIONS,
        )  # fmt: skip


def score(logits: Tensor, inputs: Inputs[Tensor], most: int) -> Tensor:
    """Natural log-probabilities of ``inputs``' tokens, and of the ``top_k`` likeliest tokens.

    Args:
        logits: As in `choose`.
        inputs: ``scale`` is 1 and ``sums`` is 1; ``top_k`` is at most ``most``.

    Returns:
        ``float64[P, 2 + 2 * most]``: the log-probability of the place's token; the number n of the
        likeliest tokens with a probability; n log-probabilities, in id order; and from column
        ``2 + most`` on their n ids. Of equal tokens, the first are taken. The first column is NaN
        if a logit is NaN or positive infinity, or if no token is possible.
    """
    shape = len(inputs.integers), 2 + 2 * most
    found = torch.empty(shape, dtype=torch.float64, device=logits.device)
    for scratch in _adjusted(logits, inputs):
        _score[(scratch.places,)](
            scratch.line, scratch.ids, scratch.tops, scratch.sums, inputs.integers, found,
            scratch.begin, scratch.blocks, most, integers=len(INTEGERS), block=BLOCK, tile=TILE,
            **OPTIONS,
        )  # fmt: skip
    return found


@dataclass(frozen=True)
class _Scratch:
    """Adjusted logits of the places from ``begin`` on.

    Attributes:
        line: ``float64[places, width]`` logits, minus infinity where no token may be chosen; the
            width is padded to whole tiles.
        ids: ``int32[places, width + blocks]`` for tokens, then blocks.
        tops: ``float64[places, blocks]`` the greatest logit of each block; infinity if a logit of
            the block is NaN or infinity.
        sums: ``float64[places, blocks]`` sums of weights relative to ``tops``.
    """

    begin: int
    places: int
    blocks: int
    line: Tensor
    ids: Tensor
    tops: Tensor
    sums: Tensor


def _adjusted(logits: Tensor, inputs: Inputs[Tensor]) -> Iterator[_Scratch]:
    """Adjusts the logits of some places after the other, all in the same memory."""
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    (places, _), width, device = inputs.integers.shape, logits.shape[1], logits.device
    tiles = -(-width // TILE)
    at_once, blocks = min(max(_AT_ONCE // width, 1), places), tiles * (TILE // BLOCK)
    line = torch.empty((at_once, tiles * TILE), dtype=torch.float64, device=device)
    ids = torch.empty((at_once, tiles * TILE + blocks), dtype=torch.int32, device=device)
    tops, sums = torch.empty((2, at_once, blocks), dtype=torch.float64, device=device)
    for begin in range(0, places, at_once):
        some = min(at_once, places - begin)
        _adjust[(some, tiles)](
            logits, line, tops, sums, inputs.integers, inputs.floats, inputs.bias_token,
            inputs.bias, inputs.held_token, inputs.held, inputs.path_token, inputs.path_held,
            inputs.masks, begin, logits.stride(0), width, inputs.masks.shape[1],
            integers=len(INTEGERS), floats=len(FLOATS), block=BLOCK, tile=TILE, lot=LOT,
            most_on_path=MOST_ON_PATH, most=MAX_LOGIT, flag=IN_PROMPT, **OPTIONS,
        )  # fmt: skip
        yield _Scratch(begin, some, blocks, line, ids, tops, sums)


# Inputs are parts of one buffer, so their addresses vary between steps; see `attention`.
_INPUTS = [
    "integers_of", "floats_of", "bias_token", "bias", "held_token", "held", "path_token",
    "path_held", "masks",
]  # fmt: skip


@jit(do_not_specialize=["begin", "words"], do_not_specialize_on_alignment=_INPUTS)
def _adjust(
    logits: tl.tensor, line: tl.tensor, tops: tl.tensor, sums: tl.tensor, integers_of: tl.tensor,
    floats_of: tl.tensor, bias_token: tl.tensor, bias: tl.tensor, held_token: tl.tensor,
    held: tl.tensor, path_token: tl.tensor, path_held: tl.tensor, masks: tl.tensor,
    begin: tl.tensor, stride: tl.tensor, width: tl.tensor, words: tl.tensor,
    integers: tl.constexpr, floats: tl.constexpr, block: tl.constexpr, tile: tl.constexpr,
    lot: tl.constexpr, most_on_path: tl.constexpr, most: tl.constexpr, flag: tl.constexpr,
) -> None:  # fmt: skip
    at, first, tiles = tl.program_id(0).to(tl.int64), tl.program_id(1) * tile, tl.num_programs(1)
    own, numbers = integers_of + (at + begin) * integers, floats_of + (at + begin) * floats
    each: tl.constexpr = tile // block
    ids = first + tl.arange(0, each)[:, None] * block + tl.arange(0, block)[None, :]
    inside = ids < width
    place, mask = tl.load(own), tl.load(own + 1)
    logit = tl.load(logits + place * stride + ids, mask=inside, other=float("-inf"))
    x = logit.to(tl.float64)
    readable = x < float("inf")  # False for NaN
    if mask >= 0:
        word = tl.load(masks + mask * words + (ids >> 5), mask=inside, other=0)
        x = tl.where(((word >> (ids & 31)) & 1) != 0, x, float("-inf"))
    line += at * (tiles * tile)
    bias_begin, bias_end = tl.load(own + 5), tl.load(own + 6)
    held_begin, held_end = tl.load(own + 7), tl.load(own + 8)
    path_begin, path_end = tl.load(own + 9), tl.load(own + 10)
    if (bias_end > bias_begin) | (held_end > held_begin) | (path_end > path_begin):
        tl.store(line + ids, x)
        tl.debug_barrier()
        for i in range(bias_begin, bias_end, lot):
            k = i + tl.arange(0, lot)
            token = tl.load(bias_token + k, mask=k < bias_end, other=-1)
            here = (token >= first) & (token < first + tile)
            added = tl.load(bias + k, mask=here, other=0.0)
            y = tl.load(line + token, mask=here, other=0.0) + added
            tl.store(line + token, tl.minimum(y, most), mask=here)
        tl.debug_barrier()
        p = path_begin + tl.arange(0, most_on_path)
        path = tl.load(path_token + p, mask=p < path_end, other=-1)
        on_tile = (path >= first) & (path < first + tile)
        counts = tl.load(path_held + p, mask=on_tile, other=0)
        _penalise(line, path, counts, on_tile, numbers, most, flag)
        for i in range(held_begin, held_end, lot):
            k = i + tl.arange(0, lot)
            token = tl.load(held_token + k, mask=k < held_end, other=-1)
            here = (token >= first) & (token < first + tile)
            on_path = tl.max((token[:, None] == path[None, :]).to(tl.int32), 1)
            here = here & (on_path == 0)
            many = tl.load(held + k, mask=here, other=0)
            _penalise(line, token, many, here, numbers, most, flag)
        tl.debug_barrier()
        x = tl.load(line + ids)
    x = tl.where(x == 0.0, 0.0, x)  # the bits of -0 differ from those of 0
    tl.store(line + ids, x)
    top = tl.max(tl.where(readable, x, float("inf")), 1)
    blocks = at * (tiles * each) + tl.program_id(1) * each + tl.arange(0, each)
    tl.store(tops + blocks, top)
    if tl.load(own + 2) != 0:
        shift = tl.where((top > float("-inf")) & (top < float("inf")), top, 0.0)[:, None]
        x = tl.where(readable, x, float("-inf"))
        tl.store(sums + blocks, tl.sum(_weight(x, shift, tl.load(numbers + 1)), 1))


@jit()
def _penalise(
    line: tl.tensor, token: tl.tensor, held: tl.tensor, here: tl.tensor, numbers: tl.tensor,
    most: tl.constexpr, flag: tl.constexpr,
) -> None:  # fmt: skip
    """Applies penalties in the order of `row_parameters.penalised`."""
    repetition, presence = tl.load(numbers + 4), tl.load(numbers + 5)
    x, count = tl.load(line + token, mask=here, other=0.0), held & ~flag
    x = tl.minimum(tl.where(x > 0.0, x / repetition, x * repetition), most)
    lower = x - presence - tl.load(numbers + 6) * count.to(tl.float64)
    tl.store(line + token, tl.where(count > 0, lower, x), mask=here)


@jit()
def _weight(x: tl.tensor, best: tl.tensor, scale: tl.tensor) -> tl.tensor:
    exponent = (x - best) * scale
    return tl.where(exponent > -708.0, tl.exp(tl.maximum(exponent, -708.0)), 0.0)


@jit()
def _key(x: tl.tensor) -> tl.tensor:
    """Integers in the order of float64 numbers; the function is its own inverse on the bits."""
    bits = x.to(tl.int64, bitcast=True)
    return bits ^ ((bits >> 63) & 0x7FFFFFFFFFFFFFFF)


@jit()
def _greatest(tops: tl.tensor, blocks: tl.tensor, tile: tl.constexpr) -> tl.tensor:
    highest = tl.full([tile], float("-inf"), tl.float64)
    for i in range(0, blocks, tile):
        j = i + tl.arange(0, tile)
        highest = tl.maximum(highest, tl.load(tops + j, mask=j < blocks, other=float("-inf")))
    return tl.max(highest, 0)


@jit()
def _sum_of(
    tops: tl.tensor, sums: tl.tensor, blocks: tl.tensor, best: tl.tensor, scale: tl.tensor,
    tile: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The sum of all weights, and the sum of the greatest weight of each block."""
    whole, high = tl.zeros([tile], tl.float64), tl.zeros([tile], tl.float64)
    for i in range(0, blocks, tile):
        j = i + tl.arange(0, tile)
        top = tl.load(tops + j, mask=j < blocks, other=float("-inf"))
        weight = _weight(top, best, scale)
        whole += weight * tl.load(sums + j, mask=j < blocks, other=0.0)
        high += weight
    return tl.sum(whole, 0), tl.sum(high, 0)


@jit()
def _last_kept(
    values: tl.tensor, n: tl.tensor, low: tl.tensor, goal: tl.tensor, best: tl.tensor,
    scale: tl.tensor, counted: tl.constexpr, tile: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The key of the value, in descending order, at which the sum of weights reaches a goal.

    Args:
        low: A key, at least that of minus infinity. If the weights above it sum to less than
            ``goal``, it is the result.
        goal: A number above 0.
        counted: Whether each value has weight 1.

    Returns:
        The key, and the sum of the weights of all greater values.
    """
    high, above = _key(best), tl.cast(0.0, tl.float64)
    # The weights above ``low`` sum to at least the goal, those above ``high`` to less.
    while low + 1 < high:
        middle = (low & high) + ((low ^ high) >> 1)
        total = tl.zeros([tile], tl.float64)
        lower, upper = tl.zeros([tile], tl.int64) + low, tl.zeros([tile], tl.int64) + high
        for i in range(0, n, tile):
            j = i + tl.arange(0, tile)
            x = tl.load(values + j, mask=j < n, other=float("-inf"))
            key = _key(x)
            over = key > middle
            if counted:
                total += over.to(tl.float64)
            else:
                total += tl.where(over, _weight(x, best, scale), 0.0)
            lower = tl.maximum(lower, tl.where(over, low, key))
            upper = tl.minimum(upper, tl.where(over, key, high))
        found = tl.sum(total, 0)
        reached = found >= goal
        # Both ends move on to the next value, so that few steps are needed.
        low = tl.where(reached, tl.min(upper, 0) - 1, low)
        high = tl.where(reached, high, tl.max(lower, 0))
        above = tl.where(reached, above, found)
    return high, above


@jit()
def _collect(
    line: tl.tensor, ids: tl.tensor, order: tl.tensor, tops: tl.tensor, blocks: tl.tensor,
    floor: tl.tensor, least: tl.tensor, best: tl.tensor, scale: tl.tensor, block: tl.constexpr,
    tile: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Moves the tokens that reach two floors to the begin of ``line``, in id order.

    Args:
        ids: Written, the ids of these tokens.
        order: Overwritten.
        floor: The least key.
        least: The least weight.

    Returns:
        The number of tokens.
    """
    some = blocks * 0
    for i in range(0, blocks, tile):
        j = i + tl.arange(0, tile)
        top = tl.load(tops + j, mask=j < blocks, other=float("-inf"))
        # Weights of equal order may round otherwise.
        near = _weight(top, best, scale) >= least * (1.0 - 1e-6)
        holds = (_key(top) >= floor) & near & (top > float("-inf"))
        to = some + tl.cumsum(holds.to(tl.int32), 0) - 1
        tl.store(order + to, j, mask=holds)
        some += tl.sum(holds.to(tl.int32), 0)
    tl.debug_barrier()
    n, each = blocks * 0, tl.arange(0, tile)
    for i in range(0, some, tile // block):
        j = i + each // block
        token = tl.load(order + j, mask=j < some, other=0) * block + each % block
        x = tl.load(line + token, mask=j < some, other=float("-inf"))
        kept = (_key(x) >= floor) & (_weight(x, best, scale) >= least) & (x > float("-inf"))
        to = n + tl.cumsum(kept.to(tl.int32), 0) - 1
        tl.debug_barrier()  # a token moves to a place that has been read
        tl.store(line + to, x, mask=kept)
        tl.store(ids + to, token, mask=kept)
        n += tl.sum(kept.to(tl.int32), 0)
    tl.debug_barrier()
    return n


@jit()
def _is_kept(x: tl.tensor, seen: tl.tensor, cut: tl.tensor, equals: tl.tensor) -> tl.tensor:
    """Whether values are above a key, or are among the first of those with this key.

    Args:
        seen: Number of earlier values with the key.
        equals: ``float64``, number of values with this key that are kept.

    Returns:
        ``bool[*]``, and ``seen`` for the next values.
    """
    key = _key(x)
    equal = (key == cut).to(tl.int32)
    rank = (seen + tl.cumsum(equal, 0)).to(tl.float64)
    return (key > cut) | ((equal != 0) & (rank <= equals)), seen + tl.sum(equal, 0)


@jit()
def _sum_kept(
    values: tl.tensor, n: tl.tensor, cut: tl.tensor, equals: tl.tensor, best: tl.tensor,
    scale: tl.tensor, tile: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    total, seen = tl.cast(0.0, tl.float64), n * 0
    for i in range(0, n, tile):
        j = i + tl.arange(0, tile)
        x = tl.load(values + j, mask=j < n, other=float("-inf"))
        kept, seen = _is_kept(x, seen, cut, equals)
        total += tl.sum(tl.where(kept, _weight(x, best, scale), 0.0), 0)
    return total


@jit()
def _drawn(
    values: tl.tensor, n: tl.tensor, cut: tl.tensor, equals: tl.tensor, goal: tl.tensor,
    best: tl.tensor, scale: tl.tensor, tile: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The first index whose cumulative weight exceeds a goal, else the last with a weight."""
    running, seen, found, last = tl.cast(0.0, tl.float64), n * 0, n, n * 0 - 1
    for i in range(0, n, tile):
        j = i + tl.arange(0, tile)
        x = tl.load(values + j, mask=j < n, other=float("-inf"))
        kept, seen = _is_kept(x, seen, cut, equals)
        weight = tl.where(kept, _weight(x, best, scale), 0.0)
        # Rounding may increase a parallel sum at tokens without weight.
        over = (running + tl.cumsum(weight, 0) > goal) & (weight > 0.0)
        found = tl.minimum(found, tl.min(tl.where(over, j, n), 0))
        last = tl.maximum(last, tl.max(tl.where(weight > 0.0, j, -1), 0))
        running += tl.sum(weight, 0)
    return tl.where(found < n, found, last)


@jit()
def _block_drawn(
    tops: tl.tensor, sums: tl.tensor, blocks: tl.tensor, goal: tl.tensor, best: tl.tensor,
    scale: tl.tensor, tile: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The block that `_drawn` would find, and the rest of the goal."""
    running, rest = tl.cast(0.0, tl.float64), tl.cast(0.0, tl.float64)
    found, last = blocks, blocks * 0
    for i in range(0, blocks, tile):
        j = i + tl.arange(0, tile)
        top = tl.load(tops + j, mask=j < blocks, other=float("-inf"))
        weight = _weight(top, best, scale) * tl.load(sums + j, mask=j < blocks, other=0.0)
        upto = running + tl.cumsum(weight, 0)
        here = tl.min(tl.where((upto > goal) & (weight > 0.0), j, blocks), 0)
        before = tl.sum(tl.where(j == here, upto - weight, 0.0), 0)
        rest = tl.where((found == blocks) & (here < blocks), goal - before, rest)
        found = tl.minimum(found, here)
        last = tl.maximum(last, tl.max(tl.where(weight > 0.0, j, 0), 0))
        running += tl.sum(weight, 0)
    rest = tl.where(found < blocks, rest, float("inf"))
    return tl.where(found < blocks, found, last), rest


@jit()
def _first(
    line: tl.tensor, tops: tl.tensor, blocks: tl.tensor, best: tl.tensor, block: tl.constexpr,
    tile: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The first token with the greatest logit."""
    found = blocks
    for i in range(0, blocks, tile):
        j = i + tl.arange(0, tile)
        top = tl.load(tops + j, mask=j < blocks, other=float("-inf"))
        found = tl.minimum(found, tl.min(tl.where(top == best, j, blocks), 0))
    j = found * block + tl.arange(0, block)
    return tl.min(tl.where(tl.load(line + j) == best, j, (found + 1) * block), 0)


@jit(do_not_specialize=["begin", "width"], do_not_specialize_on_alignment=_INPUTS[:2])
def _choose(
    line: tl.tensor, ids: tl.tensor, tops: tl.tensor, sums: tl.tensor, integers_of: tl.tensor,
    floats_of: tl.tensor, tokens: tl.tensor, begin: tl.tensor, width: tl.tensor,
    blocks: tl.tensor, integers: tl.constexpr, floats: tl.constexpr, block: tl.constexpr,
    tile: tl.constexpr,
) -> None:  # fmt: skip
    at = tl.program_id(0).to(tl.int64)
    own, numbers = integers_of + (at + begin) * integers, floats_of + (at + begin) * floats
    line, ids = line + at * (blocks * block), ids + at * (blocks * block + blocks)
    tops, sums = tops + at * blocks, sums + at * blocks
    token = blocks * 0 - 1
    best = _greatest(tops, blocks, tile)
    number, scale = tl.load(numbers), tl.load(numbers + 1)
    top_p, min_p, top_k = tl.load(numbers + 2), tl.load(numbers + 3), tl.load(own + 3)
    if (best > float("-inf")) & (best < float("inf")):
        if scale == 0.0:
            token = _first(line, tops, blocks, best, block, tile)
        elif (top_p == 1.0) & (min_p == 0.0) & (top_k == 0):
            whole, _ = _sum_of(tops, sums, blocks, best, scale, tile)
            found, rest = _block_drawn(tops, sums, blocks, number * whole, best, scale, tile)
            lowest = _key(best * 0.0 - float("inf"))
            part, first = blocks * 0 + block, found * block
            token = first + _drawn(line + first, part, lowest, best, rest, best, scale, block)
        else:
            token = _drawn_of_few(
                line, ids, ids + blocks * block, tops, sums, blocks, width, number, scale, top_p,
                min_p, top_k, best, block, tile,
            )  # fmt: skip
    tl.store(tokens + tl.load(own), token.to(tl.int64))


@jit()
def _drawn_of_few(
    line: tl.tensor, ids: tl.tensor, order: tl.tensor, tops: tl.tensor, sums: tl.tensor,
    blocks: tl.tensor, width: tl.tensor, number: tl.tensor, scale: tl.tensor, top_p: tl.tensor,
    min_p: tl.tensor, top_k: tl.tensor, best: tl.tensor, block: tl.constexpr, tile: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The drawn token, if min_p, top_k or top_p keeps only some tokens."""
    lowest = _key(best * 0.0 - float("inf"))
    floor, least, whole = lowest, min_p, tl.cast(0.0, tl.float64)
    if (top_k > 0) & (top_k <= blocks):
        # At least ``top_k`` tokens reach this floor, one in each of as many blocks.
        floor, _ = _last_kept(tops, blocks, lowest, top_k.to(tl.float64), best, scale, True, tile)
    if (top_k == 0) & (min_p == 0.0):
        whole, high = _sum_of(tops, sums, blocks, best, scale, tile)
        enough = top_p * whole * (1.0 + 1e-6)
        if high >= enough:
            floor, _ = _last_kept(tops, blocks, lowest, enough, best, scale, False, tile)
        else:
            # Smaller weights add up to less than the share that top_p leaves out.
            least = (1.0 - top_p) * whole / width * (1.0 - 1e-6)
    n = _collect(line, ids, order, tops, blocks, floor, least, best, scale, block, tile)
    cut, equals = lowest, tl.cast(0.0, tl.float64)
    if (top_k > 0) & (top_k < n):
        count = top_k.to(tl.float64)
        cut, above = _last_kept(line, n, lowest, count, best, scale, True, tile)
        equals = count - above
    if top_p < 1.0:
        total = _sum_kept(line, n, cut, equals, best, scale, tile)
        goal = tl.minimum(top_p * tl.where(whole > 0.0, whole, total), total)
        last, above = _last_kept(line, n, cut - 1, goal, best, scale, False, tile)
        bits = last ^ ((last >> 63) & 0x7FFFFFFFFFFFFFFF)
        weight = _weight(bits.to(tl.float64, bitcast=True), best, scale)
        count = tl.ceil((goal - above) / weight)
        equals = tl.where(last == cut, tl.minimum(count, equals), count)
        cut = last
    goal = number * _sum_kept(line, n, cut, equals, best, scale, tile)
    found = _drawn(line, n, cut, equals, goal, best, scale, tile)
    return tl.load(ids + found)


@jit(do_not_specialize=["begin", "most"], do_not_specialize_on_alignment=_INPUTS[:1])
def _score(
    line: tl.tensor, ids: tl.tensor, tops: tl.tensor, sums: tl.tensor, integers_of: tl.tensor,
    found: tl.tensor, begin: tl.tensor, blocks: tl.tensor, most: tl.tensor,
    integers: tl.constexpr, block: tl.constexpr, tile: tl.constexpr,
) -> None:  # fmt: skip
    at = tl.program_id(0).to(tl.int64)
    own = integers_of + (at + begin) * integers
    found += (at + begin) * (2 + 2 * most)
    line, ids = line + at * (blocks * block), ids + at * (blocks * block + blocks)
    tops, sums = tops + at * blocks, sums + at * blocks
    best = _greatest(tops, blocks, tile)
    chance, some = tl.cast(float("nan"), tl.float64), blocks * 0
    if (best > float("-inf")) & (best < float("inf")):
        one, top_k = best * 0.0 + 1.0, tl.load(own + 3)
        lowest = _key(best * 0.0 - float("inf"))
        whole, _ = _sum_of(tops, sums, blocks, best, one, tile)
        log = tl.log(whole)
        chance = tl.load(line + tl.load(own + 4)) - best - log
        if top_k > 0:
            floor, count = lowest, top_k.to(tl.float64)
            if top_k <= blocks:
                floor, _ = _last_kept(tops, blocks, lowest, count, best, one, True, tile)
            n = _collect(
                line, ids, ids + blocks * block, tops, blocks, floor,
                tl.cast(0.0, tl.float64), best, one, block, tile,
            )  # fmt: skip
            cut, equals = lowest, tl.cast(0.0, tl.float64)
            if top_k < n:
                cut, above = _last_kept(line, n, lowest, count, best, one, True, tile)
                equals = count - above
            seen = blocks * 0
            for i in range(0, n, tile):
                j = i + tl.arange(0, tile)
                x = tl.load(line + j, mask=j < n, other=float("-inf"))
                kept, seen = _is_kept(x, seen, cut, equals)
                kept = kept & (j < n)
                to = 2 + some + tl.cumsum(kept.to(tl.int32), 0) - 1
                token = tl.load(ids + j, mask=kept, other=0)
                tl.store(found + to, x - best - log, mask=kept)
                tl.store(found + most + to, token.to(tl.float64), mask=kept)
                some += tl.sum(kept.to(tl.int32), 0)
    tl.store(found, chance)
    tl.store(found + 1, some.to(tl.float64))
