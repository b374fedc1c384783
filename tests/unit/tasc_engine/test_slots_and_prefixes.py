"""Tests slots and memory: fitting requests get them, no tokens are lost, prefixes are kept."""

from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tree_layouts import forest, no_moves

from tasc_engine.kv.allocator import KVAllocator
from tasc_engine.kv.cache import RowCache, on_device
from tasc_engine.kv.prefix_cache import MAX_KEPT, MIN_TOKENS, PrefixCache
from tasc_engine.layout import ForwardBatch, Int64, lay_out, plain_batch
from tasc_engine.step.sequence import Sequence
from tasc_protocol import Request

TOTAL = 40
UNUSED = -1.0  # the value of the slot after the last one


def begin(cache: RowCache, moves: Int64) -> None:
    """Begins a step of one token at the last place, which is unused, and some moves."""
    plain = plain_batch([cache.slots], 0, np.zeros(1, np.int32))
    layout = lay_out(plain, moves)
    cache.begin(layout, on_device(layout, torch.device("cpu")))


def used_cache() -> RowCache:
    cache = RowCache(2, TOTAL)
    begin(cache, no_moves())
    cache.pool(0, 1, 2, torch.zeros(1))
    cache.paste(TOTAL, torch.full((2, 1, 2, 1, 2), UNUSED))
    return cache


def sequence(name: int, prompt: int, max_tokens: int) -> Sequence:
    request = Request(str(name), (7,) * prompt, max_tokens)
    return Sequence(request, Mock(eos_ids=()))


def write(cache: RowCache, held: Sequence) -> list[float]:
    """Writes a unique number to each place of a sequence; layers differ."""
    marks = [1000.0 * int(held.request.id) + place for place in range(held.max_kv_slots)]
    kv = torch.tensor(marks)[None, :, None, None, None].expand(2, -1, 2, 1, 2).clone()
    kv[1] += 0.5
    cache.paste(held.kv_start, kv)
    return marks


def read(cache: RowCache, held: Sequence) -> list[float]:
    kv = cache.copied(held.kv_start, held.max_kv_slots)
    assert (kv[1] == kv[0] + 0.5).all()
    assert (kv == kv[:, :, :1, :, :1]).all()
    return kv[0, :, 0, 0, 0].tolist()


class Residents(RuleBasedStateMachine):
    """Random operations on sequences. Values are written at entry, and a step makes the moves."""

    @initialize()
    def empty(self) -> None:
        self.cache = used_cache()
        self.slots = KVAllocator(self.cache)
        self.marks: dict[str, list[float]] = {}
        self.held: list[Sequence] = []
        self.waiting: list[tuple[Sequence, int, int]] = []  # sequence, source and target in it
        self.named = 0

    def moves(self) -> Int64:
        parts = [(s.kv_start + source, s.kv_start + target) for s, source, target in self.waiting]
        return np.array(parts, np.int64).reshape(-1, 2).T.copy()

    @rule(prompt=st.sampled_from([*range(1, 17)] * 2 + [TOTAL]), max_tokens=st.integers(1, 10))
    def enter(self, prompt: int, max_tokens: int) -> None:
        self.named += 1
        new = sequence(self.named, prompt, max_tokens)
        firsts, before = [s.kv_start for s in self.held], self.moves()
        fits = prompt + max_tokens - 1 <= TOTAL - sum(len(m) for m in self.marks.values())
        assert self.slots.enter(new) == fits
        if fits:
            self.held.append(new)
            assert (self.cache.pending_moves == self.moves()).all()
            assert [read(self.cache, s) for s in self.held[:-1]] == list(self.marks.values())
            self.marks[new.request.id] = write(self.cache, new)
        else:
            assert new.kv_start == -1
            assert [s.kv_start for s in self.held] == firsts
            assert (self.cache.pending_moves == before).all()

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 99))
    def leave(self, which: int) -> None:
        gone = self.held.pop(which % len(self.held))
        del self.marks[gone.request.id]
        self.waiting = [move for move in self.waiting if move[0] is not gone]
        self.slots.leave(gone)
        assert (self.cache.pending_moves == self.moves()).all()

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 99), at=st.integers(0, 24), to=st.integers(0, 24))
    def accept_a_node(self, which: int, at: int, to: int) -> None:
        """A step may move several of a sequence's slots, each to one of its own."""
        mover = self.held[which % len(self.held)]
        source, target = at % mover.max_kv_slots, to % mover.max_kv_slots
        if all(s is not mover or t != target for s, _, t in self.waiting):
            self.waiting.append((mover, source, target))
            self.cache.pending_moves = self.moves()

    @rule()
    def step(self) -> None:
        begin(self.cache, self.cache.pending_moves)
        assert not self.cache.pending_moves.size
        found = {name: list(marks) for name, marks in self.marks.items()}
        for s, source, target in self.waiting:
            found[s.request.id][target] = self.marks[s.request.id][source]
        self.marks, self.waiting = found, []

    @invariant()
    def all_is_where_it_belongs(self) -> None:
        self.slots.check_integrity()
        assert self.slots.total == TOTAL
        assert self.slots.free == TOTAL - sum(len(m) for m in self.marks.values())
        ends = [(s.kv_start, s.kv_start + s.max_kv_slots) for s in self.held]
        taken = [place for own in ends for place in range(*own)]
        assert len(set(taken)) == len(taken)
        assert set(taken) <= set(range(TOTAL))
        assert [read(self.cache, s) for s in self.held] == list(self.marks.values())
        assert (self.cache.copied(TOTAL, 1) == UNUSED).all()


TestResidents = Residents.TestCase
TestResidents.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def held_by(cache: RowCache, needs: list[int]) -> tuple[KVAllocator, list[Sequence]]:
    slots, held = KVAllocator(cache), [sequence(i + 1, n, 1) for i, n in enumerate(needs)]
    for s in held:
        assert slots.enter(s)
        write(cache, s)
    return slots, held


def test_request_moves_no_other_request_if_a_gap_is_long_enough() -> None:
    cache = used_cache()
    slots, (_, gone, last) = held_by(cache, [10, 12, 8])
    slots.leave(gone)
    new = sequence(4, 12, 1)
    assert slots.enter(new)
    assert (new.kv_start, last.kv_start) == (10, 22)


@pytest.mark.parametrize("first", [-1, 9, TOTAL - 7])
def test_overlapping_slots_are_detected(first) -> None:
    slots, (_, last) = held_by(used_cache(), [10, 8])
    slots.check_integrity()
    last.kv_start = first
    with pytest.raises(AssertionError):
        slots.check_integrity()


def test_request_waits_if_other_requests_cannot_be_moved(monkeypatch) -> None:
    cache = used_cache()
    slots, (_, leaves, stays) = held_by(cache, [10, 10, 10])
    slots.leave(leaves)
    comes = sequence(9, 10, 6)
    with monkeypatch.context() as patch:
        patch.setattr(RowCache, "shift", Mock(side_effect=MemoryError))
        assert not slots.enter(comes)
    slots.check_integrity()
    marks = write(cache, stays)
    assert slots.enter(comes)
    assert (comes.kv_start, stays.kv_start) == (20, 10)
    assert read(cache, stays) == marks


LENGTH = 100
PLACE = 2 * 1 * 4 * 4  # bytes of a token in a layer


def ids(*parts: tuple[int, int]) -> np.ndarray:
    """Runs of ``n`` tokens that count from ``first``."""
    return np.concatenate([np.arange(first, first + n, dtype=np.int32) for first, n in parts])


@pytest.fixture
def cache() -> RowCache:
    """A cache with the id of each token in its keys and values."""
    made = RowCache(2, 4 * LENGTH)
    write_tokens(made, 0, ids((0, 1)))
    return made


@pytest.fixture
def prefixes(cache: RowCache) -> PrefixCache:
    return PrefixCache(cache, 1 << 20)


def write_tokens(cache: RowCache, row: int, tokens: np.ndarray) -> None:
    none, one = forest([()]), np.zeros(1, np.int32)
    offsets = np.array([0, len(tokens)], np.int32)
    batch = ForwardBatch(np.array([row * LENGTH]), one, tokens, offsets, one, none)
    layout = lay_out(batch)
    cache.begin(layout, on_device(layout, torch.device("cpu")))
    kv = torch.from_numpy(tokens).float()[:, None, None, None].expand(-1, 2, 1, 4)
    for layer in range(2):
        cache.keep(layer, kv + 1000 * layer)


def held(cache: RowCache, row: int, tokens: int) -> np.ndarray:
    kv = cache.copied(row * LENGTH, tokens)
    assert (kv[1] == kv[0] + 1000).all()
    assert (kv == kv[:, :, :1, :, :1]).all()
    return kv[0, :, 0, 0, 0].numpy().astype(np.int32)


def asked(
    prefixes: PrefixCache, cache: RowCache, row: int, prompt: np.ndarray, adapter: int = 0
) -> int:
    """Runs a whole prompt in a row; returns the number of copied tokens."""
    entered = prefixes.enter(row * LENGTH, prompt, adapter)
    assert (held(cache, row, entered) == prompt[:entered]).all()
    write_tokens(cache, row, prompt)
    prefixes.leave(row * LENGTH, prompt, entered, adapter)
    return entered


@pytest.mark.parametrize(
    ("nbytes", "prompts", "copied", "kept"),
    [
        (1 << 20, [((100, 20), (300 + 50 * i, 5 + i)) for i in range(6)], [0, 0, *[20] * 4], 20),
        (1 << 20, [((100, 30),)] * 3, [0, 0, 29], 29),  # all but its last token
        *((n, [((100, 20), (0, i + 1)) for i in range(4)], [0] * 4, 0) for n in (0, PLACE)),
    ],
)
def test_shared_prefix_is_copied_into_the_third_prompt(cache, nbytes, prompts, copied, kept):
    """Nothing is copied if the budget is too small for the prefix."""
    prefixes, whole = PrefixCache(cache, nbytes), [ids(*parts) for parts in prompts]
    assert [asked(prefixes, cache, i % 4, one) for i, one in enumerate(whole)] == copied
    assert prefixes.nbytes == kept * 2 * PLACE


def test_expected_prefix_is_copied_into_the_second_prompt_of_each_adapter(cache, prefixes):
    template = (100, 20)
    prefixes.expect(ids(template, (0, 9)))
    found = [asked(prefixes, cache, 0, ids(template, (300 + i, 5)), i % 2) for i in range(4)]
    assert found == [0, 0, 20, 20]


def test_longest_prefix_is_copied_and_short_prefixes_are_not(cache, prefixes) -> None:
    short, long = ((100, 12),), ((100, 12), (500, 12))
    for prompt in (ids(*short, (0, 9)), ids(*short, (20, 9)), ids(*long, (40, 9)),
                   ids(*long, (60, 9))):  # fmt: skip
        asked(prefixes, cache, 1, prompt)
    assert prefixes.enter(2 * LENGTH, ids(*long, (80, 9))) == 24
    assert prefixes.enter(2 * LENGTH, ids(*short, (80, 9))) == 12
    assert prefixes.enter(2 * LENGTH, ids((100, MIN_TOKENS - 1), (0, 40))) == 0
    assert prefixes.enter(2 * LENGTH, ids((7, 40))) == 0


def test_prefix_bytes_are_bounded_by_lru_eviction(cache) -> None:
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


def test_prefixes_are_copied_only_before_caching_and_truncated_to_the_budget(
    cache, monkeypatch
) -> None:
    prefixes, copies, honest = PrefixCache(cache, 12 * 2 * PLACE), [], cache.copied
    monkeypatch.setattr(cache, "copied", lambda first, n: copies.append(n) or honest(first, n))
    for row in range(4):  # prefilled together, none entered
        prompt = ids((100, 20), (300 + 50 * row, 5))
        write_tokens(cache, row, prompt)
        prefixes.leave(row * LENGTH, prompt, 0)
    assert copies == [12]
    assert prefixes.enter(0, ids((100, 20), (0, 9))) == 12
    prefixes.check_integrity()


def test_number_of_prefixes_is_bounded(cache) -> None:
    prefixes = PrefixCache(cache, 1 << 30)
    for i in range(MAX_KEPT + 9):
        for j in range(2):
            asked(prefixes, cache, 0, ids((100 * i, 20), (10**6 + j, 1)))
    assert prefixes.nbytes == MAX_KEPT * 20 * 2 * PLACE
