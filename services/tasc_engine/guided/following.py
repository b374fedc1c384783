"""The interface of guides, and their use in a step: allowed tokens and allowed draft nodes."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numba
import numpy as np
from numpy.typing import NDArray

from tasc_draft import Drafts
from tasc_draft.drafts import FORCED
from tasc_draft.labels import LabelTrie
from tasc_engine.errors import GuideError
from tasc_engine.layout import Int32, chains
from tasc_engine.sampling.row_parameters import Allowed
from tasc_text import TaskTokenizer

Masks = NDArray[np.uint32]


class Guide(Protocol):
    """Limits the next tokens of one answer. Owned by one sequence, used by one thread at a time.

    A mask is a row of ``words`` words: bit b of word w is token ``32 * w + b``.
    """

    @property
    def words(self) -> int:
        """Number of words of a mask: a 32nd of the vocabulary size, rounded up."""

    @property
    def labels(self) -> LabelTrie | None:
        """The labels that the answer is limited to, for drafts; None for other guides."""

    @property
    def draftable(self) -> bool:
        """Whether a draft may save a forward; False if the next token decides all later tokens."""

    @property
    def error(self) -> str:
        """The reason why the answer cannot continue and no token is allowed; otherwise empty."""

    def look(self, tokens: Int32, parents: Int32, kept: NDArray[np.bool_], masks: Masks) -> None:
        """Writes the allowed tokens now and after each node of a draft; the state is unchanged.

        Args:
            tokens: ``int32[n]``, a row's draft.
            parents: ``int32[n]``, each node's parent, which precedes it; -1 is the current token.
            kept: ``bool[n]``, written: whether a node and all its ancestors are allowed.
            masks: ``uint32[1 + n, words]``, written: the tokens allowed now and, at ``1 + x``,
                after node x. Masks of nodes that are not kept are undefined.
        """

    def advance(self, tokens: Int32) -> None:
        """Advances by tokens that entered the answer; each was allowed at its place."""

    def forced(self, max_tokens: int) -> Int32:
        """Returns ``int32[n]``, at most ``max_tokens`` forced next tokens; the state is unchanged.

        The result ends where several tokens or none are allowed, or after an end of sequence.
        """


def known_ends(tokenizer: TaskTokenizer, vocab_size: int) -> tuple[int, ...]:
    """Returns the tokens that end an answer and that the model knows.

    Raises:
        GuideError: The model knows none of them.
    """
    ends = tuple(end for end in tokenizer.eos_ids if end < vocab_size)
    if not ends:
        raise GuideError(
            f"by the files in {tokenizer.path.parent}, answers end with one of the tokens "
            f"{tokenizer.eos_ids}, but the model knows only tokens below {vocab_size}; correct "
            "eos_token_id in config.json and generation_config.json, or the end of sequence in the "
            "chat template or tokenizer_config.json"
        )
    return ends


class LeastTokens:
    """Forbids the tokens that end an answer until the answer is long enough; see `Guide`.

    Args:
        ends: Tokens that end an answer.
        missing: Number of tokens that must still follow before the answer may end.
    """

    error = ""
    labels = None
    draftable = True

    def __init__(self, ends: Iterable[int], vocab_size: int, missing: int) -> None:
        self._ends, self._missing = frozenset(ends), missing
        self.words = -(-vocab_size // 32)
        allowed = np.zeros((2, 32 * self.words), bool)  # too short, long enough
        allowed[:, :vocab_size] = True
        allowed[0, [token for token in self._ends if token < vocab_size]] = False
        self._masks = np.packbits(allowed, axis=1, bitorder="little").view(np.uint32)

    def look(self, tokens: Int32, parents: Int32, kept: NDArray[np.bool_], masks: Masks) -> None:
        missing = [self._missing]  # at the current token, then after each node
        for x, (token, above) in enumerate(zip(tokens.tolist(), parents.tolist(), strict=True)):
            is_early = missing[1 + above] > 0 and token in self._ends
            kept[x] = not is_early and (above < 0 or kept[above])
            missing.append(missing[1 + above] - 1)
        enough = (np.array(missing) <= 0).astype(np.intp)
        np.take(self._masks, enough, axis=0, out=masks, mode="clip")  # mode "raise" would copy

    def advance(self, tokens: Int32) -> None:
        self._missing -= len(tokens)

    def forced(self, max_tokens: int) -> Int32:
        return np.empty(0, np.int32)


@dataclass(frozen=True)
class Guided:
    """Drafts that the guides allow, and the tokens that are allowed at each place.

    Attributes:
        drafts: The drafts without forbidden nodes, their descendants, and nodes that save no
            forward. Forced nodes have the source `FORCED`.
        allowed: A mask for each place of rows with a guide; unused masks are undefined. The places
            of row i are its current token and then its nodes, from ``drafts.offsets[i] + i`` on.
    """

    drafts: Drafts
    allowed: Allowed


def follow(
    guides: Sequence[Guide | None],
    drafts: Drafts,
    forces: Sequence[bool] | None = None,
    price: float = 0.0,
) -> Guided:
    """Applies each row's guide to its draft. A guide with an `error` allows no token.

    A draft token saves a forward only if the target has a choice at some later token. If the guide
    forces all later tokens, the draft token saves nothing and is left out.

    Args:
        guides: Each row's guide; None for a row without limits.
        forces: For each row, whether forced tokens need no forward of their own. None if forced
            tokens need a forward in every row.
        price: Cost of one more draft token, in forwards. Subtrees that are expected to save less
            than they cost are left out, except in rows with labels, whose drafts are already
            limited in this way.
    """
    n, rows = len(drafts.tokens), len(guides)
    mask_at = np.full(rows, -1, np.int32)
    words = next((guide.words for guide in guides if guide is not None), 0)
    offsets = drafts.offsets.tolist()
    used = 0
    for i, guide in enumerate(guides):
        if guide is not None:
            mask_at[i] = used
            used += offsets[i + 1] - offsets[i] + 1
    masks, kept = np.empty((used, words), np.uint32), np.ones(n, bool)
    for i, guide in enumerate(guides):
        if guide is not None:
            begin, end = offsets[i], offsets[i + 1]
            at = int(mask_at[i])
            guide.look(
                drafts.tokens[begin:end],
                drafts.parents[begin:end],
                kept[begin:end],
                masks[at : at + 1 + end - begin],
            )
    forced = np.zeros(n, bool)
    if forces is not None and n:
        priced = [guide is not None and guide.labels is None for guide in guides]
        prices = np.where(priced, price, 0.0).astype(np.float32)
        _select(
            drafts.parents, drafts.offsets, drafts.logp, mask_at, masks, np.array(forces, bool),
            prices, kept, forced, *np.zeros((3, n), np.float32),
        )  # fmt: skip
    return _without(drafts, kept, forced, mask_at, masks, forces)


def warm_up() -> None:
    """Compiles or loads the compiled code, so that the first request does not wait for it."""
    follow([None], Drafts.empty(1))
    follow([LeastTokens([], 1, 0)], chains(np.zeros((1, 1), np.int32)), [True])


def _without(
    drafts: Drafts, kept: Any, forced: Any, mask_at: Any, masks: Any, forces: Any
) -> Guided:
    n, rows = int(np.count_nonzero(kept)), len(mask_at)
    taken, parents, mask_of = (np.empty(k, np.int32) for k in (n, n, n + rows))
    offsets = np.zeros(rows + 1, np.int32)
    scratch = np.empty(len(kept), np.int32)
    _keep_only(
        drafts.parents, drafts.offsets, kept, mask_at, taken, parents, offsets, mask_of, scratch
    )
    only = None
    if forces is not None:
        only = np.full(n + rows, -1, np.int32)
        _find_only(masks, mask_of, offsets, np.array(forces, bool), only)
        only = only if only.max() >= 0 else None
    allowed = Allowed(masks, mask_of, only)
    if n == len(kept) and not forced.any():
        return Guided(drafts, allowed)
    left = Drafts(
        drafts.tokens[taken],
        parents,
        drafts.depths[taken],
        offsets,
        drafts.logp[taken],
        np.where(forced[taken], np.int8(FORCED), drafts.source[taken]),
    )
    return Guided(left, allowed)


@numba.njit(cache=True, nogil=True)
def _options(mask: Any) -> int:
    """The number of tokens that a mask allows: 0, 1, or 2 for two or more."""
    found = 0
    for word in mask:
        if word:
            if found or word & (word - np.uint32(1)):
                return 2
            found = 1
    return found


@numba.njit(cache=True, nogil=True)
def _find_only(masks: Any, mask_of: Any, offsets: Any, forces: Any, only: Any) -> None:
    for i in range(len(forces)):
        if not forces[i]:
            continue
        for place in range(offsets[i] + i, offsets[i + 1] + i + 1):
            mask = mask_of[place]
            if mask >= 0 and _options(masks[mask]) == 1:
                for w, word in enumerate(masks[mask]):
                    if word:
                        bit = 0
                        while not word >> np.uint32(bit) & np.uint32(1):
                            bit += 1
                        only[place] = 32 * w + bit
                        break


@numba.njit(cache=True, nogil=True)
def _select(
    parents: Any, offsets: Any, logp: Any, mask_at: Any, masks: Any, forces: Any, prices: Any,
    kept: Any, forced: Any, prob: Any, gain: Any, cost: Any,
) -> None:  # fmt: skip
    """Sets ``forced`` of forced nodes, and clears ``kept`` of nodes that are not worth their cost.

    ``prob`` is the probability of a node's path if the guide is followed. ``gain`` is the number of
    forwards that a node and its descendants are expected to save. ``cost`` is the number of
    forwards that these nodes cost.
    """
    for i in range(len(mask_at)):
        if mask_at[i] < 0 or not forces[i]:
            continue
        begin, end, root = offsets[i], offsets[i + 1], mask_at[i] + 1
        for x in range(begin, end):
            if kept[x]:
                above, up = begin + parents[x], parents[x] >= 0
                forced[x] = _options(masks[root + parents[x]]) == 1
                prob[x] = prob[above] if up else 1.0
                if not forced[x]:
                    prob[x] *= np.exp(logp[x] - (logp[above] if up else 0.0))
        for x in range(end - 1, begin - 1, -1):
            if not kept[x]:
                continue
            if _options(masks[root + x - begin]) == 2:
                gain[x] += prob[x]
            cost[x] += prices[i] * (1.0 - prob[x] if forced[x] else 1.0)
            if gain[x] <= 0.0 or gain[x] < cost[x]:
                kept[x] = False
            elif parents[x] >= 0:
                gain[begin + parents[x]] += gain[x]
                cost[begin + parents[x]] += cost[x]
        for x in range(begin, end):
            if parents[x] >= 0 and not kept[begin + parents[x]]:
                kept[x] = False


@numba.njit(cache=True, nogil=True)
def _keep_only(
    parents: Any, offsets: Any, kept: Any, mask_at: Any,
    taken: Any, new_parents: Any, new_offsets: Any, mask_of: Any, new_place: Any,
) -> None:  # fmt: skip
    """Writes the kept nodes, their new parents and offsets, and the mask of each place."""
    n = place = 0
    for i in range(len(mask_at)):
        begin, first = offsets[i], n
        mask_of[place] = mask_at[i]
        place += 1
        for x in range(begin, offsets[i + 1]):
            if kept[x]:
                above = parents[x]
                new_place[x] = n - first
                taken[n] = x
                new_parents[n] = new_place[begin + above] if above >= 0 else -1
                mask_of[place] = mask_at[i] + 1 + x - begin if mask_at[i] >= 0 else -1
                n += 1
                place += 1
        new_offsets[i + 1] = n
