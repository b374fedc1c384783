"""Shared beginnings: what two prompts have in common is kept, copied exactly, and bounded."""

import numpy as np
import torch
from draft_trees import forest, no_moves

from tasc_engine.attention import RowCache, on_device
from tasc_engine.layout import Feed, lay_out
from tasc_engine.prefixes import LEAST_TOKENS, MOST_KEPT, PrefixCache

LENGTH = 100
PLACE = 2 * 1 * 4 * 4  # bytes of a token in a layer


def ids(*parts: tuple[int, int]) -> np.ndarray:
    """Runs of ``n`` tokens that count from ``first``."""
    return np.concatenate([np.arange(first, first + n, dtype=np.int32) for first, n in parts])


def filled(rows: int = 4) -> RowCache:
    """A cache in which the keys and values of each token say its id."""
    cache = RowCache(2, rows * LENGTH)
    write(cache, 0, ids((0, 1)))
    return cache


def write(cache: RowCache, row: int, tokens: np.ndarray) -> None:
    none, one = forest([()]), np.zeros(1, np.int32)
    offsets = np.array([0, len(tokens)], np.int32)
    feed = Feed(np.array([row * LENGTH]), one, tokens, offsets, one, none, no_moves())
    layout = lay_out(feed)
    cache.begin(layout, on_device(layout, torch.device("cpu")))
    kv = torch.from_numpy(tokens).float()[:, None, None, None].expand(-1, 2, 1, 4)
    for layer in range(2):
        cache.keep(layer, kv + 1000 * layer)


def held(cache: RowCache, row: int, tokens: int) -> np.ndarray:
    kv = cache.copied(row * LENGTH, tokens)
    assert (kv[1] == kv[0] + 1000).all()
    assert (kv == kv[:, :, :1, :, :1]).all()
    return kv[0, :, 0, 0, 0].numpy().astype(np.int32)


def asked(prefixes: PrefixCache, cache: RowCache, row: int, prompt: np.ndarray) -> int:
    """A whole prompt's life in a row; returns what was copied."""
    entered = prefixes.enter(row * LENGTH, prompt)
    assert (held(cache, row, entered) == prompt[:entered]).all()
    write(cache, row, prompt)
    prefixes.leave(row * LENGTH, prompt, entered)
    return entered


def test_what_two_prompts_share_is_copied_into_the_third() -> None:
    cache = filled()
    prefixes = PrefixCache(cache, 1 << 20)
    template = (100, 20)
    found = [asked(prefixes, cache, i % 4, ids(template, (300 + 50 * i, 5 + i))) for i in range(6)]
    assert found == [0, 0, 20, 20, 20, 20]
    assert prefixes.nbytes == 20 * 2 * PLACE


def test_a_prompt_asked_again_leaves_its_last_token() -> None:
    cache = filled()
    prefixes = PrefixCache(cache, 1 << 20)
    prompt = ids((100, 30))
    assert [asked(prefixes, cache, 0, prompt) for _ in range(3)] == [0, 0, 29]


def test_the_longest_beginning_is_taken_and_short_ones_are_left() -> None:
    cache = filled()
    prefixes = PrefixCache(cache, 1 << 20)
    short, long = ((100, 12),), ((100, 12), (500, 12))
    for prompt in (ids(*short, (0, 9)), ids(*short, (20, 9)), ids(*long, (40, 9)),
                   ids(*long, (60, 9))):  # fmt: skip
        asked(prefixes, cache, 1, prompt)
    assert prefixes.enter(2 * LENGTH, ids(*long, (80, 9))) == 24
    assert prefixes.enter(2 * LENGTH, ids(*short, (80, 9))) == 12
    assert prefixes.enter(2 * LENGTH, ids((100, LEAST_TOKENS - 1), (0, 40))) == 0
    assert prefixes.enter(2 * LENGTH, ids((7, 40))) == 0


def test_bytes_are_bounded_and_the_least_recently_used_goes_first() -> None:
    cache = filled()
    prefixes = PrefixCache(cache, 2 * 20 * 2 * PLACE)
    first, second, third = ((100, 20),), ((200, 20),), ((300, 20),)
    for template in (first, second):
        for i in range(2):
            asked(prefixes, cache, 0, ids(*template, (1000 + 100 * i, 9)))
    assert prefixes.enter(LENGTH, ids(*first, (0, 9))) == 20
    for i in range(2):
        asked(prefixes, cache, 0, ids(*third, (1000 + 100 * i, 9)))
    assert prefixes.nbytes == 2 * 20 * 2 * PLACE
    assert [prefixes.enter(LENGTH, ids(*t, (0, 9))) for t in (first, second, third)] == [20, 0, 20]


def test_without_a_budget_or_within_too_small_a_one_nothing_is_kept() -> None:
    cache = filled()
    for budget in (0, PLACE):
        prefixes = PrefixCache(cache, budget)
        found = [asked(prefixes, cache, 0, ids((100, 20), (0, i + 1))) for i in range(4)]
        assert found == [0, 0, 0, 0]
        assert prefixes.nbytes == 0


def test_no_more_beginnings_are_kept_than_can_be_looked_through() -> None:
    cache = filled()
    prefixes = PrefixCache(cache, 1 << 30)
    for i in range(MOST_KEPT + 9):
        for j in range(2):
            asked(prefixes, cache, 0, ids((100 * i, 20), (10**6 + j, 1)))
    assert prefixes.nbytes == MOST_KEPT * 20 * 2 * PLACE
