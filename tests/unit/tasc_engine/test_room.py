"""What does not fit the memory is not read; what does is."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tasc_engine import room
from tasc_engine.loading import ModelSource, load_model
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
