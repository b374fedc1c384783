"""What a drafter could reach that only copies: the perfect choice of one run of known text a step.

The bound knows the answer. A step takes the longest run of the rest of the answer that stands
behind an occurrence of the last token, in a train output or in the prompt and the answer so far,
and one bonus token more. It has no limit of nodes. A drafter that joins pieces of several runs in
one step may go beyond it.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from draft_rows import Answers

from tasc_draft.compiled import compiled
from tasc_draft.index.corpus import CorpusIndex
from tasc_draft.index.corpus_sort import sorted_places
from tasc_draft.index.lookup import narrow


def copy_bound(
    corpus: CorpusIndex, rows: Answers, progress: Callable[[], None] = lambda: None
) -> float:
    """Tokens per step of the perfect choice, all tokens over all steps.

    Args:
        corpus: The train outputs, ``SEP output EOS`` each.
        rows: Prompt and answer, the answer with its end-of-sequence.
        progress: Called behind each row.
    """
    # The index keeps one place a gram; a run may go on behind any of them.
    places = sorted_places(corpus.text, corpus.depth)
    every = np.where(places < 0, ~places, places)
    every.setflags(write=False)
    view = corpus.view._replace(order=every)
    tokens = steps = 0
    for prompt, answer in rows:
        text = np.concatenate([prompt, [corpus.vocab_size], answer]).astype(np.int32)
        steps += count_steps(view, corpus.depth, text, len(prompt) + 1)
        tokens += len(answer)
        progress()
    return tokens / steps if steps else 0.0


@compiled
def count_steps(corpus: Any, depth: int, text: Any, begin: int) -> int:
    """Steps to the end of ``text``, whose answer begins at ``begin`` behind SEP."""
    at, steps = begin, 0
    while at < len(text):
        run = max(corpus_run(corpus, depth, text, at), own_run(text, at))
        at += run + 1
        steps += 1
    return steps


@compiled
def corpus_run(corpus: Any, depth: int, text: Any, at: int) -> int:
    """The longest run of ``text[at:]`` in the corpus behind the token in front of ``at``."""
    lo, hi, matched, begin = 0, len(corpus.order), 0, at - 1
    while matched < depth and begin + matched < len(text):
        low, high = narrow(corpus, lo, hi, matched, text[begin + matched])
        if low == high:
            break
        lo, hi = low, high
        matched += 1
    if matched < depth:
        return max(matched - 1, 0)
    longest = 0
    for i in range(lo, hi):
        place, k = corpus.order[i], depth
        while begin + k < len(text) and corpus.text[place + k] == text[begin + k]:
            k += 1
        longest = max(longest, k)
    return longest - 1


@compiled
def own_run(text: Any, at: int) -> int:
    """The longest run of ``text[at:]`` in ``text[:at]`` behind the token in front of ``at``."""
    longest = 0
    for i in range(at - 1):
        if text[i] != text[at - 1]:
            continue
        k = 0
        while i + 1 + k < at and at + k < len(text) and text[i + 1 + k] == text[at + k]:
            k += 1
        longest = max(longest, k)
    return longest
