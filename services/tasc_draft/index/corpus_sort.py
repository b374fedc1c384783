"""Sorts places of a text by their next tokens: all places, the places of a part, or chosen places.

A gram is the next ``depth`` tokens from a place on, cut after its first END. Places are first put
into buckets by their first token. Each group of places that are equal so far is then sorted by the
next tokens, packed into a 64-bit key, with a stable radix sort. This repeats up to ``depth`` tokens
(most significant key first: McIlroy, Bostic & McIlroy 1993). Time is linear in the size of the text
times the depth.
"""

from typing import Any

import numpy as np

from tasc_draft.compiled import borrowing, compiled, read_only
from tasc_draft.drafts import Int32
from tasc_draft.index.lookup import END

DEPTH = 16  # default length of a gram
FEW = 32  # up to this many places are sorted by insertion; measured on real text
DIGIT_BITS = 9  # two digits cover a token of 18 bits: vocabularies up to 262,142
DIGITS = 1 << DIGIT_BITS
KEY_BITS = 64
SAMPLE = 1024  # places drawn per part; their quantiles are then off by about one per cent


def sort_part(
    text: Int32,
    offsets: Int32,
    counts: Int32,
    depth: int = DEPTH,
    low: int | None = None,
    high: int | None = None,
) -> tuple[Int32, Int32]:
    """Sort the places of a part of a text and merge places with the same gram.

    Args:
        text: ``int32[T]`` as in `CorpusIndex`; it may be a read-only memory map.
        offsets: ``int32[D + 1]`` where each document begins.
        counts: ``int32[D]`` how often each document occurs.
        low, high: Places that delimit the part: gram(low) <= gram < gram(high). None is an open
            end.

    Returns:
        The first place of each distinct gram, sorted, and how often the gram occurs.
    """
    places = sorted_places(text, depth, low, high)
    weights = np.repeat(counts.astype(np.int32, copy=False), np.diff(offsets))
    sums = np.empty(len(places), np.int32)
    n = merge_repeats(places, weights, sums)
    return places[:n].copy(), sums[:n].copy()


def sorted_places(
    text: Int32, depth: int, low: int | None = None, high: int | None = None
) -> Int32:
    """All places of a part, sorted by gram, then by place.

    The first place p of a gram is returned as p, and each other place p of the gram as ~p.
    """
    text = read_only(text)
    width, ends = width_of(text), [-1 if end is None else int(end) for end in (low, high)]
    bits = width.bit_length()
    first, keys, places = deal(text, depth, ends[0], ends[1], width, bits)
    refine(text, first, 1, depth, bits, keys, places)
    return places


def sort_chosen(text: Int32, places: Int32, depth: int) -> Int32:
    """Sorts ascending places of a text, and marks them like `sorted_places`."""
    text, places, bits = read_only(text), places.copy(), width_of(text).bit_length()
    keys = np.empty(len(places), np.uint64)
    gather(text, places, 0, len(places), 0, depth, bits, keys)
    refine(text, np.array([0, len(places)]), 0, depth, bits, keys, places)
    return places


def splitters(text: Int32, parts: int, depth: int = DEPTH) -> list[int]:
    """Places whose grams split a text into ``parts`` parts with about equally many places.

    The places are quantiles of an evenly spaced sample. A split by first tokens would be too
    uneven.

    Returns:
        ``parts - 1`` places by rising gram, or fewer if the text has fewer places. Several of them
        may have the same, very frequent gram; the parts between such places are empty.
    """
    stride = max(1, len(text) // (SAMPLE * parts))
    sample = np.flatnonzero(text[::stride] != END).astype(np.int32) * np.int32(stride)
    places = sort_chosen(text, sample, depth)
    places = np.where(places < 0, ~places, places)
    cuts = min(parts, len(places))
    return [int(places[len(places) * i // cuts]) for i in range(1, cuts)]


def width_of(text: Int32) -> int:
    """One more than the largest token. Keys hold token + 1, so that END is 0."""
    return int(text.max(initial=0)) + 1


@borrowing
def precedes(text: Any, a: int, b: int, depth: int) -> bool:
    """Whether the gram of place ``a`` is less than that of place ``b``."""
    for k in range(depth):
        x, y = text[a + k], text[b + k]
        if x != y or x == END:
            return x < y
    return False


@borrowing
def inside(text: Any, place: int, depth: int, low: int, high: int) -> bool:
    """Whether a place belongs to a part; a limit of -1 is an open end."""
    return (low < 0 or not precedes(text, place, low, depth)) and (
        high < 0 or precedes(text, place, high, depth)
    )


@borrowing
def bucket_of(
    text: Any, place: int, depth: int, low: int, high: int, smallest: int, greatest: int, width: int
) -> int:
    """A place's first token if the place belongs to the part, else ``width``.

    Most places are handled without a branch.
    ``smallest`` and ``greatest`` are the first tokens of ``low`` and ``high``. Only places with
    these tokens need a comparison of whole grams.
    """
    token = int(text[place])
    if token in (smallest, greatest):
        return token if token != END and inside(text, place, depth, low, high) else width
    return width + (token - width) * int(smallest < token < greatest)


@compiled
def deal(text: Any, depth: int, low: int, high: int, width: int, bits: int) -> tuple[Any, Any, Any]:
    """Put the places of a part into buckets by first token, with keys of the following tokens.

    Returns:
        first: ``int64[width + 1]`` where the bucket of each token below ``width`` begins.
        keys, places: ``uint64[n]`` and ``int32[n]``.
    """
    smallest = int(text[low]) if low >= 0 else END
    greatest = int(text[high]) if high >= 0 else width
    fill = np.zeros(width + 1, np.int64)
    for place in range(len(text)):
        fill[bucket_of(text, place, depth, low, high, smallest, greatest, width)] += 1
    first = np.zeros(width + 1, np.int64)
    for token in range(width):
        first[token + 1] = first[token] + fill[token]
        fill[token] = first[token + 1]
    # Places outside the part, and END, go to the slot after the last bucket.
    n = first[-1]
    fill[width] = n
    keys, places = np.empty(n + 1, np.uint64), np.empty(n + 1, np.int32)
    one, key = np.uint64(bits), np.uint64(0)
    lead = np.uint64(bits * (min(KEY_BITS // bits, depth - 1) - 1))
    for place in range(len(text) - 1, -1, -1):
        token = text[place]
        if token == END:
            key = np.uint64(0)
            continue
        bucket = bucket_of(text, place, depth, low, high, smallest, greatest, width)
        fill[bucket] -= bucket != width
        keys[fill[bucket]], places[fill[bucket]] = key, place
        key = (key >> one) | (np.uint64(token + 1) << lead)
    return first, keys[:n], places[:n]


@compiled
def gather(
    text: Any, places: Any, begin: int, end: int, done: int, depth: int, bits: int, keys: Any
) -> None:
    """Fill ``keys`` with each place's tokens from number ``done`` on; 0 after END or the gram."""
    room = KEY_BITS // bits
    one, take = np.uint64(bits), min(room, depth - done)
    for i in range(begin, end):
        at, key, left = places[i] + done, np.uint64(0), room
        while left > room - take:
            key = (key << one) | np.uint64(text[at] + 1)
            at += 1
            left -= 1
            if text[at - 1] == END:
                break
        keys[i] = key << np.uint64(bits * left)


@compiled
def refine(
    text: Any, first: Any, shared: int, depth: int, bits: int, keys: Any, places: Any
) -> None:
    """Sort each bucket by gram, stably, and mark all but the first place of a gram by ``~``.

    Args:
        first: ``int64[buckets + 1]`` where each bucket begins. The places of a bucket share
            ``shared`` tokens; ``keys`` holds their next tokens.
    """
    largest = 0
    for bucket in range(len(first) - 1):
        largest = max(largest, first[bucket + 1] - first[bucket])
    spare_keys, spare_places = np.empty(largest, np.uint64), np.empty(largest, np.int32)
    digits = np.empty(DIGITS, np.int64)
    stack = np.empty((largest // 2 + 1, 3), np.int64)
    taken = KEY_BITS // bits
    last = (np.uint64(1) << np.uint64(bits)) - np.uint64(1)
    for bucket in range(len(first) - 1):
        if first[bucket + 1] - first[bucket] < 2:
            continue
        stack[0, 0], stack[0, 1], stack[0, 2] = first[bucket], first[bucket + 1], shared
        top = 1
        while top > 0:
            top -= 1
            begin, end, done = stack[top, 0], stack[top, 1], stack[top, 2] + taken
            if end - begin <= FEW:
                sort_few(keys, places, begin, end)
            else:
                sort_many(keys[begin:end], places[begin:end], spare_keys, spare_places, digits)
            while begin < end:
                key, run = keys[begin], begin + 1
                while run < end and keys[run] == key:
                    run += 1
                if run - begin > 1:
                    if done >= depth or key & last == 0:
                        for i in range(begin + 1, run):
                            places[i] = ~places[i]
                    else:
                        gather(text, places, begin, run, done, depth, bits, keys)
                        stack[top, 0], stack[top, 1], stack[top, 2] = begin, run, done
                        top += 1
                begin = run


@compiled
def sort_few(keys: Any, places: Any, begin: int, end: int) -> None:
    """Stable insertion sort by key."""
    for i in range(begin + 1, end):
        key, place, j = keys[i], places[i], i
        while j > begin and keys[j - 1] > key:
            keys[j], places[j] = keys[j - 1], places[j - 1]
            j -= 1
        keys[j], places[j] = key, place


@compiled
def sort_many(keys: Any, places: Any, spare_keys: Any, spare_places: Any, digits: Any) -> None:
    """Stable radix sort by key, without digits that are equal in all keys."""
    n, differ = len(keys), np.uint64(0)
    for i in range(1, n):
        differ |= keys[i] ^ keys[0]
    from_keys, from_places = keys, places
    to_keys, to_places = spare_keys[:n], spare_places[:n]
    shift, swapped = np.uint64(0), False
    while shift < KEY_BITS and differ >> shift != 0:
        if (differ >> shift) & np.uint64(DIGITS - 1) != 0:
            deal_digit(from_keys, from_places, to_keys, to_places, shift, digits)
            from_keys, from_places, to_keys, to_places = to_keys, to_places, from_keys, from_places
            swapped = not swapped
        shift += np.uint64(DIGIT_BITS)
    if swapped:
        keys[:], places[:] = from_keys, from_places


@compiled
def deal_digit(
    keys: Any, places: Any, to_keys: Any, to_places: Any, shift: Any, digits: Any
) -> None:
    """Stable counting sort by one digit."""
    digits[:] = 0
    for key in keys:
        digits[(key >> shift) & np.uint64(DIGITS - 1)] += 1
    begin = 0
    for digit in range(DIGITS):
        size = digits[digit]
        digits[digit] = begin
        begin += size
    for i in range(len(keys)):
        digit = (keys[i] >> shift) & np.uint64(DIGITS - 1)
        to_keys[digits[digit]], to_places[digits[digit]] = keys[i], places[i]
        digits[digit] += 1


@compiled
def merge_repeats(places: Any, weights: Any, sums: Any) -> int:
    """Move the first place of each gram to the front; returns the number of grams.

    ``sums`` is filled with the sum of the weights of each gram's places.
    """
    n = 0
    for place in places:
        if place >= 0:
            places[n], sums[n] = place, weights[place]
            n += 1
        else:
            sums[n - 1] += weights[~place]
    return n
