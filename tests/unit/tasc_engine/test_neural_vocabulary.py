"""Every policy gives the full head's logits of the tokens it may draft."""

from collections import deque
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from support import refused
from tasc_engine.drafting.neural.recent import RecentVocabulary
from tasc_engine.drafting.neural.vocabulary import (
    STEPS,
    ActiveSizes,
    FullVocabulary,
    RankedVocabulary,
    Vocabulary,
)
from tasc_engine.model.linears import Linear

ROWS, SIZE, HIDDEN = 3, 200, 16
EVERYONE = torch.arange(ROWS)
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.fixture(params=DEVICES, autouse=True)
def device(request):
    with torch.device(request.param):
        yield request.param


def head() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(SIZE, HIDDEN, dtype=torch.float64)


def int32(*ids: int) -> np.ndarray:
    return np.asarray(ids, np.int32)


def drafted_from(vocabulary: Vocabulary, row: int) -> set[int]:
    """Returns the tokens that can be drafted; checks that logits equal the full head's or -inf."""
    hidden = torch.randn(1, 4, HIDDEN, dtype=torch.float64)
    rows = torch.tensor([row])
    found = vocabulary.logits(hidden, rows)
    slots = torch.arange(found.shape[-1]).expand(1, 4, -1)
    ids = vocabulary.ids_of(slots, rows)
    there = found > float("-inf")
    assert torch.equal(there, there[:, :1].expand_as(there))
    full = functional.linear(hidden, head())
    assert torch.allclose(found[there], full.gather(-1, ids)[there], rtol=1e-12, atol=1e-12)
    kept = ids[0, 0][there[0, 0]].tolist()
    assert len(set(kept)) == len(kept) == int(vocabulary.sizes(rows))
    return set(kept)


def test_full_and_ranked_logits_equal_the_logits_of_the_head():
    weight = head()
    hidden = torch.randn(2, 5, HIDDEN, dtype=torch.float64)
    rows, slots = torch.tensor([2, 0]), torch.tensor([[0, 2], [1, 1]])
    ranked = RankedVocabulary(weight, int32(7, 190, 3))
    expected = functional.linear(hidden, weight)
    full = FullVocabulary(Linear(weight))
    assert torch.equal(full.logits(hidden, rows), expected)
    assert torch.equal(full.ids_of(slots, rows), slots)
    assert full.sizes(rows).tolist() == [SIZE, SIZE]
    assert torch.allclose(ranked.logits(hidden, rows), expected[..., [7, 190, 3]])
    assert ranked.ids_of(slots, rows).tolist() == [[7, 3], [190, 190]]
    assert ranked.sizes(rows).tolist() == [3, 3]
    assert ranked.needs_top == full.needs_top == 0
    assert [ranked.nbytes, full.nbytes] == [3 * (HIDDEN + 1) * 8, 0]


@pytest.mark.parametrize("gathered", [True, False])
def test_recent_vocabulary_bytes_are_counted(gathered: bool) -> None:
    """A few numbers for each row and token are not counted."""
    weight = head()
    made = RecentVocabulary(weight, ROWS, 64, base=int32(*range(9)), gathered=gathered)
    held = {weight.untyped_storage().data_ptr(): 0, 1: 9 * HIDDEN * 8}
    for holder in (made.window, made.head):
        for tensor in vars(holder).values():
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                held.setdefault(storage.data_ptr(), storage.nbytes())
    assert 0 <= sum(held.values()) - made.nbytes < 16 * (SIZE + ROWS)


@pytest.mark.parametrize("ranks", [(3, 200), (-1,)])
def test_ranks_outside_the_head_are_refused(ranks):
    for made in (RankedVocabulary, lambda weight, ids: RecentVocabulary(weight, ROWS, base=ids)):
        with refused(ValueError, str(ranks[-1])):
            made(head(), int32(*ranks))


class Naive:
    """The window of one row in plain Python; callers cut `tops`."""

    def __init__(self, window: int) -> None:
        self.stream = deque[int](maxlen=window)
        self.drafts: list[int] = []

    def step(self, tokens: list[int], tops: list[int]) -> None:
        ids = [*last_of(self.drafts), *tokens, *last_of(tops)]
        self.stream.extend(id_ for id_ in ids if id_ < SIZE)
        self.drafts = []


def last_of(ids: list[int]) -> list[int]:
    return [id_ for place, id_ in enumerate(ids) if id_ not in ids[place + 1 :]]


def answer(vocabularies: list[RecentVocabulary], naive: list[Naive], rng: torch.Generator) -> None:
    """One step of all rows: two levels of drafts, then some tokens for each row."""
    some = partial(torch.randint, 0, SIZE, generator=rng, device="cpu")
    for level in range(2):
        rows, ids = torch.randperm(ROWS, generator=rng, device="cpu"), some((ROWS, 3 + level))
        for row, row_ids in zip(rows.tolist(), ids.tolist(), strict=True):
            naive[row].drafts += row_ids
        for each in vocabularies:
            each.drafted(rows.to(EVERYONE.device), ids.to(EVERYONE.device))
    for row in range(ROWS):
        tokens, top = some((1 + row,)), some((1 + row, 3))
        tokens[0] += SIZE * (tokens[0] % 5 == 0)  # now and then one that the head does not know
        for each in vocabularies:
            each.observe(row, tokens.numpy().astype(np.int32), top.to(EVERYONE.device))
        naive[row].step(tokens.tolist(), top.flatten().tolist())


@pytest.mark.parametrize("base", [None, (5, 17, 150)])
@pytest.mark.parametrize("window", [30, 1000])
def test_recent_vocabulary_equals_a_naive_window(base, window):
    rng = torch.Generator("cpu").manual_seed(1)
    ranked = None if base is None else int32(*base)
    both = [RecentVocabulary(head(), ROWS, window, base=ranked, gathered=g) for g in (True, False)]
    naive = [Naive(window) for _ in range(ROWS)]
    for turn in range(12):
        for row in range(ROWS):
            if (turn + row) % 5:  # else another request begins there
                continue
            naive[row] = Naive(window)
            prompt, top = list(range(row, 20)), torch.randint(0, SIZE, (20 - row, 3))
            naive[row].stream.extend([*prompt, *last_of(top.flatten().tolist()), 9])
            for each in both:
                each.finish(row)
                each.start(row, int32(*prompt))
                each.observe(row, int32(9), top)
                each.prepare()
        answer(both, naive, rng)
        for row in range(ROWS):
            expected = set(naive[row].stream) | set(base or ())
            assert drafted_from(both[0], row) == expected
        hidden = torch.randn(ROWS, 2, HIDDEN, dtype=torch.float64)
        gathered, indexed = (each.logits(hidden, EVERYONE) for each in both)
        assert torch.equal(gathered, indexed)
        slots = gathered.topk(4, -1).indices
        assert torch.equal(*(each.ids_of(slots, EVERYONE) for each in both))


@pytest.mark.parametrize("gathered", [True, False])
def test_gpu_product_equals_cpu_product(gathered):
    made = RecentVocabulary(head(), ROWS, gathered=gathered)
    for row in range(ROWS):
        made.start(row, int32(*range(row, 60, row + 1)))
    hidden, rows = torch.randn(2, 4, HIDDEN, dtype=torch.float64), torch.tensor([2, 0])
    found, expected = made.head.all_rows(hidden, rows), made.head.row_by_row(hidden, rows)
    assert found.shape == (2, 4, SIZE)
    assert torch.allclose(found[..., : expected.shape[-1]], expected, rtol=1e-12, atol=1e-12)
    assert found[..., expected.shape[-1] :].isneginf().all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_step_does_not_wait_for_the_gpu():
    with torch.device("cuda"):
        made = RecentVocabulary(head(), ROWS, base=int32(5, 17))
        rows, ids, top = torch.arange(ROWS), torch.randint(0, SIZE, (ROWS, 4)), torch.ones(2, 3)
        hidden, top = torch.randn(ROWS, 4, HIDDEN, dtype=torch.float64), top.long()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            made.start(0, int32(1, 2))
            made.observe(0, int32(3), top)
            made.drafted(rows, ids)
            made.observe(1, int32(4), top)
            slots = made.logits(hidden, rows).argmax(-1)
            made.ids_of(slots, rows)
            made.sizes(rows)
            made.finish(0)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_unstarted_row_has_an_empty_vocabulary():
    made = RecentVocabulary(head(), ROWS)
    made.start(1, int32(4, 4, 150))
    assert (drafted_from(made, 1), drafted_from(made, 0)) == ({4, 150}, set())
    assert made.ids_of(torch.tensor([[0, 63]]), torch.tensor([0])).tolist() == [[0, 0]]
    made.finish(1)
    assert made.sizes(EVERYONE).tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("left", "prompted", "answered"),
    [
        ({}, {1, 2, 10, 11, 12, 20, 21, 22, 5}, {30, 40, 41, 42}),
        ({"extension": False}, {1, 2, 10, 11, 12, 20, 21, 22}, set()),
        ({"context": False}, {20, 21, 22, 5}, {30, 40, 41, 42}),
    ],
)
def test_recent_vocabulary_has_no_tokens_of_a_disabled_stream(left, prompted, answered):
    made = RecentVocabulary(head(), ROWS, **left)
    assert made.needs_top == 3
    made.start(0, int32(1, 2))
    made.observe(0, int32(5), torch.tensor([[10, 11, 12], [20, 21, 22]]))
    assert drafted_from(made, 0) == prompted
    made.drafted(torch.tensor([2, 0]), torch.tensor([[99], [30]]))
    made.observe(0, int32(40), torch.tensor([[40, 41, 42]]))
    made.prepare()
    assert drafted_from(made, 0) == prompted | answered


def test_pending_drafts_wait_for_observation_and_end_with_the_request():
    made = RecentVocabulary(head(), ROWS)
    for row in range(ROWS):
        made.start(row, int32(row))
        made.observe(row, int32(row), None)
    made.prepare()
    with torch.inference_mode():  # as a proposer's forwards are, and what surrounds them is not
        made.drafted(EVERYONE, torch.tensor([[50], [51], [52]]))
    assert [drafted_from(made, row) for row in range(ROWS)] == [{0}, {1}, {2}]
    made.finish(1)
    made.start(1, int32(7))
    made.observe(0, int32(0), None)
    assert [drafted_from(made, row) for row in range(ROWS)] == [{0, 50}, {7}, {2, 52}]


def test_token_keeps_its_slot_above_freed_slots():
    made = RecentVocabulary(head(), ROWS, window=100)
    made.start(0, int32(*range(100)))
    made.observe(0, int32(7), None)
    made.observe(0, int32(*[99] * 99), None)
    assert drafted_from(made, 0) == {7, 99}


def test_unobserved_drafts_are_bounded():
    made = RecentVocabulary(head(), ROWS, window=4)
    for first in range(0, 100, 2):
        made.drafted(torch.tensor([0]), torch.tensor([[first, first + 1]]))
    made.observe(0, int32(), None)
    assert drafted_from(made, 0) == {96, 97, 98, 99}


def test_vocabulary_sizes_are_reported_in_batches() -> None:
    vocabulary = RankedVocabulary(torch.zeros(9, 4), np.array([1, 5, 7], np.int32))
    reported: list[list[int]] = []
    sizes = ActiveSizes(vocabulary, torch.device("cpu"), reported.append)
    for step in range(2 * STEPS + 3):
        sizes.drafted(np.arange(step % 3, dtype=np.int32))
    rows = [sum(step % 3 for step in range(n * STEPS, (n + 1) * STEPS)) for n in range(2)]
    assert reported == [[3] * n for n in rows]
