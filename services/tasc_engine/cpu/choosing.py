"""The target's token at each visited place of the rows' draft trees, by each row's rule: compiled.

All rows of a step in one call. It knows rules, no requests.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tasc_draft import Drafts
from tasc_engine.allowed import Allowed
from tasc_engine.cpu.bits import bits
from tasc_engine.cpu.compiling import borrowing
from tasc_engine.cpu.drawing import BLOCK, Scratch, draw
from tasc_engine.cpu.lanes import WIDTH, double, greatest, load, maximum, only, splat, store, widen
from tasc_engine.cpu.layers import _first_greatest, _greatest
from tasc_engine.cpu.penalties import biased, hold, penalised
from tasc_engine.cpu.rules import Int32, Int64, Rules

UNVISITED = -2


class Trees(NamedTuple):
    """See `Drafts`."""

    tokens: Int32
    parents: Int32
    offsets: Int32


class Masks(NamedTuple):
    """See `Allowed`; without places everything is allowed."""

    masks: NDArray[np.uint32]
    mask_of: Int32


_NO_MASKS = Masks(np.zeros((0, 0), np.uint32), np.zeros(0, np.int32))


def choose(
    logits: Tensor, rows: Int32, drafts: Drafts, allowed: Allowed | None, rules: Rules,
    scratch: Scratch,
) -> Int64:  # fmt: skip
    """See `Chooser.choose`; on a CPU."""
    chosen = np.full(len(logits), UNVISITED, np.int64)
    trees = Trees(drafts.tokens, drafts.parents, drafts.offsets)
    masks = _NO_MASKS if allowed is None else Masks(allowed.masks, allowed.mask_of)
    flat = bits(logits.contiguous())
    _choose(flat, logits.shape[1], rows, trees, masks, rules, scratch, chosen)
    return chosen


def leave_visited(chosen: Int64, drafts: Drafts) -> None:
    """Put ``UNVISITED`` to the places that a walk along ``int64[M]`` tokens does not come to."""
    _leave_visited(Trees(drafts.tokens, drafts.parents, drafts.offsets), chosen, chosen.copy())


@borrowing
def _choose(
    logits: Any, width: int, rows: Any, trees: Any, masks: Any, rules: Any, s: Any, chosen: Any
) -> None:
    for i in range(len(rows)):
        row, root, node = rows[i], trees.offsets[i] + i, -1
        position, distinct = rules.answered[row] - rules.first[row], rules.distinct[row]
        while True:
            place = root + 1 + node
            mask = masks.mask_of[place] if len(masks.mask_of) else -1
            number = rules.numbers[row, position]
            token = _token(logits, place, width, masks.masks, mask, rules, row, number, s)
            chosen[place] = token
            child = _child(trees, i, node, token)
            if child < 0:
                break
            node, position = child, position + 1
            if rules.penalises[row]:
                hold(rules, row, token)
        if rules.penalises[row]:
            _release_path(trees, i, node, rules, row)
            rules.distinct[row] = distinct


@borrowing
def _leave_visited(trees: Any, chosen: Any, all_chosen: Any) -> None:
    chosen[:] = UNVISITED
    for i in range(len(trees.offsets) - 1):
        root, node = trees.offsets[i] + i, -1
        while True:
            place = root + 1 + node
            chosen[place] = all_chosen[place]
            child = _child(trees, i, node, chosen[place])
            if child < 0:
                break
            node = child


@borrowing
def _child(trees: Any, i: int, node: int, token: int) -> int:
    """The first child with this token, of a node of the i-th tree; -1 if there is none."""
    begin, end = trees.offsets[i], trees.offsets[i + 1]
    for x in range(begin + node + 1, end):
        if trees.parents[x] == node and trees.tokens[x] == token:
            return x - begin
    return -1


@borrowing
def _release_path(trees: Any, i: int, node: int, rules: Any, row: int) -> None:
    """Tokens of a draft are no part of the answer yet."""
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
    temperature = rules.temperature[row]
    if temperature == 0.0:
        return _first(s, best)
    return draw(
        s, width, best, temperature, rules.top_p[row], rules.top_k[row], rules.min_p[row], number
    )  # fmt: skip


@borrowing
def _read(logits: Any, at: int, width: int, masks: Any, mask: int, s: Any) -> bool:
    """Fill ``line`` and ``tops`` with what is allowed; False where a logit is no number."""
    most, whole = splat(widen(logits[at])), width // BLOCK * BLOCK
    allowed: Any = 0xFFFF
    for begin in range(0, whole, BLOCK):
        top = splat(-np.inf)
        for i in range(begin, begin + BLOCK, WIDTH):
            x = load(logits, at + i)
            most = maximum(most, x)
            if mask >= 0:
                allowed = np.int64(masks[mask, i >> 5]) >> (i & 16)
            wide = only(double(x), allowed)
            top = maximum(top, wide)
            store(s.line, i, wide)
        s.tops[begin // BLOCK] = greatest(top)
    readable = greatest(most) < np.inf
    if whole < width and not _read_rest(logits, at, whole, width, masks, mask, s):
        return False
    return readable


@borrowing
def _read_rest(logits: Any, at: int, begin: int, width: int, masks: Any, mask: int, s: Any) -> bool:
    readable, top = True, -np.inf
    for i in range(begin, begin + BLOCK):
        s.line[i] = -np.inf
        if i < width:
            logit = np.float64(widen(logits[at + i]))
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
            token = rules.seen[row, j]
            _put(s, token, penalised(rules, row, token, s.line[token]))


@borrowing
def _put(s: Any, token: int, logit: float) -> None:
    """Change a logit; its block knows its greatest."""
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
