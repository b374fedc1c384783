"""What goes wrong for one request, or for drafts, harms nobody else."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tasc_engine import Engine, GenerationRequest, GenerationResult
from tasc_engine import target as module

PROMPTS = [(5, 9, 30, 41, 7), (8, 8, 8, 2), tuple(range(40, 60)), (3, 1, 4, 1, 5, 9, 2, 6)]
REQUESTS = [GenerationRequest(str(i), p, 20) for i, p in enumerate(PROMPTS)]


def answers(engine: Engine) -> dict[str, GenerationResult]:
    found = {r.id: r for r in engine.generate(REQUESTS)}
    engine.check_integrity()
    return found


def tokens(found: dict[str, GenerationResult]) -> dict[str, tuple[int, ...]]:
    return {name: result.tokens for name, result in found.items()}


@pytest.fixture
def plain(make_engine) -> dict[str, tuple[int, ...]]:
    return tokens(answers(make_engine()))


class Breaking:
    """A proposer of which one method raises every third time."""

    def __init__(self, inner: Any, name: str) -> None:
        self._inner, self._name, self.calls = inner, name, 0

    def __getattr__(self, name: str) -> Any:
        honest = getattr(self._inner, name)
        return self._sometimes(honest) if name == self._name else honest

    def _sometimes(self, honest: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            self.calls += 1
            if self.calls % 3 == 0:
                raise ArithmeticError("the proposer broke")
            return honest(*args)

        return call


@pytest.mark.parametrize("method", ["start", "propose", "observe", "finish"])
def test_a_proposer_that_raises_changes_no_answer(make_engine, plain, method: str) -> None:
    engine = make_engine()
    breaking = Breaking(engine._drafter._proposer, method)
    engine._drafter._proposer = breaking
    assert tokens(answers(engine)) == plain
    assert tokens(answers(engine)) == plain
    assert breaking.calls >= 3
    assert engine._drafter.failures >= breaking.calls // 3


WRONG: dict[str, Callable[[Any], Any]] = {
    "parent behind the node": lambda d: dataclasses.replace(d, parents=d.parents + 1),
    "parent of nobody": lambda d: dataclasses.replace(d, parents=d.parents - 9),
    "depth of its own": lambda d: dataclasses.replace(d, depths=d.depths + 1),
    "id of no vocabulary": lambda d: dataclasses.replace(d, tokens=d.tokens + 10**6),
    "id below zero": lambda d: dataclasses.replace(d, tokens=d.tokens - 10**6),
    "source that is none": lambda d: dataclasses.replace(d, source=d.source + 99),
    "rows missing": lambda d: dataclasses.replace(d, offsets=d.offsets[:-1]),
    "rows falling": lambda d: dataclasses.replace(d, offsets=d.offsets[::-1].copy()),
    "arrays of different length": lambda d: dataclasses.replace(d, parents=d.parents[:-1]),
}


@pytest.mark.parametrize("name", WRONG)
def test_drafts_that_are_no_trees_are_dropped(make_engine, plain, name: str) -> None:
    engine = make_engine()
    honest = engine._drafter._proposer.propose
    proposed: list[int] = []

    def propose(rows: Any, budget: Any, least: Any = None) -> Any:
        drafts = honest(rows, budget, least)
        proposed.append(len(drafts.tokens))
        return WRONG[name](drafts) if len(drafts.tokens) else drafts

    engine._drafter._proposer.propose = propose
    assert tokens(answers(engine)) == plain
    assert engine._drafter.failures == sum(n > 0 for n in proposed) > 0


def test_more_draft_tokens_than_asked_for_are_dropped(make_engine, plain) -> None:
    engine = make_engine()
    honest = engine._drafter._proposer.propose

    def propose(rows: Any, budget: Any, least: Any = None) -> Any:
        return honest(rows, np.full_like(budget, 4), least)

    engine._drafter._proposer.propose = propose
    assert tokens(answers(engine)) == plain
    assert engine._drafter.failures > 0


def with_forward(engine: Engine, change: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
    """Have ``change(ids, logits)`` look at what each forward reads and says."""
    honest = engine._target._forward

    def forward(ids: Any, looked_at: Any, cache: Any) -> Any:
        return change(ids, honest(ids, looked_at, cache))

    engine._target._forward = forward


@pytest.mark.parametrize("steps", [0, 1, 4])
def test_logits_that_are_no_numbers_end_their_request_alone(make_engine, plain, steps: int) -> None:
    engine, seen = make_engine(), []

    def poison(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """The first row's, from some step on, as long as request 0 is there."""
        seen.append(1)
        if len(seen) > steps and any(s.request.id == "0" for s in engine._active.values()):
            first = min(s.row for s in engine._active.values())
            if engine._active[first].request.id == "0":
                logits[0] = torch.nan
        return logits

    with_forward(engine, poison)
    engine._free = [1, 0]
    found = answers(engine)
    assert found["0"].finish_reason == "error"
    assert "NaN" in found["0"].error
    assert found["0"].tokens == plain["0"][: len(found["0"].tokens)]
    assert {n: t for n, t in tokens(found).items() if n != "0"} == {
        n: t for n, t in plain.items() if n != "0"
    }


def test_a_prompt_that_does_not_fit_memory_fails_and_the_engine_lives(make_engine, plain) -> None:
    engine = make_engine()

    def too_much(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        if len(ids) >= 17:  # a prompt chunk of 16 and the other row; shorter ones fit
            raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: ...")
        return logits

    with_forward(engine, too_much)
    found = answers(engine)
    assert found["2"].finish_reason == "error"
    assert "did not fit the memory of cpu; lower rows" in found["2"].error
    assert {n for n, r in found.items() if r.error} == {"2"}
    assert all(found[n].tokens == plain[n] for n in ("0", "1", "3"))


@pytest.mark.parametrize("place", ["lay_out", "begin", "forward"])
def test_drafts_that_do_not_fit_memory_are_left_out_and_nobody_notices(
    make_engine, plain, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Whether kept tokens moved before memory ran out or not, they end up where they belong."""
    engine, failed = make_engine(), []
    target, cache = engine._target, engine._target.cache

    def scarce(honest: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            found = honest(*args) if place == "forward" else None
            if drafting[0]:
                failed.append(1)
                raise MemoryError
            return honest(*args) if found is None else found

        return call

    drafting = [False]
    honest = target.next_tokens

    def next_tokens(feed: Any) -> Any:
        drafting[0] = len(feed.drafts.tokens) > 0 and len(failed) % 2 == 0
        failed.append(0) if not drafting[0] else None
        return honest(feed)

    monkeypatch.setattr(target, "next_tokens", next_tokens)
    if place == "lay_out":
        monkeypatch.setattr(module, "lay_out", scarce(module.lay_out))
    elif place == "begin":
        monkeypatch.setattr(cache, "begin", scarce(cache.begin))
    else:
        target._forward = scarce(target._forward)
    assert tokens(answers(engine)) == plain
    assert sum(failed) > 3


def test_what_a_broken_row_leaves_is_not_seen_by_the_next(make_engine, plain) -> None:
    """Keys and values that are no numbers must not reach a row that is longer or comes later."""
    engine = make_engine()
    do = engine._target._forward.operations
    honest = do.turn_and_keep
    poisoned = [True]

    def turn_and_keep(layer: int, joined: Any, *rest: Any) -> Any:
        if poisoned[0] and layer == 1:
            joined.fill_(torch.nan)
        return honest(layer, joined, *rest)

    do.turn_and_keep = turn_and_keep
    broken = GenerationRequest("broken", tuple(range(1, 60)), 2)
    (result,) = engine.generate([broken])
    assert result.finish_reason == "error"
    poisoned[0] = False
    assert tokens(answers(engine)) == plain


def test_a_beginning_that_does_not_fit_memory_is_not_kept(make_engine, plain) -> None:
    engine = make_engine()

    def full(row: int, n: int) -> Any:
        raise MemoryError

    engine._target.cache.copied = full
    twice = [dataclasses.replace(r, id=f"{r.id}-{k}") for k in range(2) for r in REQUESTS]
    found = {r.id: r.tokens for r in engine.generate(twice)}
    assert found == {f"{n}-{k}": t for k in range(2) for n, t in plain.items()}
    assert engine._prefixes.nbytes == 0


def test_other_errors_of_a_forward_are_not_hidden(make_engine) -> None:
    engine = make_engine()

    def broken(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("shapes do not fit")

    with_forward(engine, broken)
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        answers(engine)
