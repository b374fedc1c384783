"""Chooses the target's token at each visited place of the draft trees, in compiled code.

All rows of a step are sampled in one call. A token is drawn from a line of logits by temperature,
min_p, top_k and top_p. A line is float64 and divided into blocks. The greatest logit of each block
is stored too, so blocks with only small logits are skipped. The vocabulary is never sorted.
"""

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tasc_draft import Drafts
from tasc_engine.kernels.cpu.compiling import arithmetic, bits, borrowing
from tasc_engine.kernels.cpu.layers import _first_greatest, _greatest
from tasc_engine.kernels.cpu.simd import (
    WIDTH,
    add,
    broadcast,
    double,
    exp,
    greatest,
    load,
    maximum,
    mul,
    only,
    store,
    sub,
    to_float32,
    total,
    zeros,
)
from tasc_engine.layout import Int32
from tasc_engine.sampling.accept import Accepted, EmitLimits, Trees, advance
from tasc_engine.sampling.row_parameters import Allowed, Rules, biased, hold, penalised

BLOCK = 4 * WIDTH
_MIN_EXPONENT = -708.0  # at and below this exponent, `exp` is 0
_MAX_FLOAT = float(np.finfo(np.float64).max)
# Floors that only save work are lowered by this much, so that rounding cannot lift them above the
# exact floors.
_SLACK = 1e-6
_HALVINGS = 6


class DrawScratch(NamedTuple):
    """Memory for one line.

    Attributes:
        line: ``float64[blocks * BLOCK]`` logits; minus infinity where no token may be chosen.
        tops: ``float64[blocks]`` the greatest logit of each block.
        sums: ``float64[blocks]`` the sum of weights of each block.
        ids: ``int32[blocks * BLOCK]`` the remaining tokens, ascending.
        order: ``int32[blocks * BLOCK]`` working memory for ranking.
        values, weights: ``float64[blocks * BLOCK]`` logits and weights of the remaining tokens.
    """

    line: NDArray[np.float64]
    tops: NDArray[np.float64]
    sums: NDArray[np.float64]
    ids: NDArray[np.int32]
    order: NDArray[np.int32]
    values: NDArray[np.float64]
    weights: NDArray[np.float64]


def scratch_for(width: int) -> DrawScratch:
    """Allocates memory for lines of ``width`` logits."""
    blocks = -(-width // BLOCK)
    # One block more than the logits need, since loops also write past the last token they keep.
    long = (blocks + 1) * BLOCK
    line, values, weights = (np.zeros(long) for _ in range(3))
    ids, order = (np.zeros(long, np.int32) for _ in range(2))
    return DrawScratch(line, np.zeros(blocks), np.zeros(blocks), ids, order, values, weights)


@borrowing
def draw(
    s: Any, width: int, best: float, temperature: float, top_p: float, top_k: int, min_p: float,
    number: float,
) -> int:  # fmt: skip
    """Draws a token with a random number, by the inverse distribution function in id order.

    Args:
        s: A `DrawScratch` with filled ``line`` and ``tops``.
        best: The greatest logit; it is finite.
        number: The random number, in [0, 1).
    """
    scale = min(1.0 / temperature, _MAX_FLOAT)
    if top_k >= width:
        top_k = 0
    if top_p == 1.0 and top_k == 0 and min_p == 0.0:
        return _drawn_of_all(s, best, scale, number)
    floor, whole = -np.inf, 0.0
    if min_p > 0.0:
        floor = best + temperature * (math.log(min_p) - _SLACK)
    if top_k:
        floor = max(floor, _top_k_floor(s, top_k))
    if top_k == 0 and min_p == 0.0:
        whole = _sum_blocks(s, best, scale)
        floor = best + temperature * (math.log(_top_p_floor(s, width, whole, top_p)) - _SLACK)
    n = _collect(s, floor)
    _weigh(s.values, 0, n, best, scale, s.weights)
    if min_p > 0.0:
        n = _keep_likely(s, n, min_p)
    if 0 < top_k < n:
        n = _keep_until(s, n, _last_kept(s.values, s.weights, True, s.order, n, float(top_k)))
    if top_p < 1.0:
        goal = top_p * (whole if whole > 0.0 else _sum(s.weights, n))
        n = _keep_until(s, n, _last_kept(s.values, s.weights, False, s.order, n, goal))
    return s.ids[_drawn(s.weights, 0, n, number * _sum(s.weights, n))]


@borrowing
def _drawn_of_all(s: Any, best: float, scale: float, number: float) -> int:
    goal = number * _sum_blocks(s, best, scale)
    found, before = 0, 0.0
    for block in range(len(s.sums)):
        if s.sums[block] > 0.0:
            found = block
            if before + s.sums[block] > goal:
                break
            before += s.sums[block]
    at = found * BLOCK
    return at + _drawn(s.weights, at, BLOCK, goal - before)


@borrowing
def _drawn(weights: Any, at: int, n: int, goal: float) -> int:
    """The first index whose cumulative weight exceeds a goal, else the last index with a weight."""
    found, running = 0, 0.0
    for i in range(n):
        if weights[at + i] > 0.0:
            found = i
            running += weights[at + i]
            if running > goal:
                break
    return found


@borrowing
def _sum_blocks(s: Any, best: float, scale: float) -> float:
    """Computes all weights and returns their sum; writes the sum of each block to ``sums``."""
    whole = 0.0
    for block in range(len(s.tops)):
        s.sums[block] = 0.0
        if (s.tops[block] - best) * scale > _MIN_EXPONENT:
            s.sums[block] = _weigh(s.line, block * BLOCK, BLOCK, best, scale, s.weights)
            whole += s.sums[block]
    return whole


@borrowing
def _weigh(values: Any, at: int, n: int, best: float, scale: float, weights: Any) -> float:
    """Writes the weights of values; returns their sum if ``n`` is a multiple of `WIDTH`."""
    shift, factor, found = broadcast(best), broadcast(scale), zeros(weights)
    for i in range(at, at + n, WIDTH):
        weight = exp(mul(sub(load(values, i), shift), factor))
        store(weights, i, weight)
        found = add(found, weight)
    return total(found)


@arithmetic
def _sum(weights: Any, n: int) -> float:
    found = 0.0
    for i in range(n):
        found += weights[i]
    return found


@borrowing
def _top_p_floor(s: Any, width: int, whole: float, top_p: float) -> float:
    """A floor above 0; the weights that reach it make up at least ``top_p`` of ``whole``."""
    # Weights below ``low`` add up to less than the share that top_p leaves out.
    low, high = (1.0 - top_p) * whole / width, 1.0
    for _ in range(_HALVINGS):
        middle = math.sqrt(low * high)
        if _sum_from(s, middle) > top_p * whole * (1.0 + _SLACK):
            low = middle
        else:
            high = middle
    return low


@arithmetic
def _sum_from(s: Any, floor: float) -> float:
    """The sum of the weights that are at least ``floor``."""
    found = 0.0
    for block in range(len(s.sums)):
        if s.sums[block] >= floor:
            for i in range(block * BLOCK, (block + 1) * BLOCK):
                found += s.weights[i] if s.weights[i] >= floor else 0.0
    return found


@borrowing
def _top_k_floor(s: Any, top_k: int) -> float:
    """A logit that at least ``top_k`` tokens reach, one in each of ``top_k`` blocks."""
    blocks = len(s.tops)
    if top_k > blocks:
        return -np.inf
    return s.tops[_last_kept(s.tops, s.sums, True, s.order, blocks, float(top_k))]


@borrowing
def _collect(s: Any, floor: float) -> int:
    """Collects the tokens that reach a floor, in id order."""
    n = 0
    for block in range(len(s.tops)):
        if s.tops[block] >= floor:
            for i in range(block * BLOCK, (block + 1) * BLOCK):
                s.ids[n] = i
                s.values[n] = s.line[i]
                n += (s.line[i] >= floor) & (s.line[i] > -np.inf)
    return n


@borrowing
def _keep_likely(s: Any, n: int, floor: float) -> int:
    kept = 0
    for i in range(n):
        s.ids[kept], s.values[kept], s.weights[kept] = s.ids[i], s.values[i], s.weights[i]
        kept += s.weights[i] >= floor
    return kept


@borrowing
def _keep_until(s: Any, n: int, last: int) -> int:
    """Keeps the tokens that are not ranked after ``last``."""
    value, kept = s.values[last], 0
    for i in range(n):
        first = (s.values[i] > value) | ((s.values[i] == value) & (i <= last))
        s.ids[kept], s.values[kept], s.weights[kept] = s.ids[i], s.values[i], s.weights[i]
        kept += first
    return kept


@borrowing
def _last_kept(values: Any, weights: Any, counted: bool, order: Any, n: int, goal: float) -> int:
    """The index, in order of rank, at which the sum of weights reaches a goal; else the last one.

    The greatest value ranks first; of equal values, the first one. The expected time is linear in
    ``n`` (quickselect; Hoare 1961), with weights summed on the way.

    Args:
        counted: Whether each token has weight 1, regardless of ``weights``.
        order: Overwritten.
        goal: A number above 0.
    """
    for i in range(n):
        order[i] = i
    low, high, done = 0, n, 0.0
    while True:
        middle, before = _split(values, weights, counted, order, low, high)
        pivot = order[middle]
        upto = done + before + (1.0 if counted else weights[pivot])
        if done + before >= goal:
            high = middle
        elif upto >= goal or middle + 1 == high:
            return pivot
        else:
            low, done = middle + 1, upto


@borrowing
def _split(
    values: Any, weights: Any, counted: bool, order: Any, low: int, high: int
) -> tuple[int, float]:
    """Partitions a range around its middle element.

    Returns the new index of this element, and the sum of the weights before it.
    """
    middle = (low + high) // 2
    pivot = order[middle]
    order[middle] = order[high - 1]
    value, to, before = values[pivot], low, 0.0
    for j in range(low, high - 1):
        i = order[j]
        first = (values[i] > value) | ((values[i] == value) & (i < pivot))
        # No branches, which would be mispredicted half of the time.
        order[j] = order[to]
        order[to] = i
        to += first
        before += first * (1.0 if counted else weights[i])
    order[high - 1] = order[to]
    order[to] = pivot
    return to, before


class Masks(NamedTuple):
    """The fields of `Allowed` for compiled code; all empty if every token is allowed.

    Attributes:
        only: See `Allowed`; empty if all places have logits.
        logits_of: ``int32[M]`` index of the logits of each place; empty if ``only`` is empty.
    """

    masks: NDArray[np.uint32]
    mask_of: Int32
    only: Int32
    logits_of: Int32


_NOTHING = np.zeros(0, np.int32)
_NO_MASKS = Masks(np.zeros((0, 0), np.uint32), _NOTHING, _NOTHING, _NOTHING)


def choose(
    logits: Tensor, rows: Int32, drafts: Drafts, allowed: Allowed | None, limits: EmitLimits,
    rules: Rules, scratch: DrawScratch,
) -> Accepted:  # fmt: skip
    """Implements `Sampler.start_choice` on a CPU."""
    found, masks, flat = Accepted.none(drafts), _NO_MASKS, bits(logits.contiguous())
    if allowed is not None:
        only = _NOTHING if allowed.only is None else allowed.only
        logits_of = np.cumsum(only < 0, dtype=np.int32) - np.int32(1)
        masks = Masks(allowed.masks, allowed.mask_of, only, logits_of)
    _choose(flat, logits.shape[1], rows, Trees.of(drafts), masks, limits, rules, scratch, found)
    return found


@borrowing
def _choose(
    logits: Any, width: int, rows: Any, trees: Any, masks: Any, limits: Any, rules: Any, s: Any,
    found: Any,
) -> None:  # fmt: skip
    for i in range(len(rows)):
        row, root, node = rows[i], trees.offsets[i] + i, -1
        position, distinct = rules.answered[row] - rules.first[row], rules.distinct[row]
        while True:
            place = root + 1 + node
            mask = masks.mask_of[place] if len(masks.mask_of) else -1
            number = rules.numbers[row, position]
            if len(masks.only) and masks.only[place] >= 0:
                token = np.int64(masks.only[place])
            else:
                at = masks.logits_of[place] if len(masks.only) else place
                token = _token(logits, at, width, masks.masks, mask, rules, row, number, s)
            child = advance(trees, limits, i, node, token, found)
            if child < 0:
                break
            node, position = child, position + 1
            if rules.penalises[row]:
                hold(rules, row, token)
        if rules.penalises[row]:
            _release_path(trees, i, node, rules, row)
            rules.distinct[row] = distinct


@borrowing
def _release_path(trees: Any, i: int, node: int, rules: Any, row: int) -> None:
    """Releases the held draft tokens, since they are not part of the answer yet."""
    while node >= 0:
        x = trees.offsets[i] + node
        rules.held[row, trees.tokens[x]] -= 1
        node = trees.parents[x]


@borrowing
def _token(
    logits: Any, place: int, width: int, masks: Any, mask: int, rules: Any, row: int,
    number: float, s: Any,
) -> int:  # fmt: skip
    if rules.plain[row] and mask < 0:
        return _first_greatest(logits, place * width, width)
    if not _read(logits, place * width, width, masks, mask, s):
        return -1
    _adjust(rules, row, s)
    best = _greatest(s.tops, 0, len(s.tops))
    if best == -np.inf:
        return -1
    parameters = rules.parameters
    temperature = parameters.temperature[row]
    if temperature == 0.0:
        return _first(s, best)
    return draw(
        s, width, best, temperature, parameters.top_p[row], parameters.top_k[row],
        parameters.min_p[row], number,
    )  # fmt: skip


@borrowing
def _read(logits: Any, at: int, width: int, masks: Any, mask: int, s: Any) -> bool:
    """Fills ``line`` and ``tops`` with allowed logits; False if one is NaN or positive infinity."""
    highest, whole = broadcast(to_float32(logits[at])), width // BLOCK * BLOCK
    allowed: Any = 0xFFFF
    for begin in range(0, whole, BLOCK):
        top = broadcast(-np.inf)
        for i in range(begin, begin + BLOCK, WIDTH):
            x = load(logits, at + i)
            highest = maximum(highest, x)
            if mask >= 0:
                allowed = np.int64(masks[mask, i >> 5]) >> (i & 16)
            wide = only(double(x), allowed)
            top = maximum(top, wide)
            store(s.line, i, wide)
        s.tops[begin // BLOCK] = greatest(top)
    readable = greatest(highest) < np.inf
    if whole < width and not _read_rest(logits, at, whole, width, masks, mask, s):
        return False
    return readable


@borrowing
def _read_rest(logits: Any, at: int, begin: int, width: int, masks: Any, mask: int, s: Any) -> bool:
    readable, top = True, -np.inf
    for i in range(begin, begin + BLOCK):
        s.line[i] = -np.inf
        if i < width:
            logit = np.float64(to_float32(logits[at + i]))
            if not logit < np.inf:
                readable = False
            if mask < 0 or np.int64(masks[mask, i >> 5]) >> (i & 31) & 1:
                s.line[i] = logit
                top = max(top, logit)
    s.tops[begin // BLOCK] = top
    return readable


@borrowing
def _adjust(rules: Any, row: int, s: Any) -> None:
    for j in range(rules.biases[row]):
        token = rules.bias_ids[row, j]
        _put(s, token, biased(rules, row, j, s.line[token]))
    if rules.penalises[row]:
        for j in range(rules.distinct[row]):
            token = rules.held_ids[row, j]
            _put(s, token, penalised(rules, row, token, s.line[token]))


@borrowing
def _put(s: Any, token: int, logit: float) -> None:
    """Changes a logit, and updates the greatest logit of its block."""
    before, block = s.line[token], token // BLOCK
    s.line[token] = logit
    if logit >= s.tops[block]:
        s.tops[block] = logit
    elif before == s.tops[block]:
        s.tops[block] = _greatest(s.line, block * BLOCK, BLOCK)


@borrowing
def _first(s: Any, best: float) -> int:
    """The first token with the greatest logit."""
    for block in range(len(s.tops)):
        if s.tops[block] == best:
            for i in range(block * BLOCK, (block + 1) * BLOCK):
                if s.line[i] == best:
                    return i
    return -1
