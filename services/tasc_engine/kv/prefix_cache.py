"""Keeps keys and values of prefixes that prompts share, and copies them into new rows.

The cache keeps a prefix that a prompt shares with one of the last prompts, such as the task's
template, or with the expected prompt (see `expect`). If the limit of bytes is exceeded, the least
recently used prefix is dropped. Each row gets its own copy, so no reference counts or locks are
needed.
"""

from collections import OrderedDict
from typing import Any

import numpy as np
from torch import Tensor

from tasc_engine.errors import is_out_of_memory
from tasc_engine.kernels.cpu.compiling import borrowing
from tasc_engine.kv.cache import RowCache
from tasc_engine.layout import Int32

_Key = tuple[int, bytes]  # adapter number (keys and values depend on the adapter), token ids
_ANY = -1  # the adapter number of a text that rows of all adapters share

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
        self._recent, self._next = _Texts(RECENT + 1), 0  # the last text is the expected prompt
        self._prefixes = _Texts(MAX_KEPT)
        self._kept: OrderedDict[_Key, tuple[int, Tensor]] = OrderedDict()
        self._free = list(range(MAX_KEPT))  # numbers of unused texts of `_prefixes`
        self.nbytes = 0

    def expect(self, prompt: Int32) -> None:
        """Announces that later prompts will start like this prompt, with any adapter."""
        self._recent.write(RECENT, prompt, _ANY)

    def enter(self, first: int, prompt: Int32, adapter: int = 0) -> int:
        """Copies the longest kept prefix of a prompt to a row, and returns its number of tokens.

        The last token of the prompt is never copied: its forward pass gives the first new token.

        Args:
            first: First slot of the row.
            adapter: Number of the adapter that answers; 0 for none.
        """
        longest, best = self._prefixes.longest_common(prompt, adapter)
        if longest < MIN_TOKENS:
            return 0
        key = self._prefixes.key(best)
        self._kept.move_to_end(key)
        self._cache.paste(first, self._kept[key][1][:, :longest])
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
        shared, _ = self._recent.longest_common(prompt, adapter)
        self._recent.write(self._next, prompt, adapter)
        self._next = (self._next + 1) % RECENT
        least = max(entered, 1) + MIN_TOKENS
        if shared < least:
            return
        size = min(shared, self._budget // self._cache.token_bytes)
        tokens = prompt[:size]
        key = adapter, tokens.tobytes()
        if size >= least and key not in self._kept:
            try:
                self._keep(key, tokens, self._cache.copied(first, size))
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise  # without memory, the prefix is not kept and is computed again

    def check_integrity(self) -> None:
        """Raises AssertionError if sizes or keys of the kept prefixes are wrong."""
        kept, texts = self._kept, self._prefixes
        assert self.nbytes == sum(kv.nbytes for _, kv in kept.values()) <= self._budget
        assert all(texts.key(text) == key for key, (text, _) in kept.items())
        assert all(len(key[1]) == 4 * kv.shape[1] for key, (_, kv) in kept.items())
        used = [text for text, _ in kept.values()]
        assert sorted(used + self._free) == list(range(MAX_KEPT))

    def _keep(self, key: _Key, tokens: Int32, kv: Tensor) -> None:
        while self._kept and (self.nbytes + kv.nbytes > self._budget or not self._free):
            _, (text, dropped) = self._kept.popitem(last=False)
            self.nbytes -= dropped.nbytes
            self._prefixes.write(text, tokens[:0], 0)
            self._free.append(text)
        text = self._free.pop()
        self._prefixes.write(text, tokens, key[0])
        self._kept[key] = text, kv
        self.nbytes += kv.nbytes


class _Texts:
    """Some texts with their adapters, in arrays that compiled code compares with a prompt."""

    def __init__(self, size: int) -> None:
        self._tokens = np.zeros((size, 0), np.int32)
        self._lengths, self._adapters = np.zeros((2, size), np.int64)
        self._found = np.zeros(2, np.int64)
        self.longest_common(np.zeros(1, np.int32), 0)  # compiles before the first request

    def write(self, text: int, tokens: Int32, adapter: int) -> None:
        """Replaces a text."""
        n, (size, width) = len(tokens), self._tokens.shape
        if n > width:
            wider = np.zeros((size, max(n, 2 * width)), np.int32)
            wider[:, :width] = self._tokens
            self._tokens = wider
        self._tokens[text, :n] = tokens
        self._lengths[text], self._adapters[text] = n, adapter

    def key(self, text: int) -> _Key:
        """The adapter and the token ids of a text."""
        tokens = self._tokens[text, : self._lengths[text]]
        return int(self._adapters[text]), tokens.tobytes()

    def longest_common(self, prompt: Int32, adapter: int) -> tuple[int, int]:
        """Length of the longest prefix of all but the last token that is shared; which text."""
        _longest_common(self._tokens, self._lengths, self._adapters, prompt, adapter, self._found)
        longest, text = self._found.tolist()
        return longest, text


@borrowing
def _longest_common(
    texts: Any, lengths: Any, adapters: Any, prompt: Any, adapter: int, found: Any
) -> None:
    """Fills ``found`` with the length of the longest common prefix, and the text that has it."""
    found[:] = 0
    for i in range(len(lengths)):
        if adapters[i] != adapter and adapters[i] != _ANY:
            continue
        most, n = min(lengths[i], len(prompt) - 1), 0
        while n < most and texts[i, n] == prompt[n]:
            n += 1
        if n > found[0]:
            found[0], found[1] = n, i
