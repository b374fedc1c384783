"""Prepares a step's sampling rules for the kernels of a GPU, and copies them there and back.

One transfer copies all inputs to the device, and one copies the result back. Both are queued behind
the forward, and the host is free until it asks for the result. All places are sampled, whether
visited or not.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tasc_draft import Drafts
from tasc_engine.kernels import MAX_LOGIT
from tasc_engine.kernels.gpu import sampling as kernels
from tasc_engine.kernels.gpu.sampling import FLOATS, INTEGERS, Inputs
from tasc_engine.layout import Int32, Int64
from tasc_engine.model.operations import first_greatest
from tasc_engine.sampling.accept import Trees
from tasc_engine.sampling.row_parameters import Allowed, Float64, Rules, list_paths

Host = Inputs[NDArray[Any]]
_NONE = np.zeros(0, np.int32)


@torch.inference_mode()
def start(
    logits: Tensor, rows: Int32, drafts: Drafts, allowed: Allowed | None, rules: Rules
) -> Callable[[], Int64]:
    """Starts to choose the tokens of all places, as `Sampler.start_choice` defines them.

    Returns:
        A function that waits for the device and returns ``int64[M]``, the token at each place.

    Raises:
        ValueError: A place has no logits.
    """
    if len(logits) != (places := len(rows) + len(drafts.tokens)):
        raise ValueError(f"{len(logits)} lines of logits for {places} places; compute all of them")
    try:
        inputs = inputs_of(rows, drafts, allowed, rules, logits.shape[1])
        with _current(logits.device):
            if len(inputs.integers) < len(logits):
                tokens = first_greatest(logits)
            else:
                tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
            if len(inputs.integers):
                kernels.choose(logits, on_device(inputs, logits.device), tokens)
            return _to_host(tokens)
    except Exception:
        _wait(logits.device)  # the forward still reads buffers that the next step overwrites
        raise


@torch.inference_mode()
def scores(logits: Tensor, places: Int64, tokens: Int64, num_top: Int64) -> Float64:
    """See `kernels.score`; ``num_top`` has the number of likeliest tokens of each place."""
    most = min(int(num_top.max()), logits.shape[1])
    own = {"place": places, "mask": -1, "sums": 1, "top_k": num_top.clip(max=most), "token": tokens}
    integers = _table(own, INTEGERS, np.zeros((len(places), len(INTEGERS)), np.int64))
    floats = np.ones((len(places), len(FLOATS)))  # without a temperature
    none = dict.fromkeys(("bias_token", "held_token", "held", "path_token", "path_held"), _NONE)
    inputs = Inputs(integers, floats, bias=np.zeros(0), masks=_NONE[None], **none)
    with _current(logits.device):
        found: Float64 = _to_host(kernels.score(logits, on_device(inputs, logits.device), most))()
    return found


def inputs_of(
    rows: Int32, drafts: Drafts, allowed: Allowed | None, rules: Rules, vocab_size: int
) -> Host:
    """Collects the inputs of the places that have a mask or whose rows are not plain."""
    sizes = drafts.sizes
    slot = np.repeat(np.arange(len(sizes)), sizes + 1)
    depth = np.zeros(len(slot), np.int64)
    depth[np.arange(len(drafts.tokens)) + np.repeat(np.arange(len(sizes)), sizes) + 1] = (
        drafts.depths
    )
    mask = np.full(len(slot), -1) if allowed is None else allowed.mask_of
    place = np.flatnonzero(~rules.plain[rows[slot]] | (mask >= 0))
    slot, depth, row = slot[place], depth[place], rows[slot[place]]

    room = int(drafts.depths.sum())
    ends, (path_token, path_held) = np.zeros(len(mask) + 1, np.int64), np.empty((2, room), np.int32)
    n = list_paths(Trees.of(drafts), rules, rows, ends, path_token, path_held)
    held_token, held_ends = _ragged(rules.held_ids, rules.distinct, rows)
    bias_token, bias_ends = _ragged(rules.bias_ids, rules.biases, rows)
    held_row = np.repeat(rows, rules.distinct[rows])

    own = {name: column[row] for name, column in rules.parameters._asdict().items()}
    own["top_k"] = np.where(own["top_k"] < vocab_size, own["top_k"], 0)
    with np.errstate(divide="ignore", over="ignore"):
        scale = np.minimum(1 / own["temperature"], MAX_LOGIT)
    own |= {
        "place": place,
        "mask": mask[place],
        "sums": (own["top_k"] == 0) & (own["min_p"] == 0) & (own["temperature"] > 0),
        "bias_begin": bias_ends[slot],
        "bias_end": bias_ends[slot + 1],
        "held_begin": held_ends[slot],
        "held_end": held_ends[slot + 1],
        "path_begin": ends[place],
        "path_end": ends[place + 1],
        "number": rules.numbers[row, (rules.answered - rules.first)[row] + depth],
        "scale": np.where(own["temperature"] > 0, scale, 0),
        "repetition": own["repetition_penalty"],
        "presence": own["presence_penalty"],
        "frequency": own["frequency_penalty"],
    }
    return Inputs(
        integers=_table(own, INTEGERS, np.zeros((len(place), len(INTEGERS)), np.int64)),
        floats=_table(own, FLOATS, np.zeros((len(place), len(FLOATS)))),
        bias_token=bias_token,
        bias=_ragged(rules.bias_values, rules.biases, rows)[0],
        held_token=held_token,
        held=rules.held[held_row, held_token],
        path_token=path_token[:n],
        path_held=path_held[:n],
        masks=_NONE[None] if allowed is None else allowed.masks.view(np.int32),
    )


def on_device(inputs: Host, device: torch.device) -> Inputs[Tensor]:
    """Copies inputs to a device, as parts of one tensor, without waiting."""
    names = [f.name for f in fields(inputs)]
    arrays = [np.ascontiguousarray(getattr(inputs, name)) for name in names]
    ends = np.cumsum([-(-a.nbytes // 16) * 16 for a in arrays]).tolist()
    # Pinned memory is cached, and is used again only after the device has read it.
    flat = torch.empty(ends[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    bytes_of, stretches = flat.numpy(), []
    for a, begin in zip(arrays, [0, *ends], strict=False):
        stretches.append(slice(begin, begin + a.nbytes))
        bytes_of[stretches[-1]] = a.reshape(-1).view(np.uint8)
    moved = flat.to(device, non_blocking=True)
    tensors = {
        name: moved[own].view(getattr(torch, a.dtype.name)).view(a.shape)
        for name, a, own in zip(names, arrays, stretches, strict=True)
    }
    return Inputs(**tensors)


def _to_host(result: Tensor) -> Callable[[], NDArray[Any]]:
    """Starts a copy to the host; returns a function that waits for it and returns the copy."""
    device, pinned = result.device, result.device.type == "cuda"
    copy = torch.empty(result.shape, dtype=result.dtype, pin_memory=pinned)
    copy.copy_(result, non_blocking=True)

    def wait() -> NDArray[Any]:
        _wait(device)
        found: NDArray[Any] = copy.numpy()
        return found

    return wait


def _current(device: torch.device) -> AbstractContextManager[Any]:
    """Makes a GPU the current device, on which kernels are launched."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _table(own: Mapping[str, Any], names: Sequence[str], table: NDArray[Any]) -> NDArray[Any]:
    """Fills the columns of a table of zeros; columns without a value stay 0."""
    for column, name in enumerate(names):
        table[:, column] = own.get(name, 0)
    return table


def _ragged(values: NDArray[Any], counts: Int32, rows: Int32) -> tuple[NDArray[Any], Int64]:
    """The first ``counts`` values of each row, and where those of each row end, after a 0."""
    own = [values[row, :n] for row, n in zip(rows.tolist(), counts[rows].tolist(), strict=True)]
    ends = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(counts[rows], out=ends[1:])
    return np.concatenate([values[:0, 0], *own]), ends
