"""An upper bound for drafters that copy one run of known text in each step.

The bound knows the answer. A step takes the longest run of the rest of the answer that follows an
occurrence of the last token, in a train output or in the prompt and the answer so far, and one
bonus token. The number of nodes is not limited. A drafter that joins pieces of several runs in one
step may exceed the bound.
"""

from typing import Any

import numpy as np

from benchmarks.draft.tasks import Answers
from tasc_draft.compiled import compiled
from tasc_draft.index.corpus import CorpusIndex
from tasc_draft.index.corpus_sort import sorted_places
from tasc_draft.index.lookup import narrow


def copy_bound(corpus: CorpusIndex, rows: Answers) -> float:
    """Tokens per step of the best choice: all tokens over all steps.

    Args:
        corpus: The train outputs, each as ``SEP output EOS``.
        rows: Prompt and answer; the answer has its end-of-sequence.
    """
    # The index keeps one place of each gram; a run may continue after any of them.
    places = sorted_places(corpus.text, corpus.depth)
    every = np.where(places < 0, ~places, places)
    every.setflags(write=False)
    view = corpus.view._replace(order=every)
    tokens = steps = 0
    for prompt, answer in rows:
        text = np.concatenate([prompt, [corpus.vocab_size], answer]).astype(np.int32)
        steps += count_steps(view, corpus.depth, text, len(prompt) + 1)
        tokens += len(answer)
    return tokens / steps if steps else 0.0


@compiled
def count_steps(corpus: Any, depth: int, text: Any, begin: int) -> int:
    """Steps to the end of ``text``; the answer begins at ``begin``, after SEP."""
    at, steps = begin, 0
    while at < len(text):
        run = max(corpus_run(corpus, depth, text, at), own_run(text, at))
        at += run + 1
        steps += 1
    return steps


@compiled
def corpus_run(corpus: Any, depth: int, text: Any, at: int) -> int:
    """The longest run of ``text[at:]`` in the corpus that follows the token before ``at``."""
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
    """The longest run of ``text[at:]`` in ``text[:at]`` that follows the token before ``at``."""
    longest = 0
    for i in range(at - 1):
        if text[i] != text[at - 1]:
            continue
        k = 0
        while i + 1 + k < at and at + k < len(text) and text[i + 1 + k] == text[at + k]:
            k += 1
        longest = max(longest, k)
    return longest
