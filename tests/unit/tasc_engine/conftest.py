"""A tiny engine for tests."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis
import pytest

import support
from support import EAGER, SMALL
from tasc_engine import Engine


@pytest.fixture
def examples(everything: bool, seed: int) -> Callable[..., Any]:
    """Checks a property at once: ``@examples(few, many, name=strategy)``, many with --all only."""

    def of(few: int, many: int, **strategies: Any) -> Callable[[Callable[..., None]], None]:
        count = hypothesis.settings(max_examples=many if everything else few, database=None)
        return lambda check: hypothesis.seed(seed)(count(hypothesis.given(**strategies)(check)))()

    return of


@pytest.fixture
def make_engine(folder: Path) -> Callable[..., Engine]:
    """`support.make_engine` with the model of ``folder``; it takes parts of `EngineConfig` too."""

    def make(*, drafts: int = 4, **how: Any) -> Engine:
        own = {name: how.pop(name) for name in vars(SMALL).keys() & how.keys()}
        config = replace(SMALL, **{"max_waiting": 8, **own})
        settings = replace(EAGER, num_speculative_tokens=drafts)
        return support.make_engine(folder, config, settings=settings, **how)

    return make
