"""Tests that a drafter's memory is reported when it is loaded, and freed when it is off."""

import dataclasses
import gc
import logging
import math
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from prometheus_client import CollectorRegistry
from safetensors.torch import load_file, save_file
from torch import Tensor

import tiny
from neural_drafters import eagle_parts, model_of
from support import make_proposer, refused
from tasc_draft import DraftSettings
from tasc_draft.drafts import NEURAL, Drafts
from tasc_engine import EngineConfig, ModelSource, Target, UnsupportedModel
from tasc_engine.config import MAX_NODES
from tasc_engine.drafting.hidden_state_buffer import RowHiddenStates
from tasc_engine.drafting.neural.card import DrafterCard, Kind, target_fingerprint
from tasc_engine.drafting.neural.files import JOINT, WEIGHTS, load_drafter, save_drafter
from tasc_engine.drafting.neural.proposer import NeuralProposer
from tasc_engine.drafting.safe_proposer import STEPS, SafeProposer
from tasc_runtime.engine import drafters
from tasc_runtime.engine.builder import EngineBuilder
from tasc_runtime.engine.drafters import NeuralMetrics, load_task_drafter
from tasc_runtime.engine_settings import EngineSettings
from tasc_store import NeuralDrafting, TaskRecord
from tasc_text import TaskTokenizer

ROWS, LENGTH, PROMPT = 2, 48, 9
CONFIG = EngineConfig(rows=ROWS, max_model_len=LENGTH, prefill_chunk=4)
LABELS = {"task": "t", "model_name": "m"}
MIB = 1 << 20


@pytest.fixture(autouse=True)
def _own_garbage() -> Iterator[None]:
    """Excludes objects of other files from garbage collections of these tests."""
    gc.freeze()
    yield
    gc.unfreeze()


class Loaded:
    """A tiny target, and a drafter of it."""

    def __init__(self, folder: Path, kind: Kind, limit_s: float = 60.0) -> None:
        tiny.make_folder(folder)
        source = ModelSource(folder, dtype="float64")
        own = self.tokenizer = TaskTokenizer.from_folder(folder)
        if kind == "eagle":
            card = DrafterCard(kind, own.fingerprint, target_fingerprint(folder))
            model, joint = eagle_parts(folder)
            model.config.layer_types = model.config.layer_types[:1]
        else:
            card, model, joint = DrafterCard(kind, own.fingerprint), model_of(folder), None
        save_drafter(folder / kind, model, card, joint)
        self.config, self.joint = model.config, joint
        self.weights = sum(each.numel() for each in model.parameters())
        self.ends = sum(e.weight.numel() for e in (model.model.embed_tokens, model.lm_head))
        self.target = Target.load(source, CONFIG)
        self.record = record = TaskRecord(
            name="t", model=str(folder), fingerprint=own.fingerprint, template="{input}",
            dtype="float64", max_tokens=8,
            neural=NeuralDrafting(str(folder / kind), "neural", width=4),
        )  # fmt: skip
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(drafters, "NeuralProposer", self._made)
            assert record.neural
            self.drafter = load_task_drafter(
                record, record.neural, self.target, source, own, CONFIG, limit_s
            )

    def _made(self, *args: Any, **kwargs: Any) -> NeuralProposer:
        proposer = NeuralProposer(*args, **kwargs)
        self.inside = weakref.ref(proposer)
        return proposer


@pytest.mark.parametrize("kind", ["independent", "eagle"])
def test_memory_of_a_drafter_is_logged_once(tmp_path: Path, kind: Kind, caplog) -> None:
    with caplog.at_level(logging.INFO, "tasc_runtime.engine.drafters"):
        loaded = Loaded(tmp_path, kind)
    config, weights = loaded.config, loaded.weights
    tokens = ROWS * (LENGTH + MAX_NODES) + 1
    head_dim = config.hidden_size // config.num_attention_heads
    cache = tokens * config.num_hidden_layers * 2 * config.num_key_value_heads * head_dim
    if kind == "eagle":
        assert loaded.joint is not None
        weights += loaded.joint.numel() - loaded.ends
        cache += ROWS * LENGTH * config.hidden_size
    (message,) = [r for r in caplog.records if "MiB" in r.getMessage()]
    assert f"{kind} takes {8 * weights / MIB:.1f} MiB for its weights," in message.getMessage()
    assert f" {8 * cache / MIB:.1f} MiB for the cache of 2 rows and" in message.getMessage()
    assert " 0.0 MiB for the vocabulary" in message.getMessage()  # the head is the target's own
    assert loaded.inside().cache_bytes == 8 * cache


def test_hybrid_rows_have_room_for_the_drafters_tree(tmp_path: Path) -> None:
    loaded, nodes = Loaded(tmp_path, "eagle"), 20
    neural = NeuralDrafting(str(tmp_path / "eagle"), "hybrid", nodes=nodes)
    record = dataclasses.replace(
        loaded.record, neural=neural, draft=DraftSettings(num_speculative_tokens=4)
    )
    settings = EngineSettings(rows=ROWS, max_model_len=LENGTH, device="cpu", cost_aware=False)
    proposer = EngineBuilder(record, 1, settings).proposer
    rows = np.arange(ROWS, dtype=np.int32)
    for row in rows:
        proposer.start(int(row), np.arange(1, PROMPT + 1, dtype=np.int32))
    total = nodes * ROWS
    tokens = np.tile(np.arange(1, nodes + 1, dtype=np.int32), ROWS)
    external = Drafts(
        tokens, np.full(total, -1, np.int32), np.ones(total, np.int16),
        np.arange(ROWS + 1, dtype=np.int32) * nodes,
        np.full(total, -math.log(nodes + 1), np.float32), np.full(total, NEURAL, np.int8),
    )  # fmt: skip
    drafts = proposer.propose(rows, np.full(ROWS, nodes, np.int32), None, external)
    assert np.diff(drafts.offsets).tolist() == [nodes] * ROWS


def test_head_of_another_size_than_its_target_is_refused(tmp_path: Path) -> None:
    loaded, folder = Loaded(tmp_path, "eagle"), tmp_path / "eagle"
    weights = load_file(folder / WEIGHTS)
    save_file({**weights, JOINT: weights[JOINT][:, 1:].contiguous()}, folder / WEIGHTS)
    own, source = loaded.tokenizer.fingerprint, ModelSource(tmp_path, dtype="float64")
    with refused(UnsupportedModel, "joint.weight"):
        load_drafter(folder, loaded.target, source, own, rows=ROWS, capacity=LENGTH)


def tensor_bytes() -> int:
    """Returns the bytes of all tensors of this process; shared memory counts once."""
    gc.collect()
    tensors = (each for each in gc.get_objects() if isinstance(each, Tensor))
    return sum({each.data_ptr(): each.nbytes for each in tensors}.values())


@pytest.mark.parametrize("kind", ["independent", "eagle"])
def test_switched_off_drafter_frees_its_memory(tmp_path: Path, kind: Kind) -> None:
    loaded, registry = Loaded(tmp_path, kind, limit_s=1e-9), CollectorRegistry()
    ngram = make_proposer(loaded.tokenizer, DraftSettings(), CONFIG)
    drafter = loaded.drafter
    proposer = SafeProposer(drafter.beside(ngram), loaded.target.vocab_size)
    drafter.publish(NeuralMetrics(registry, LABELS))
    held = [loaded.inside, weakref.ref(loaded.inside().vocabulary)]
    least_freed = loaded.inside().cache_bytes + 8 * (loaded.weights - loaded.ends)
    proposer.start(0, np.arange(1, PROMPT + 1, dtype=np.int32))
    hidden = torch.randn(PROMPT, loaded.config.hidden_size, dtype=torch.float64)
    loaded.inside().observe(0, np.ones(1, np.int32), RowHiddenStates(0, hidden, None))
    row, budget = np.zeros(1, np.int32), np.full(1, 8, np.int32)
    drafted = [len(proposer.propose(row, budget).tokens) for _ in range(STEPS - 1)]
    before = tensor_bytes()
    assert min(drafted) > 0
    assert all(each() is not None for each in held)
    proposer.propose(row, budget)
    assert before - tensor_bytes() >= least_freed
    assert [each() for each in held] == [None] * len(held)
    later = CollectorRegistry()
    drafter.publish(NeuralMetrics(later, LABELS))  # later observers are also called
    slow = {**LABELS, "reason": "slow"}
    for each in (registry, later):
        assert each.get_sample_value("tasc_neural_drafting_off", slow) == 1
    assert len(proposer.propose(row, budget).tokens) == 0
