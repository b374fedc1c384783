"""Tests that a KV cache takes no more than a device has, on a CPU that pretends to have less."""

import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support import SMALL, failing_where, load_target, make_engine, refused
from tasc_engine import Request
from tasc_engine.config import EngineConfig
from tasc_engine.errors import OutOfMemory
from tasc_engine.kv.device_memory import DeviceMemory, limit_process, memory_of, room_for_cache
from tasc_engine.model import target as target_module
from tasc_engine.model.loading import ModelSource
from tasc_engine.model.target import Target
from tiny import make_folder

CONFIG = replace(SMALL, prefix_cache_bytes=1000)
GB = 10**9


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def each(folder: Path) -> int:
    """Bytes of one token in all layers."""
    return load_target(folder).cache.token_bytes


def loaded(folder: Path, room: int, config: EngineConfig = CONFIG) -> Target:
    """Loads a model on a device that has ``room`` bytes for its KV cache."""
    free = (room + config.prefix_cache_bytes) / config.gpu_memory_share
    memory = DeviceMemory(100 * GB, math.ceil(free), 0)
    assert room <= room_for_cache(memory, config).nbytes <= room + 1
    source = ModelSource(folder, dtype="float64")
    return Target.load(source, config, lambda device: memory)


@given(
    st.integers(1, 200), st.integers(0, 100), st.integers(0, 100),
    st.floats(0.01, 1), st.floats(0.01, 1), st.integers(0, 10**9),
)  # fmt: skip
def test_caches_take_their_share_of_what_is_left(total, used, free, share, part, prefixes) -> None:
    memory = DeviceMemory(total * GB, free * GB, used * GB)
    config = EngineConfig(gpu_memory_share=share, gpu_part=part, prefix_cache_bytes=prefixes)
    room = room_for_cache(memory, config)
    assert room.nbytes >= 0
    if room.nbytes:
        assert room.nbytes + prefixes <= share * memory.free
        assert memory.used + room.nbytes + prefixes <= share * part * memory.total
    for value in (f"{share:g}", f"{part:g}", f"{memory.total / 1e6:,.0f} MB", str(prefixes)):
        assert value in room.reason


def test_half_a_gpu_with_weights_leaves_the_rest_of_its_share() -> None:
    memory, config = DeviceMemory(80 * GB, 70 * GB, 2 * GB), EngineConfig(prefix_cache_bytes=0)
    assert room_for_cache(memory, config).nbytes == 63 * GB  # 0.9 of what is free
    half = replace(config, gpu_part=0.5)
    assert room_for_cache(memory, half).nbytes == 34 * GB  # 0.9 * 0.5 * 80 - 2


@pytest.mark.parametrize("name", ["gpu_memory_share", "gpu_part"])
@pytest.mark.parametrize("value", [0.0, 1.5])
def test_share_out_of_range_is_refused(name: str, value: float) -> None:
    values: dict[str, Any] = {name: value}
    with refused(ValueError, name, str(value)):
        EngineConfig(**values)


def test_cache_takes_what_all_rows_need_at_most(folder, each, caplog) -> None:
    assert loaded(folder, 1000 * GB // 100).cache.slots == CONFIG.rows * CONFIG.max_model_len
    assert not caplog.records


@pytest.mark.parametrize("tokens", [64, 65, 100, 127])
def test_cache_takes_the_tokens_that_fit_and_says_so(folder, each, caplog, tokens: int) -> None:
    with caplog.at_level(logging.WARNING, "tasc_engine.kv.cache"):
        target = loaded(folder, (tokens + 1) * each)
    assert target.cache.slots == tokens
    (record,) = caplog.records
    for named in (str(tokens), "128", "1 rows", "gpu_memory_share is 0.9", "lower rows"):
        assert named in record.getMessage()


def test_device_without_room_for_one_row_is_an_error_with_the_numbers(folder, each) -> None:
    room = 64 * each
    names = ("max_model_len 64", str(64 * each), "gpu_memory_share is 0.9", "lower max_model_len")
    with refused(OutOfMemory, *names):
        loaded(folder, room)
    shorter = replace(CONFIG, max_model_len=32)
    assert loaded(folder, room, shorter).cache.slots == 63


def test_kv_cache_bytes_limits_the_cache_below_its_room(folder, each) -> None:
    config = replace(CONFIG, kv_cache_bytes=41 * each)
    assert loaded(folder, 200 * each, config).cache.slots == 40


def test_answers_in_a_small_cache_equal_those_with_room_for_all_rows(folder, each) -> None:
    """Positive control: both rows run together only if there is room for both."""
    answers, together = [], []
    for room in (65 * each, 1000 * each):
        engine = make_engine(folder, CONFIG, target=loaded(folder, room))
        for i in range(2):
            prompt = tuple(range(3 + i, 13 + i))
            engine.submit(Request(str(i), prompt, 40, ignore_eos=True))
        running, found = 0, {}
        while engine.running or engine.waiting:
            found |= {d.result.id: d.result.tokens for d in engine.step() if d.result}
            running = max(running, engine.running)
        answers.append(found)
        together.append(running)
    assert answers[0] == answers[1]
    assert together == [1, 2]


def test_memory_is_asked_once_for_the_device_of_the_model(folder: Path) -> None:
    asked = list[torch.device]()
    Target.load(ModelSource(folder), CONFIG, asked.append)
    assert asked == [torch.device("cpu")]


def test_weights_that_do_not_fit_are_an_error_with_the_way_out(folder, monkeypatch) -> None:
    full = torch.OutOfMemoryError("CUDA out of memory")
    failing_where(monkeypatch, target_module, "load_model", full, lambda n, *_: True)
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    with refused(OutOfMemory, str(folder), str(size), "float32", "smaller dtype", "nf4"):
        Target.load(ModelSource(folder), CONFIG)


def test_cpu_has_no_device_memory_and_no_limit() -> None:
    assert memory_of(torch.device("cpu")) is None
    limit_process(torch.device("cpu"), EngineConfig(gpu_part=0.5))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_part_of_a_gpu_limits_the_process() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    memory = memory_of(device)
    assert memory is not None
    assert 0 < memory.free <= memory.total
    try:
        limit_process(device, EngineConfig(gpu_part=0.01))
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(memory.total // 50, dtype=torch.uint8, device=device)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
