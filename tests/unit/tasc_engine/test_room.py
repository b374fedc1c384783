"""What does not fit the memory is not read; what does is."""

from pathlib import Path
from typing import Any

import pytest

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
