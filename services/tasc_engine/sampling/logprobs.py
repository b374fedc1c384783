"""How likely tokens were to the target itself, whatever rule chose them. It knows no requests."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tasc_engine.layout import Int64
from tasc_engine.sampling.parameters import TokenLogprob

_AT_ONCE = 1 << 22  # logits that are looked at together: some three times their 32 MB are held


@torch.inference_mode()
def token_logprobs(
    logits: Tensor, places: Int64, tokens: Int64, most: Sequence[int] | Int64
) -> list[TokenLogprob]:
    """Natural logarithms of the probabilities of tokens, and of the likeliest beside them.

    Args:
        logits: ``[M, V]`` of any floating dtype, on any device.
        places: ``int64[n]`` of the logits.
        tokens: ``int64[n]``, one for each place.
        most: How many likeliest tokens of each place; of equal ones the first. Those that are
            impossible are left out.
    """
    at_once = max(_AT_ONCE // logits.shape[1], 1)
    parts = [slice(begin, begin + at_once) for begin in range(0, len(places), at_once)]
    return [one for p in parts for one in _told(logits, places[p], tokens[p], most[p])]


def _told(
    logits: Tensor, places: Int64, tokens: Int64, most: Sequence[int] | Int64
) -> list[TokenLogprob]:
    counts = [int(n) for n in most]
    asked = torch.from_numpy(np.stack((places, tokens))).to(logits.device)
    logs = logits.index_select(0, asked[0]).double().log_softmax(-1)
    own = logs.gather(-1, asked[1].unsqueeze(-1))
    n = min(max(1, *counts), logits.shape[1])
    values, ids = _likeliest(logs, n)
    told = torch.cat((own, values, ids.double()), -1).tolist()  # float64 holds ids exactly
    return [
        TokenLogprob(token, line[0], _possible(line[1 : n + 1], line[n + 1 :])[:count])
        for token, line, count in zip(tokens.tolist(), told, counts, strict=True)
    ]


def _likeliest(logs: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """The ``n`` greatest of each line and their ids; of equal ones the first."""
    values, _ = logs.topk(n)  # which of equal ones it finds is not said
    width, least = logs.shape[1], values[:, -1:]
    above, equal = logs > least, logs == least
    found = above | (equal & (equal.cumsum(-1) <= n - above.sum(-1, keepdim=True)))
    ids = torch.where(found, torch.arange(width, device=logs.device), width)
    ids = ids.topk(n, largest=False).values
    values, order = logs.gather(-1, ids).sort(descending=True, stable=True)
    return values, ids.gather(-1, order)


def _possible(values: list[float], ids: list[float]) -> tuple[tuple[int, float], ...]:
    pairs = zip(ids, values, strict=True)
    return tuple((int(token), value) for token, value in pairs if value > -math.inf)
