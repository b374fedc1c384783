"""Rows with sampling rules for tests of the choice of tokens, and a simple reference for it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from choosing_reference import reference_choice
from tasc_draft import Drafts
from tasc_engine import Sampling
from tasc_engine.kernels.gpu.attention import INTERPRETED, available
from tasc_engine.sampling import gpu_sampler
from tasc_engine.sampling.accept import Accepted, EmitLimits, accept
from tasc_engine.sampling.row_parameters import Allowed
from tasc_engine.sampling.sampler import Sampler, uniforms

CAPACITY = 256
HAS_KERNELS = available()
DEVICE = "cuda" if HAS_KERNELS and not INTERPRETED else "cpu"


@dataclass(frozen=True)
class Asked:
    sampling: Sampling
    prompt: tuple[int, ...] = (0,)
    answer: tuple[int, ...] = ()


def ints(values: Sequence[int]) -> np.ndarray:
    return np.array(values, np.int32)


def begin(chooser: Sampler, row: int, asked: Asked) -> None:
    """Starts a row: observes half of an answer at once, then one token after the other."""
    chooser.start(row, ints(asked.prompt), asked.sampling)
    half = len(asked.answer) // 2
    for part in (asked.answer[:half], *((token,) for token in asked.answer[half:])):
        chooser.observe(row, ints(part))


def chooser_of(asked: Sequence[Asked], vocab_size: int) -> Sampler:
    """Returns a chooser with the i-th rule in row i."""
    chooser = Sampler(len(asked), CAPACITY, vocab_size)
    for row, one in enumerate(asked):
        begin(chooser, row, one)
    return chooser


def both(
    chooser: Sampler,
    logits: Tensor,
    rows: Sequence[int],
    drafts: Drafts | None = None,
    allowed: Allowed | None = None,
) -> list[int]:
    """Returns the choice of compiled code, after checking that a GPU's kernels choose the same.

    The kernels run where Triton is installed, on a GPU or with TRITON_INTERPRET=1.
    """
    drafts = Drafts.empty(len(rows)) if drafts is None else drafts
    limits = no_limits(len(rows), logits.shape[1])
    found = chooser.start_choice(logits, ints(rows), drafts, allowed)(limits)
    if HAS_KERNELS:
        with np.errstate(over="ignore"):  # numpy runs the interpreter's kernels
            wait = gpu_sampler.start(logits.to(DEVICE), ints(rows), drafts, allowed, chooser.rules)
        assert visited(found, drafts) == visited(accept(wait(), drafts, limits), drafts)
    again = chooser.start_choice(logits, ints(rows), drafts, allowed)(limits)
    assert visited(found, drafts) == visited(again, drafts), "a choice changes the state of a row"
    return visited(found, drafts)


def no_limits(rows: int, vocab_size: int) -> EmitLimits:
    """Limits of rows that emit all that their draft allows."""
    return EmitLimits(ints([CAPACITY] * rows), np.zeros(rows, bool), np.zeros(vocab_size, bool))


def visited(accepted: Accepted, drafts: Drafts) -> list[int]:
    """The token of each place: -2 if it was not visited, -1 if it was and there is no token."""
    found = [-2] * (len(drafts.tokens) + len(accepted.emitted))
    for i, (emitted, followed) in enumerate(zip(accepted.emitted, accepted.followed, strict=True)):
        root = int(drafts.offsets[i]) + i
        places = [root, *(root + 1 + accepted.path[i, :followed])]
        tokens = [*accepted.tokens[i, :emitted].tolist(), -1]
        for place, token in zip(places, tokens, strict=False):
            found[place] = token
    return found


def alone(asked: Asked, logits: Sequence[float] | Tensor, allowed: Allowed | None = None) -> int:
    """Returns the chosen token of one row without a draft."""
    line = torch.as_tensor(logits, dtype=torch.float64)
    return both(chooser_of([asked], len(line)), line[None], [0], None, allowed)[0]


def allowed_of(sets: Sequence[set[int]], mask_of: Sequence[int], vocab_size: int) -> Allowed:
    masks = np.zeros((len(sets), -(-vocab_size // 32)), np.uint32)
    for mask, tokens in zip(masks, sets, strict=True):
        for token in tokens:
            mask[token // 32] |= np.uint32(1 << token % 32)
    return Allowed(masks, ints(mask_of))


def expected(
    asked: Asked,
    logits: Tensor,
    parents: Sequence[int],
    tokens: Sequence[int],
    allowed: Sequence[set[int] | None],
) -> list[int]:
    """Returns the reference's tokens at one row's places; -2 at places that are not reached."""
    found, node, path = [-2] * len(logits), -1, []
    while True:
        place, answer = node + 1, [*asked.answer, *path]
        line = logits[place].double().numpy()
        number = float(uniforms(asked.sampling, len(answer), 1)[0])
        found[place] = reference_choice(
            line, asked.sampling, asked.prompt, answer, number, allowed[place]
        )
        if asked.sampling.plain and allowed[place] is None and (line == -np.inf).all():
            found[place] = 0  # the first of equal ones, as in `operations.greatest`
        path.append(found[place])
        children = [x for x, p in enumerate(parents) if p == node and tokens[x] == path[-1]]
        if not children:
            return found
        node = children[0]
