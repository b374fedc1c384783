"""What fits the memory, and which prefixes are kept in it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from draft_trees import forest, no_moves

from tasc_engine import room
from tasc_engine.attention import RowCache, on_device
from tasc_engine.layout import Feed, lay_out
from tasc_engine.loading import ModelSource, load_model
from tasc_engine.prefixes import LEAST_TOKENS, MOST_KEPT, PrefixCache
from tasc_engine.room import require_room


@pytest.fixture
def needed(folder: Path) -> int:
    return 2 * 4 * sum(p.numel() for p in load_model(ModelSource(folder)).parameters())


def test_a_model_needs_room_for_two_copies_of_it(
    folder: Path, needed: int, monkeypatch: Any
) -> None:
    whole = 100 * needed
    monkeypatch.setattr(room, "_memory", lambda: [(6 * needed, whole)])
    require_room(ModelSource(folder))
    monkeypatch.setattr(room, "_memory", lambda: [(whole, whole), (6 * needed - 1, whole)])
    with pytest.raises(MemoryError, match=f"up to {needed:,} bytes beside .* restart the service"):
        require_room(ModelSource(folder))


@pytest.fixture
def gpu(monkeypatch: Any) -> dict[str, tuple[int, int]]:
    """What a GPU is said to have, of which torch keeps nothing."""
    said = {"cuda": (1 << 40, 1 << 40)}
    monkeypatch.setattr(torch.cuda, "mem_get_info", said.get)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
    return said


def test_for_a_gpu_one_copy_goes_through_the_machine_and_two_fit_the_gpu(
    folder: Path, needed: int, gpu: dict[str, tuple[int, int]], monkeypatch: Any
) -> None:
    source, whole = ModelSource(folder, device="cuda"), 100 * needed
    enough = 5 * needed + needed // 2
    monkeypatch.setattr(room, "_memory", lambda: [(enough, whole)])
    require_room(source)
    monkeypatch.setattr(room, "_memory", lambda: [(enough - 1, whole)])
    with pytest.raises(MemoryError, match=f"up to {needed // 2:,} bytes beside"):
        require_room(source)
    monkeypatch.setattr(room, "_memory", list)
    gpu["cuda"] = (6 * needed, whole)
    require_room(source)
    gpu["cuda"] = (6 * needed - 1, whole)
    with pytest.raises(MemoryError, match=f"up to {needed:,} bytes of cuda beside .* restart"):
        require_room(source)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 1)
    require_room(source)  # what torch keeps of what was freed


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_quantised_weights_are_counted_as_they_are_held(
    folder: Path, needed: int, gpu: dict[str, tuple[int, int]], device: str
) -> None:
    plain = room._need(ModelSource(folder, device=device))
    held = {}
    for kind in ("nf4", "int8"):
        need = room._need(ModelSource(folder, device=device, quantization=kind))
        sizes = list(room._sizes(ModelSource(folder, quantization=kind)))
        assert sum(whole for whole, _ in sizes) == needed // 2
        held[kind] = sum(own for _, own in sizes)
        ahead = need.machine if device == "cuda" else need.machine - held[kind]
        assert 0 < ahead <= room._AT_ONCE * max(whole for whole, _ in sizes)
        assert need.gpu == (held[kind] + ahead if device == "cuda" else 0)
    assert (
        held["nf4"] < held["int8"] < needed // 2 == plain.machine // (2 if device == "cpu" else 1)
    )


def test_machine_and_container_say_what_is_free(tmp_path: Path, monkeypatch: Any) -> None:
    assert room._memory(), "this machine says it"
    monkeypatch.setattr(room, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(room, "_CONTAINER", tmp_path)
    assert room._memory() == [], "nobody says it"
    (tmp_path / "meminfo").write_text("MemTotal:  8 kB\nMemFree:  1 kB\nMemAvailable:  3 kB\n")
    assert room._memory() == [(3 << 10, 8 << 10)]
    (tmp_path / "memory.max").write_text("max\n")
    assert len(room._memory()) == 1, "the container has no limit"
    (tmp_path / "memory.max").write_text("4000\n")
    (tmp_path / "memory.current").write_text("3000\n")
    (tmp_path / "memory.stat").write_text("anon 2000\ninactive_file 500\n")
    assert room._memory() == [(3 << 10, 8 << 10), (1500, 4000)]


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
