"""Keeps keys and values of prefixes that prompts share, and copies them into new rows.

The cache keeps a prefix that a prompt shares with one of the last prompts, such as the task's
template, or with the expected prompt (see `expect`). If the limit of bytes is exceeded, the least
recently used prefix is dropped. Each row gets its own copy, so no reference counts or locks are
needed.
"""

from collections import OrderedDict, deque

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tasc_engine.errors import is_out_of_memory
from tasc_engine.kv.cache import RowCache

Int32 = NDArray[np.int32]

_Key = tuple[int, bytes]  # adapter number (keys and values depend on the adapter), token ids

MIN_TOKENS = 8  # shorter prefixes are not worth a copy
RECENT = 8  # number of last prompts with which a new prompt is compared
MAX_KEPT = 64  # maximum number of prefixes, since `enter` compares a prompt with all of them


class PrefixCache:
    """Keys and values of shared prefixes.

    Args:
        cache: The KV cache from which and to which prefixes are copied.
        budget: Maximum bytes of keys and values to keep; 0 keeps none.
    """

    def __init__(self, cache: RowCache, budget: int) -> None:
        self._cache = cache
        self._budget = budget
        self._recent: deque[tuple[int, Int32]] = deque(maxlen=RECENT)
        self._expected: Int32 = np.empty(0, np.int32)
        self._kept: OrderedDict[_Key, tuple[Int32, Tensor]] = OrderedDict()
        self.nbytes = 0

    def expect(self, prompt: Int32) -> None:
        """Announces that later prompts will start like this prompt, with any adapter."""
        self._expected = prompt

    def enter(self, first: int, prompt: Int32, adapter: int = 0) -> int:
        """Copies the longest kept prefix of a prompt to a row, and returns its number of tokens.

        The last token of the prompt is never copied: its forward pass gives the first new token.

        Args:
            first: First slot of the row.
            adapter: Number of the adapter that answers; 0 for none.
        """
        longest, best = 0, None
        for key, (tokens, _) in self._kept.items():
            n = _common(tokens, prompt[:-1]) if key[0] == adapter else 0
            if n > longest:
                longest, best = n, key
        if best is None or longest < MIN_TOKENS:
            return 0
        self._kept.move_to_end(best)
        self._cache.paste(first, self._kept[best][1][:, :longest])
        return longest

    def leave(self, first: int, prompt: Int32, entered: int, adapter: int = 0) -> None:
        """Keeps the longest prefix that a row's prompt shares with a recent or expected prompt.

        The prefix is kept only if it is at least `MIN_TOKENS` longer than the copy that `enter`
        made.

        Args:
            entered: The result of `enter` for this row.
        """
        if not self._budget:
            return
        own = (p for of, p in self._recent if of == adapter)
        shared = max(_common(p, prompt[:-1]) for p in (self._expected, *own))
        self._recent.append((adapter, prompt))
        tokens = prompt[: min(shared, self._budget // self._cache.token_bytes)].copy()
        key = adapter, tokens.tobytes()
        if len(tokens) >= max(entered, 1) + MIN_TOKENS and key not in self._kept:
            try:
                self._keep(key, tokens, self._cache.copied(first, len(tokens)))
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise  # without memory, the prefix is not kept and is computed again

    def check_integrity(self) -> None:
        """Raises AssertionError if sizes or keys of the kept prefixes are wrong."""
        assert self.nbytes == sum(kv.nbytes for _, kv in self._kept.values()) <= self._budget
        assert all(key[1] == tokens.tobytes() for key, (tokens, _) in self._kept.items())
        assert all(len(tokens) == kv.shape[1] for tokens, kv in self._kept.values())

    def _keep(self, key: _Key, tokens: Int32, kv: Tensor) -> None:
        self._kept[key] = tokens, kv
        self.nbytes += kv.nbytes
        while self.nbytes > self._budget or len(self._kept) > MAX_KEPT:
            self.nbytes -= self._kept.popitem(last=False)[1][1].nbytes


def _common(a: Int32, b: Int32) -> int:
    """Returns the length of the common prefix of two sequences."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n
