"""Tests that a drafter learns its target's answers, and computes in use what it was trained for."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import tiny
from drafter_training import INPUTS, Trained, make, trained_by
from neural_drafters import exact
from support import refused
from tasc_draft.drafts import SOURCES
from tasc_engine import (
    Engine,
    EngineConfig,
    EngineTotals,
    ModelSource,
    Request,
    Target,
    UnsupportedModel,
)
from tasc_engine.drafting.neural.card import target_fingerprint
from tasc_engine.drafting.neural.drafters import Eagle, Independent
from tasc_engine.drafting.neural.files import JOINT, WEIGHTS, load_drafter
from tasc_engine.drafting.neural.proposer import NeuralProposer
from tasc_engine.drafting.neural.tree import NeuralSettings
from tasc_engine.drafting.neural.vocabulary import FullVocabulary
from tasc_engine.layout import Int32
from tasc_engine.model.linears import Linear
from tasc_engine.model.loading import load_model
from tasc_text import TaskTokenizer
from tasc_train.drafter.training import EagleHead, small_model
from tasc_train.drafter.training_run import REPORT

CONFIG = EngineConfig(rows=2, max_model_len=64)
CASES = [
    ("qwen2", "eagle"),
    ("llama", "independent"),
    pytest.param(("qwen2", "independent"), marks=pytest.mark.slow("llama covers this kind")),
    pytest.param(("llama", "eagle"), marks=pytest.mark.slow("qwen2 covers this kind")),
]


@dataclass(frozen=True)
class Drafter(Trained):
    @property
    def source(self) -> ModelSource:
        return ModelSource(self.bench.target, dtype="float64")

    @property
    def tokenizer(self) -> TaskTokenizer:
        return TaskTokenizer.from_folder(self.bench.target)

    def load(self, target: Target) -> tuple[Eagle | Independent, Tensor]:
        fingerprint = self.tokenizer.fingerprint
        return load_drafter(self.folder, target, self.source, fingerprint, 2, 64)


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Drafter:
    architecture, kind = request.param
    folder = tmp_path_factory.mktemp("trained")
    bench = make(folder / "target", architecture)
    return Drafter(**vars(trained_by(bench, kind, folder / "drafter")))


def test_drafter_learns_the_answers_of_its_target(trained: Drafter) -> None:
    found = trained.found
    assert found["agreement"] > 0.8
    assert found["loss"] < found["first_loss"] / 2
    assert (found["rows"], found["held_out"], found["left_out"]) == (38, 2, 0)
    assert len(trained.messages) == found["steps"]
    assert json.loads((trained.folder / REPORT).read_text()) == found
    kept = sum(value.numel() for value in load_file(trained.folder / WEIGHTS).values())
    assert kept == found["parameters"]


def as_trained(trained: Drafter, model: Any) -> Any:
    """Returns the function of the training from a whole row's inputs to all hidden states."""
    kept = load_file(trained.folder / WEIGHTS)
    if trained.kind == "eagle":
        head = EagleHead(model.config)
        head.joint.weight.data = kept.pop(JOINT)
        head.body.load_state_dict(kept, strict=False)
        return head.double()
    small = small_model(model.config, 2, 32)
    small.load_state_dict(kept, strict=False)
    return small.double()


class Whole:
    """A drafter as in training, from a whole row's inputs to all its hidden states."""

    def __init__(self, trained: Drafter, model: Any) -> None:
        self._module, self._embed = as_trained(trained, model), model.model.embed_tokens
        self._head = trained.kind == "eagle"
        body = exact(self._module.body if self._head else self._module)
        self._rotary = body.model.rotary_emb
        self._rope = self._rotary.forward

    def __call__(self, base: int, tokens: Tensor, hidden: Tensor) -> Tensor:
        """Returns the hidden states of a row with its first input at position ``base``."""
        self._rotary.forward = lambda x, position_ids: self._rope(x, position_ids + base)
        if self._head:
            found = self._module(self._embed(tokens)[None], hidden[None])[0]
        else:
            found = self._module.model(tokens[None]).last_hidden_state[0]
        assert isinstance(found, Tensor)
        return found


@dataclass
class Rows:
    """Two rows of different length that start at different positions, with the target's states."""

    ids: Tensor
    hidden: Tensor
    shift: int
    numbers = np.array([0, 1], np.int32)
    bases = np.array([0, 5], np.int32)
    sizes = np.array([9, 6], np.int32)

    def inputs(self, row: int, start: int, size: int) -> tuple[Tensor, Tensor]:
        begin = int(self.bases[row]) + start
        tokens = self.ids[row, begin + self.shift : begin + self.shift + size]
        return tokens, self.hidden[row, begin : begin + size]

    def run(self, drafter: Any, starts: Int32, sizes: Int32) -> Tensor:
        """Returns the drafter's hidden states after the last of ``sizes`` further inputs."""
        parts = [self.inputs(r, s, n) for r, s, n in zip((0, 1), starts, sizes, strict=True)]
        inputs = drafter.inputs(*(torch.cat(part) for part in zip(*parts, strict=True)))
        return drafter.backbone.trunk(inputs, self.numbers, self.bases, starts, sizes)


@pytest.fixture
def rows(trained: Drafter) -> Rows:
    model = load_model(trained.source)
    ids = torch.randint(model.config.vocab_size, (2, 14), generator=torch.Generator())
    with torch.inference_mode():
        return Rows(ids, model.model(ids).last_hidden_state, int(trained.kind == "eagle"))


@torch.inference_mode()
def test_incremental_drafter_passes_equal_one_training_pass(trained: Drafter, rows: Rows) -> None:
    whole = Whole(trained, load_model(trained.source))
    drafter, _ = trained.load(Target.load(trained.source, CONFIG))
    expected = [whole(rows.bases[r], *rows.inputs(r, 0, rows.sizes[r])) for r in (0, 1)]
    nothing, some = np.zeros(2, np.int32), np.array([3, 1], np.int32)
    more = np.array([1, 2], np.int32)
    for begin, size in ((nothing, some), (some, more), (some + more, rows.sizes - some - more)):
        ends = begin + size - 1
        found = rows.run(drafter, begin, size)
        assert found.dtype == torch.float64
        wanted = torch.stack([expected[r][ends[r]] for r in (0, 1)])
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


def test_drafts_are_accepted_and_answers_equal_plain_answers(trained: Drafter) -> None:
    target, tokenizer = Target.load(trained.source, CONFIG), trained.tokenizer
    drafter, head = trained.load(target)
    proposer = NeuralProposer(
        drafter, FullVocabulary(Linear(head)), NeuralSettings(4, 3, 12), rows=2, capacity=64,
        vocab_size=target.vocab_size, eos_ids=tokenizer.eos_ids,
    )  # fmt: skip
    totals = EngineTotals(len(SOURCES), proposer.max_depth)
    engine = Engine(target, tokenizer, proposer, CONFIG, totals.add)
    prompts = [tuple(tokenizer.encode_prompt(f"{text} ->")) for text in INPUTS]
    requests = [Request(str(i), prompt, 16) for i, prompt in enumerate(prompts)]
    answers = {int(r.id): list(r.tokens) for r in engine.generate(requests)}
    model = load_model(trained.source)
    assert [answers[i] for i in range(4)] == [tiny.plain(model, p, 16) for p in prompts]
    assert totals.block_efficiency > 2


def test_independent_drafter_serves_another_target_but_a_head_does_not(
    trained: Drafter, tmp_path: Path
) -> None:
    architecture = load_model(trained.source).config.model_type
    other = ModelSource(make(tmp_path, architecture, seed=1).target, dtype="float64")
    target, fingerprint = Target.load(other, CONFIG), trained.tokenizer.fingerprint
    given = (trained.folder, target, other, fingerprint, 2, 64)
    if trained.kind == "independent":
        assert load_drafter(*given)
        return
    both = [target_fingerprint(source.folder) for source in (trained.source, other)]
    with refused(UnsupportedModel, *both):
        load_drafter(*given)
