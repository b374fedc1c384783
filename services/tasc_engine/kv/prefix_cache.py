"""Beginnings that prompts share, prefilled once and copied into the rows that begin with them.

Found on token ids: what two prompts in a row have in common, the task's template above all, is
kept with its keys and values, the least recently used going first when the bytes run out. What a
prompt has in common with an expected one is kept at once. A copy is the row's own, so a row never
waits for another and nothing is counted or locked. It decides no tokens and runs no forward.
"""

from collections import OrderedDict, deque

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tasc_engine.errors import is_out_of_memory
from tasc_engine.kv.cache import RowCache

Int32 = NDArray[np.int32]

_Key = tuple[int, bytes]  # number of the adapter, since each gives other keys and values; tokens

LEAST_TOKENS = 8  # shorter beginnings are not worth a copy
RECENT = 8  # prompts that a new one is compared with
MOST_KEPT = 64  # beginnings, so that looking through them stays cheap


class PrefixCache:
    """Keys and values of shared beginnings.

    Args:
        cache: Whose rows they are copied from and to.
        budget: Most bytes of keys and values to keep; 0 keeps none.
    """

    def __init__(self, cache: RowCache, budget: int) -> None:
        self._cache = cache
        self._budget = budget
        self._recent: deque[tuple[int, Int32]] = deque(maxlen=RECENT)
        self._expected: Int32 = np.empty(0, np.int32)
        self._kept: OrderedDict[_Key, tuple[Int32, Tensor]] = OrderedDict()
        self.nbytes = 0

    def expect(self, prompt: Int32) -> None:
        """Other prompts will begin as this one does, whichever adapter answers."""
        self._expected = prompt

    def enter(self, first: int, prompt: Int32, adapter: int = 0) -> int:
        """Copy the longest kept beginning of a prompt to a row's first slot; returns its tokens.

        The prompt's last token is never among them: its forward says what comes first.

        Args:
            adapter: Number of the adapter that answers; 0 for none.
        """
        longest, best = 0, None
        for key, (tokens, _) in self._kept.items():
            n = _common(tokens, prompt[:-1]) if key[0] == adapter else 0
            if n > longest:
                longest, best = n, key
        if best is None or longest < LEAST_TOKENS:
            return 0
        self._kept.move_to_end(best)
        self._cache.paste(first, self._kept[best][1][:, :longest])
        return longest

    def leave(self, first: int, prompt: Int32, entered: int, adapter: int = 0) -> None:
        """Take note of a prompt that a row holds, and keep what it shares with those before it.

        Args:
            entered: What `enter` returned for it.
        """
        if not self._budget:
            return
        own = (p for of, p in self._recent if of == adapter)
        shared = max(_common(p, prompt[:-1]) for p in (self._expected, *own))
        self._recent.append((adapter, prompt))
        tokens = prompt[: min(shared, self._budget // self._cache.token_bytes)].copy()
        key = adapter, tokens.tobytes()
        if len(tokens) >= max(entered, 1) + LEAST_TOKENS and key not in self._kept:
            try:
                self._keep(key, tokens, self._cache.copied(first, len(tokens)))
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise  # else the beginning is prefilled again: slower, and no harm

    def check_integrity(self) -> None:
        """Raise AssertionError unless what is kept is within its bounds and named rightly."""
        assert self.nbytes == sum(kv.nbytes for _, kv in self._kept.values()) <= self._budget
        assert all(key[1] == tokens.tobytes() for key, (tokens, _) in self._kept.items())
        assert all(len(tokens) == kv.shape[1] for tokens, kv in self._kept.values())

    def _keep(self, key: _Key, tokens: Int32, kv: Tensor) -> None:
        self._kept[key] = tokens, kv
        self.nbytes += kv.nbytes
        while self.nbytes > self._budget or len(self._kept) > MOST_KEPT:
            self.nbytes -= self._kept.popitem(last=False)[1][1].nbytes


def _common(a: Int32, b: Int32) -> int:
    """How many tokens two sequences have in common at their beginning."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n
