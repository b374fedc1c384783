"""How much of a corpus a new token would lead past: TASC's prefix collision score (section 4.1).

The paper's formula asks for tokens that the n-gram is a beginning of; its example, ('in', 'the')
beside 'therapy', for tokens that its last constituent is a beginning of. Both are here; the second
is the default. It knows no tokenizer.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Rule = Literal["suffix", "whole"]


class Collisions:
    """Scores n-grams by the tokens that occur in a corpus.

    Args:
        text_of: A token's bytes.
    """

    def __init__(self, text_of: Callable[[int], bytes], rule: Rule) -> None:
        self._text_of, self._rule = text_of, rule
        self._ids: dict[bytes, list[int]] = {}
        self._texts: list[bytes] = []  # sorted
        self._known: set[int] = set()

    def score(self, ngram: Sequence[int], occurrences: NDArray[np.int64]) -> float:
        """Share of token occurrences whose text is longer than the n-gram's, or its last token's,
        and begins with it.

        Args:
            occurrences: ``int64[ids]``, of each token in the corpus.
        """
        for id_ in np.flatnonzero(occurrences):
            self._learn(int(id_))
        parts = ngram[-1:] if self._rule == "suffix" else ngram
        begin = b"".join(map(self._text_of, parts))
        if not begin:
            return 0.0
        colliding = 0
        for text in self._texts[bisect_left(self._texts, begin) :]:
            if not text.startswith(begin):
                break
            if text != begin:
                colliding += sum(int(occurrences[id_]) for id_ in self._ids[text])
        return colliding / int(occurrences.sum())

    def _learn(self, id_: int) -> None:
        if id_ in self._known:
            return
        self._known.add(id_)
        text = self._text_of(id_)
        if text not in self._ids:
            insort(self._texts, text)
        self._ids.setdefault(text, []).append(id_)
