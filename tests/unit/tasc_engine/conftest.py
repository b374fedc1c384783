"""A tiny engine for tests of what surrounds decoding."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tasc_draft import DraftIndex, DraftSettings, NgramProposer
from tasc_engine import Engine, EngineConfig, ModelSource, StepRecord, Target
from tasc_engine.step.cost import StepCosts
from tasc_text import TaskTokenizer
from tiny import make_folder

EngineMaker = Callable[..., Engine]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("engine"))


@pytest.fixture(scope="session")
def tokenizer(folder: Path) -> TaskTokenizer:
    return TaskTokenizer.from_folder(folder)


@pytest.fixture
def examples(everything: bool, seed: int) -> Callable[..., Any]:
    """Checks a property at once: ``@examples(few, many, name=strategy)``, many with --all only."""

    def of(few: int, many: int, **strategies: Any) -> Callable[[Callable[..., None]], None]:
        count = hypothesis.settings(max_examples=many if everything else few, database=None)
        return lambda check: hypothesis.seed(seed)(count(hypothesis.given(**strategies)(check)))()

    return of


@pytest.fixture
def make_engine(folder: Path, tokenizer: TaskTokenizer) -> EngineMaker:
    def make(
        rows: int = 2,
        max_waiting: int = 8,
        on_step: Callable[[StepRecord], None] = lambda record: None,
        drafts: int = 4,
        costs: StepCosts | None = None,
    ) -> Engine:
        config = EngineConfig(
            rows=rows, max_model_len=64, prefill_chunk=16, max_waiting=max_waiting
        )
        target = Target.load(ModelSource(folder, dtype="float64"), config)
        proposer = NgramProposer(
            DraftSettings(num_speculative_tokens=drafts, min_prob=0.0),
            rows=rows,
            capacity=64,
            vocab_size=target.vocab_size,
            eos_ids=tokenizer.eos_ids,
            index=DraftIndex.empty(tokenizer.fingerprint, tokenizer.vocab_size),
        )
        return Engine(target, tokenizer, proposer, config, on_step, costs)

    return make
