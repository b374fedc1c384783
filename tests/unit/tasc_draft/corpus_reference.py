"""The corpus index in plain Python: counters, tuples and sorting. It shares no code with it."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from random import Random

import numpy as np

from tasc_draft.index.corpus import ARRAYS, CorpusIndex
from tasc_draft.index.corpus_build import build_corpus
from tasc_draft.tokens import Tokens

END = -1
HOT = 32
WIDEST = 8
EOS = 0

Gram = tuple[int, ...]
Outputs = Sequence[Sequence[int]]


def build(outputs: Outputs, vocab_size: int, **settings: int) -> CorpusIndex:
    return build_corpus(
        Tokens.of(outputs), fingerprint="f", vocab_size=vocab_size, eos_id=EOS, **settings
    )


def marked(outputs: Outputs, sep: int) -> list[Gram]:
    return [(sep, *output, EOS) for output in outputs]


def gram_counts(outputs: Outputs, sep: int, depth: int) -> Counter[Gram]:
    """How often every gram of 1 to ``depth`` tokens occurs."""
    return Counter(
        document[i : i + n]
        for document in marked(outputs, sep)
        for n in range(1, depth + 1)
        for i in range(len(document) - n + 1)
    )


def entries(outputs: Outputs, sep: int, depth: int) -> dict[Gram, int]:
    """Every distinct gram of ``depth`` tokens, cut behind its END, sorted, and its count."""
    found = Counter(
        (*document, END)[i : i + depth]
        for document in marked(outputs, sep)
        for i in range(len(document))
    )
    return dict(sorted(found.items()))


def next_tokens(counts: Counter[Gram]) -> dict[Gram, list[tuple[int, int]]]:
    """The most frequent continuations of each context, as (token, count)."""
    followers: defaultdict[Gram, list[tuple[int, int]]] = defaultdict(list)
    for gram, count in counts.items():
        followers[gram[:-1]].append((gram[-1], count))
    return {
        context: sorted(pairs, key=lambda pair: (-pair[1], pair[0]))[:WIDEST]
        for context, pairs in followers.items()
    }


def hot_intervals(grams: Sequence[Gram], depth: int) -> dict[tuple[int, int], Gram]:
    """(first entry, length) of each prefix of many entries that is not always followed alike."""
    found = {}
    for n in range(depth):
        groups: defaultdict[Gram, list[int]] = defaultdict(list)
        for number, gram in enumerate(grams):
            if len(gram) > n:
                groups[gram[:n]].append(number)
        for prefix, members in groups.items():
            if len(members) > HOT and len({grams[i][n] for i in members}) > 1:
                found[members[0], n] = prefix
    return dict(sorted(found.items()))


def skewed(seed: int, documents: int, vocab_size: int) -> list[list[int]]:
    """Outputs of frequent and rare tokens, some repeated, some alike, some empty."""
    random = Random(seed)
    outputs: list[list[int]] = [[]]
    for _ in range(documents):
        if random.random() < 0.3:
            output = list(random.choice(outputs))
            output[random.randrange(len(output) + 1) :] = []
        else:
            output = []
        for _ in range(random.randrange(8)):
            output.append(min(int(random.paretovariate(0.7)), vocab_size - 1))
        outputs += [output] * random.choice([1, 1, 1, 4])
    return outputs


def assert_same(a: CorpusIndex, b: CorpusIndex) -> None:
    for name in ARRAYS:
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)
    assert (a.documents, a.tokens, a.depth) == (b.documents, b.tokens, b.depth)
