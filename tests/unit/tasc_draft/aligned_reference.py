"""Words, contexts and counts in plain Python: tuples and lists, no hashing, no arrays."""

from collections.abc import Sequence

import numpy as np

from tasc_draft.index.aligned import AlignedTable
from tasc_draft.index.aligned_build import build_aligned
from tasc_draft.index.aligned_keys import KINDS, NO_RECORD, context_keys, find, words
from tasc_draft.tokens import Tokens

# Even ids begin a word, odd ones go on with it; 18 is the end of an output.
VOCAB, EOS = 20, 18
STARTS = np.array([token % 2 == 0 for token in range(VOCAB)] + [True])
HEAD, TAIL = (4, 5, 6), (8, 9, 10)  # two words each

Row = tuple[list[int], list[int]]
Word = tuple[int, ...]


def build(rows: Sequence[Row]) -> AlignedTable | None:
    return build_aligned(
        Tokens.of([prompt for prompt, _ in rows]),
        Tokens.of([output for _, output in rows]),
        word_starts=STARTS,
        vocab_size=VOCAB,
        eos_id=EOS,
    )


def built(rows: Sequence[Row]) -> AlignedTable:
    table = build(rows)
    assert table is not None
    return table


def split(text: Sequence[int]) -> list[Word]:
    found: list[Word] = []
    for token in text:
        if not found or token % 2 == 0:
            found.append(())
        found[-1] += (token,)
    return found


def contexts(prompt: Sequence[int], output: Sequence[int], head: int) -> list[tuple[Word, ...]]:
    """The contexts of the token behind an output, in plain tuples, kind by kind."""
    all_words = dict(enumerate(split(prompt)))
    u = head + len(split(output))
    before, at, after = (all_words.get(u + step, ()) for step in (-1, 0, 1))
    y1, y2 = ([-1, VOCAB, *output])[-1:], ([-1, VOCAB, *output])[-2:]
    return [
        (at, tuple(y1)),
        (at, tuple(y2)),
        (at, tuple(y1), after),
        (at[-1:], tuple(y2)),
        (before, at, tuple(y2)),
        (at[-1:], after[-1:], tuple(y2)),
    ]


def keys_of(prompt: Sequence[int], output: Sequence[int], head: int, room: int = 64) -> np.ndarray:
    hashes, lasts = np.zeros(room, np.uint32), np.zeros(room, np.int32)
    n = words(np.array(prompt, np.int32), STARTS, hashes, lasts)
    y2, y1 = ([-1, VOCAB, *output])[-2:]
    keys = np.zeros(KINDS, np.uint32)
    context_keys(hashes, lasts, n, head + len(split(output)), y1, y2, keys)
    return keys


def moments(rows: Sequence[Row]) -> list[tuple[list[int], list[int], int]]:
    """Prompt, output so far and next token, for each token of the rows' outputs."""
    return [
        (prompt, output[:n], [*output, EOS][n])
        for prompt, output in rows
        for n in range(len(output) + 1)
    ]


def record(table: AlignedTable, key: int) -> tuple[dict[int, int], int]:
    at = find(table.view, key)
    if at == NO_RECORD:
        return {}, 0
    run = slice(table.first[at], table.first[at + 1])
    found = dict(zip(table.tokens[run].tolist(), table.counts[run].tolist(), strict=True))
    return found, int(table.totals[at])
