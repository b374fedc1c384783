"""The target's tokens by the rows' rules as tensor operations, for logits on any device.

All places are looked at together, visited or not: one copy to the device of what the rules need,
one of tokens back. What is chosen is what compiled code chooses, but for rounding.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from tasc_draft import Drafts
from tasc_engine.allowed import Allowed
from tasc_engine.choosing_inputs import Inputs, inputs_of, on_device
from tasc_engine.cpu.choosing import leave_visited
from tasc_engine.cpu.penalties import MOST
from tasc_engine.cpu.rules import IN_PROMPT, Int32, Int64, Rules
from tasc_engine.operations import first_greatest

_AT_ONCE = 1 << 22  # logits that are looked at together: some ten times their 32 MB are held
_RANKED = 1024  # likeliest tokens that are ranked at first; seldom are they too few
_NOTHING = -torch.inf


@torch.inference_mode()
def choose(
    logits: Tensor, rows: Int32, drafts: Drafts, allowed: Allowed | None, rules: Rules
) -> Int64:
    """See `Chooser.choose`."""
    inputs = inputs_of(rows, drafts, allowed, rules)
    chosen = first_greatest(logits)
    if len(inputs.place):
        held = on_device(inputs, logits.device)
        chosen[held.place] = _by_rule(logits, len(rows), inputs, held)
    found: Int64 = chosen.cpu().numpy()
    leave_visited(found, drafts)
    return found


def _by_rule(
    logits: Tensor, rows: int, host: Inputs[NDArray[Any]], all_held: Inputs[Tensor]
) -> Tensor:
    """``int64[P]`` the tokens of the places that are not plain."""
    width, held = logits.shape[1], all_held
    counts = biases = None
    if len(host.held) or len(host.path_at):
        counts = held.held.new_zeros(rows, width)
        counts[held.held_slot, held.held_token] = held.held
    if len(host.bias):
        biases = held.bias.new_zeros(rows, width)
        biases[held.bias_slot, held.bias_token] = held.bias
    found, at_once = [], max(_AT_ONCE // width, 1)
    for begin in range(0, len(host.place), at_once):
        paths = slice(*np.searchsorted(host.path_at, (begin, begin + at_once)).tolist())
        part = all_held.part(begin, begin + at_once, paths)
        x = logits.index_select(0, part.place).double()
        readable = (x < torch.inf).all(-1)  # not what is no number
        x = _adjusted(x, part, counts, biases)
        chosen, here = first_greatest(x), slice(begin, begin + at_once)
        if host.temperature[here].any():
            cuts = (host.top_k[here] > 0).any() or (host.top_p[here] < 1).any()
            chosen = torch.where(part.temperature > 0, _drawn(x, part, bool(cuts)), chosen)
        found.append(chosen.masked_fill(~readable | (x == _NOTHING).all(-1), -1))
    return torch.cat(found)


def _adjusted(
    x: Tensor, part: Inputs[Tensor], counts: Tensor | None, biases: Tensor | None
) -> Tensor:
    """``float64[P, V]`` logits with biases, penalties and masks."""
    if biases is not None:
        x = (x + biases[part.slot]).clamp_(max=MOST)
    if counts is not None:
        x = _penalised(x, part, counts)
    if len(part.masks):
        bit = torch.arange(32, dtype=torch.int32, device=x.device)
        words = part.masks[part.mask_of.clamp(min=0)].unsqueeze(-1)
        barred = ((words >> bit) & 1).flatten(1)[:, : x.shape[1]] == 0
        x = x.masked_fill(barred & (part.mask_of >= 0).unsqueeze(-1), _NOTHING)
    return x


def _penalised(x: Tensor, part: Inputs[Tensor], counts: Tensor) -> Tensor:
    own, one = counts[part.slot], counts.new_ones(())
    own.index_put_((part.path_at, part.path_token), one, accumulate=True)
    repetition = part.repetition_penalty.unsqueeze(-1)
    repeated = torch.where(x > 0, x / repetition, x * repetition).clamp_(max=MOST)
    x, count = torch.where(own != 0, repeated, x), own & ~IN_PROMPT
    x = torch.where(count > 0, x - part.presence_penalty.unsqueeze(-1), x)
    return x - part.frequency_penalty.unsqueeze(-1) * count


def _drawn(x: Tensor, part: Inputs[Tensor], cuts: bool) -> Tensor:
    """``int64[P]`` tokens of the random numbers; any where the temperature is 0."""
    temperature = part.temperature.masked_fill(part.temperature == 0, 1).unsqueeze(-1)
    most = x.amax(-1, keepdim=True)
    weights = ((x - most) / temperature).exp_()
    weights = weights.masked_fill_(weights < part.min_p.unsqueeze(-1), 0)
    if cuts:
        weights = weights.masked_fill_(~_kept(x, weights, part), 0)
    running = weights.cumsum(-1)
    goal = part.number.unsqueeze(-1) * running[:, -1:]
    ids, width = torch.arange(x.shape[1], device=x.device), x.shape[1]
    # A parallel sum may grow by rounding where there is no weight.
    first = torch.where((running > goal) & (weights > 0), ids, width).amin(-1)
    last = torch.where(weights > 0, ids, -1).amax(-1)
    return torch.where(first < width, first, last)


def _kept(x: Tensor, weights: Tensor, part: Inputs[Tensor]) -> Tensor:
    """``bool[P, V]`` what top_k and top_p leave.

    The likeliest are ranked, and all are only where that does not tell.
    """
    width = x.shape[1]
    kept, decided = _kept_of(x, weights, part, min(_RANKED, width))
    if width > _RANKED and not bool(decided.all()):
        kept, _ = _kept_of(x, weights, part, width)
    return kept


def _kept_of(x: Tensor, weights: Tensor, part: Inputs[Tensor], n: int) -> tuple[Tensor, Tensor]:
    """See `_kept`; by ranking the ``n`` likeliest, and ``bool[P]`` where that was enough."""
    values, ids = x.topk(n)
    ranked, rank = weights.gather(-1, ids), torch.arange(n, device=x.device)
    counted = (part.top_k > 0).unsqueeze(-1)
    inside = (ranked > 0) & ((rank < part.top_k.unsqueeze(-1)) | ~counted)
    whole = torch.where(counted, (ranked * inside).sum(-1, keepdim=True), weights.sum(-1, True))
    goal = torch.where(part.top_p < 1, part.top_p, torch.inf).unsqueeze(-1) * whole
    before = pad((ranked * inside).cumsum(-1)[:, :-1], (1, 0))
    last = (inside & (before < goal)).sum(-1, keepdim=True)
    # Of equal ones the first are kept, whatever the order they were ranked in.
    cut = values.gather(-1, (last - 1).clamp_(min=0))
    equal, above = x == cut, x > cut
    kept = above | (equal & (equal.cumsum(-1) <= last - above.sum(-1, keepdim=True)))
    unlimited = (part.top_k == 0) & (part.top_p == 1)
    enough = torch.where(part.top_k > 0, part.top_k <= n, last.squeeze(-1) < n)
    return kept | unlimited.unsqueeze(-1), enough | unlimited
