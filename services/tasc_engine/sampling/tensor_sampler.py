"""Samples the target's tokens by the rows' parameters with tensor operations, on any device.

All places are sampled together, whether visited or not. One transfer copies the parameters to the
device, and one copies the tokens back. The tokens equal those of `compiled_sampler`, except for
rounding.
"""

from dataclasses import dataclass, fields, replace
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from tasc_draft import Drafts
from tasc_engine.layout import Int32, Int64
from tasc_engine.model.operations import first_greatest
from tasc_engine.sampling.row_parameters import IN_PROMPT, MAX_LOGIT, Allowed, Rules, list_paths
from tasc_protocol import PARAMETERS

Array = TypeVar("Array", NDArray[Any], Tensor)

_PER_PLACE = ("place", "slot", "mask_of", "number", "parameters")
_COLUMN = {name: column for column, name in enumerate(PARAMETERS)}


@dataclass(frozen=True)
class Inputs(Generic[Array]):
    """Inputs of the P places that have a mask or whose rows are not plain.

    All fields are arrays on the host or tensors on the device.

    Attributes:
        place: ``int64[P]`` ascending indices among the step's places.
        slot: ``int64[P]`` indices of the places' rows among the step's rows.
        mask_of: ``int64[P]`` indices of masks; -1 for none.
        number: ``float64[P]`` random numbers.
        parameters: ``float64[P, *]`` the parameters of `Sampling`; see `parameter`.
        path_at, path_token: ``int64[*]`` draft tokens on the paths to places of penalised rows,
            with the ascending indices of the places.
        held_slot, held_token: ``int64[*]`` rows and held tokens of penalised rows.
        held: ``int32[*]``; see `Rules`.
        bias_slot, bias_token: ``int64[*]`` rows and tokens with a bias.
        bias: ``float64[*]`` the bias of each of these tokens.
        masks: ``int32[K, words]``; see `Allowed`.
    """

    place: Array
    slot: Array
    mask_of: Array
    number: Array
    parameters: Array
    path_at: Array
    path_token: Array
    held_slot: Array
    held_token: Array
    held: Array
    bias_slot: Array
    bias_token: Array
    bias: Array
    masks: Array

    def parameter(self, name: str) -> Any:
        """Returns ``float64[P]``, a parameter of `Sampling`."""
        return self.parameters[:, _COLUMN[name]]

    def part(self, begin: int, end: int, paths: slice) -> "Inputs[Array]":
        """Returns some of the places, with the draft tokens on their paths."""
        own: Any = {name: getattr(self, name)[begin:end] for name in _PER_PLACE}
        own["path_at"] = self.path_at[paths] - begin
        return replace(self, path_token=self.path_token[paths], **own)


def inputs_of(
    rows: Int32, drafts: Drafts, allowed: Allowed | None, rules: Rules
) -> Inputs[NDArray[Any]]:
    """Collects the inputs of one step."""
    slot, depth = _places(drafts)
    mask_of = np.full(len(slot), -1) if allowed is None else allowed.mask_of.astype(np.int64)
    ruled = ~rules.plain[rows[slot]] | (mask_of >= 0)
    place, row = np.flatnonzero(ruled), rows[slot[ruled]]
    wanted = rules.penalises[rows]
    path_place, path_token = np.zeros((2, int(depth[wanted[slot]].sum())), np.int64)
    list_paths(drafts.tokens, drafts.parents, drafts.offsets, wanted, path_place, path_token)
    held_slot, held_token = _ragged(rules.held_ids, rules.distinct, rows)
    bias_slot, bias_token = _ragged(rules.bias_ids, rules.biases, rows)
    return Inputs(
        place=place,
        slot=slot[ruled],
        mask_of=mask_of[ruled],
        number=rules.numbers[row, (rules.answered - rules.first)[row] + depth[ruled]],
        parameters=np.stack([column[row] for column in rules.parameters], -1, dtype=np.float64),
        path_at=np.searchsorted(place, path_place),
        path_token=path_token,
        held_slot=held_slot,
        held_token=held_token.astype(np.int64),
        held=rules.held[rows[held_slot], held_token],
        bias_slot=bias_slot,
        bias_token=bias_token.astype(np.int64),
        bias=_ragged(rules.bias_values, rules.biases, rows)[1],
        masks=np.zeros((0, 0), np.int32) if allowed is None else allowed.masks.view(np.int32),
    )


def on_device(inputs: Inputs[NDArray[Any]], device: torch.device) -> Inputs[Tensor]:
    """Copies inputs to a device, as parts of one tensor."""
    names = [f.name for f in fields(inputs)]
    arrays = [np.ascontiguousarray(getattr(inputs, name)) for name in names]
    ends = np.cumsum([-(-a.nbytes // 8) * 8 for a in arrays]).tolist()
    flat, stretches = np.zeros(ends[-1], np.uint8), []
    for a, begin in zip(arrays, [0, *ends], strict=False):
        stretches.append(slice(begin, begin + a.nbytes))
        flat[stretches[-1]] = a.reshape(-1).view(np.uint8)
    moved = torch.from_numpy(flat).to(device)
    tensors = {
        name: moved[own].view(getattr(torch, a.dtype.name)).view(a.shape)
        for name, a, own in zip(names, arrays, stretches, strict=True)
    }
    return Inputs(**tensors)


def _places(drafts: Drafts) -> tuple[Int64, Int64]:
    """``int64[M]``, the row of each place among the step's rows, and its depth in the draft."""
    sizes = np.diff(drafts.offsets)
    slot = np.repeat(np.arange(len(sizes)), sizes + 1)
    depth = np.zeros(len(slot), np.int64)
    nodes = np.arange(len(drafts.tokens)) + np.repeat(np.arange(len(sizes)), sizes) + 1
    depth[nodes] = drafts.depths
    return slot, depth


def _ragged(values: NDArray[Any], counts: Int32, rows: Int32) -> tuple[Int64, NDArray[Any]]:
    """The row index of each value, and the values: the first ``counts`` of each row."""
    own = [values[row, :n] for row, n in zip(rows.tolist(), counts[rows].tolist(), strict=True)]
    return np.repeat(np.arange(len(rows)), counts[rows]), np.concatenate([values[:0, 0], *own])


_AT_ONCE = 1 << 22  # logits processed together; about ten times their 32 MB are allocated
_RANKED = 1024  # number of likeliest tokens that are ranked at first; usually enough
_NOTHING = -torch.inf


@torch.inference_mode()
def choose(
    logits: Tensor, rows: Int32, drafts: Drafts, allowed: Allowed | None, rules: Rules
) -> Int64:
    """Returns ``int64[M]``, the token at each place, as `Sampler.choose` defines it."""
    inputs = inputs_of(rows, drafts, allowed, rules)
    chosen = first_greatest(logits)
    if len(inputs.place):
        held = on_device(inputs, logits.device)
        chosen[held.place] = _by_rule(logits, len(rows), inputs, held)
    found: Int64 = chosen.cpu().numpy()
    return found


def _by_rule(
    logits: Tensor, rows: int, host: Inputs[NDArray[Any]], all_held: Inputs[Tensor]
) -> Tensor:
    """``int64[P]``, the tokens of the places in ``host``."""
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
        readable = (x < torch.inf).all(-1)  # False for NaN
        x = _adjusted(x, part, counts, biases)
        chosen, here = first_greatest(x), slice(begin, begin + at_once)
        warm = host.parameter("temperature")[here] > 0
        if warm.any():
            top_k, top_p = host.parameter("top_k")[here], host.parameter("top_p")[here]
            drawn = _drawn(x, part, bool((top_k > 0).any() or (top_p < 1).any()))
            chosen = torch.where(part.parameter("temperature") > 0, drawn, chosen)
        found.append(chosen.masked_fill(~readable | (x == _NOTHING).all(-1), -1))
    return torch.cat(found)


def _adjusted(
    x: Tensor, part: Inputs[Tensor], counts: Tensor | None, biases: Tensor | None
) -> Tensor:
    """``float64[P, V]``, logits with biases, penalties and masks."""
    if biases is not None:
        x = (x + biases[part.slot]).clamp_(max=MAX_LOGIT)
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
    repetition = part.parameter("repetition_penalty").unsqueeze(-1)
    repeated = torch.where(x > 0, x / repetition, x * repetition).clamp_(max=MAX_LOGIT)
    x, count = torch.where(own != 0, repeated, x), own & ~IN_PROMPT
    x = torch.where(count > 0, x - part.parameter("presence_penalty").unsqueeze(-1), x)
    return x - part.parameter("frequency_penalty").unsqueeze(-1) * count


def _drawn(x: Tensor, part: Inputs[Tensor], cuts: bool) -> Tensor:
    """``int64[P]``, tokens drawn with the random numbers; arbitrary if the temperature is 0."""
    temperature = part.parameter("temperature").unsqueeze(-1)
    temperature = temperature.masked_fill(temperature == 0, 1)
    highest = x.amax(-1, keepdim=True)
    weights = ((x - highest) / temperature).exp_()
    weights = weights.masked_fill_(weights < part.parameter("min_p").unsqueeze(-1), 0)
    if cuts:
        weights = weights.masked_fill_(~_kept(x, weights, part), 0)
    running = weights.cumsum(-1)
    goal = part.number.unsqueeze(-1) * running[:, -1:]
    ids, width = torch.arange(x.shape[1], device=x.device), x.shape[1]
    # Rounding may increase a parallel sum at tokens without weight.
    first = torch.where((running > goal) & (weights > 0), ids, width).amin(-1)
    last = torch.where(weights > 0, ids, -1).amax(-1)
    return torch.where(first < width, first, last)


def _kept(x: Tensor, weights: Tensor, part: Inputs[Tensor]) -> Tensor:
    """``bool[P, V]``, the tokens that top_k and top_p keep.

    At first, only the likeliest tokens are ranked. If they are not enough, all tokens are ranked.
    """
    width = x.shape[1]
    kept, decided = _kept_of(x, weights, part, min(_RANKED, width))
    if width > _RANKED and not bool(decided.all()):
        kept, _ = _kept_of(x, weights, part, width)
    return kept


def _kept_of(x: Tensor, weights: Tensor, part: Inputs[Tensor], n: int) -> tuple[Tensor, Tensor]:
    """The result of `_kept` by the ``n`` likeliest tokens; ``bool[P]``, whether ``n`` is enough."""
    top_k, top_p = part.parameter("top_k"), part.parameter("top_p")
    values, ids = x.topk(n)
    ranked, rank = weights.gather(-1, ids), torch.arange(n, device=x.device)
    counted = (top_k > 0).unsqueeze(-1)
    inside = (ranked > 0) & ((rank < top_k.unsqueeze(-1)) | ~counted)
    whole = torch.where(counted, (ranked * inside).sum(-1, keepdim=True), weights.sum(-1, True))
    goal = torch.where(top_p < 1, top_p, torch.inf).unsqueeze(-1) * whole
    before = pad((ranked * inside).cumsum(-1)[:, :-1], (1, 0))
    last = (inside & (before < goal)).sum(-1, keepdim=True)
    # Among equally likely tokens, the lowest ids are kept, whatever their order in the ranking.
    cut = values.gather(-1, (last - 1).clamp_(min=0))
    equal, above = x == cut, x > cut
    kept = above | (equal & (equal.cumsum(-1) <= last - above.sum(-1, keepdim=True)))
    unlimited = (top_k == 0) & (top_p == 1)
    enough = torch.where(top_k > 0, top_k <= n, last.squeeze(-1) < n)
    return kept | unlimited.unsqueeze(-1), enough | unlimited
