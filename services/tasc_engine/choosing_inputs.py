"""What the rules of a step's places need, gathered on the host and carried to a device in one copy.

It chooses nothing.
"""

from dataclasses import dataclass, fields, replace
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tasc_draft import Drafts
from tasc_engine.allowed import Allowed
from tasc_engine.cpu.penalties import list_paths
from tasc_engine.cpu.rules import SETTINGS, Int32, Int64, Rules

Array = TypeVar("Array", NDArray[Any], Tensor)

_TYPES = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float64): torch.float64,
}
_PER_PLACE = ("place", "slot", "mask_of", "number", *SETTINGS)


@dataclass(frozen=True)
class Inputs(Generic[Array]):
    """P places that are not plain; arrays on the host, tensors on the device.

    Attributes:
        place: ``int64[P]`` ascending: which of the step's places.
        slot: ``int64[P]`` which of the step's rows.
        mask_of: ``int64[P]``; -1 for none.
        number: ``float64[P]`` random numbers.
        temperature, top_p, top_k, min_p: ``[P]``, see `Sampling`.
        repetition_penalty, presence_penalty, frequency_penalty: ``[P]``, see `Sampling`.
        path_at, path_token: ``int64[*]`` tokens of drafts that lead to places of penalised rows, by
            index into the places, ascending.
        held_slot, held_token: ``int64[*]`` of penalised rows.
        held: ``int32[*]``; see `Rules`.
        bias_slot, bias_token: ``int64[*]``.
        bias: ``float64[*]``.
        masks: ``int32[K, words]``; see `Allowed`.
    """

    place: Array
    slot: Array
    mask_of: Array
    number: Array
    temperature: Array
    top_p: Array
    top_k: Array
    min_p: Array
    repetition_penalty: Array
    presence_penalty: Array
    frequency_penalty: Array
    path_at: Array
    path_token: Array
    held_slot: Array
    held_token: Array
    held: Array
    bias_slot: Array
    bias_token: Array
    bias: Array
    masks: Array

    def part(self, begin: int, end: int, paths: slice) -> "Inputs[Array]":
        """Some of the places, with the tokens that lead to them."""
        own: Any = {name: getattr(self, name)[begin:end] for name in _PER_PLACE}
        own["path_at"] = self.path_at[paths] - begin
        return replace(self, path_token=self.path_token[paths], **own)


def inputs_of(
    rows: Int32, drafts: Drafts, allowed: Allowed | None, rules: Rules
) -> Inputs[NDArray[Any]]:
    """Of one step."""
    slot, depth = _places(drafts)
    mask_of = np.full(len(slot), -1) if allowed is None else allowed.mask_of.astype(np.int64)
    ruled = ~rules.plain[rows[slot]] | (mask_of >= 0)
    place, row = np.flatnonzero(ruled), rows[slot[ruled]]
    path_place, path_token = _paths(drafts, rules.penalises[rows])
    held_slot, held_token = _ragged(rules.seen, rules.distinct, rows)
    bias_slot, bias_token = _ragged(rules.bias_ids, rules.biases, rows)
    return Inputs(
        place=place,
        slot=slot[ruled],
        mask_of=mask_of[ruled],
        number=rules.numbers[row, (rules.answered - rules.first)[row] + depth[ruled]],
        **{name: getattr(rules, name)[row] for name in SETTINGS},
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
    """The same in tensors, which are parts of one."""
    names = [f.name for f in fields(inputs)]
    arrays = [np.ascontiguousarray(getattr(inputs, name)) for name in names]
    ends = np.cumsum([-(-a.nbytes // 8) * 8 for a in arrays]).tolist()
    joined, stretches = np.zeros(ends[-1], np.uint8), []
    for a, begin in zip(arrays, [0, *ends], strict=False):
        stretches.append(slice(begin, begin + a.nbytes))
        joined[stretches[-1]] = a.reshape(-1).view(np.uint8)
    moved = torch.from_numpy(joined).to(device)
    tensors = {
        name: moved[own].view(_TYPES[a.dtype]).view(a.shape)
        for name, a, own in zip(names, arrays, stretches, strict=True)
    }
    return Inputs(**tensors)


def _places(drafts: Drafts) -> tuple[Int64, Int64]:
    """``int64[M]`` the row of each place among those of the step, and its depth in the draft."""
    sizes = np.diff(drafts.offsets)
    slot = np.repeat(np.arange(len(sizes)), sizes + 1)
    depth = np.zeros(len(slot), np.int64)
    nodes = np.arange(len(drafts.tokens)) + np.repeat(np.arange(len(sizes)), sizes) + 1
    depth[nodes] = drafts.depths
    return slot, depth


def _paths(drafts: Drafts, wanted: NDArray[np.bool_]) -> tuple[Int64, Int64]:
    """Places of the wanted rows' nodes, and the draft tokens that lead to each."""
    slot, depth = _places(drafts)
    places, tokens = np.zeros((2, int(depth[wanted[slot]].sum())), np.int64)
    list_paths(drafts.tokens, drafts.parents, drafts.offsets, wanted, places, tokens)
    return places, tokens


def _ragged(values: NDArray[Any], counts: Int32, rows: Int32) -> tuple[Int64, NDArray[Any]]:
    """The first so many values of each row, and which row of the step each is of."""
    own = [values[row, :n] for row, n in zip(rows.tolist(), counts[rows].tolist(), strict=True)]
    return np.repeat(np.arange(len(rows)), counts[rows]), np.concatenate([values[:0, 0], *own])
