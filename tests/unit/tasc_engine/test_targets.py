"""Several targets of one engine: who has the next forward, and what is made ready between steps."""

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasc_engine import GenerationRequest, ModelSource
from tasc_engine.errors import UnsupportedModel
from tasc_engine.model.hidden_states import HiddenStateRequest
from tasc_engine.step.targets import Targets


class Target:
    """One with so many graphs to capture; all share a cache. It is watched if it is ours."""

    def __init__(self, graphs: int = 0, ours: bool = True) -> None:
        self.cache, self.graphs = self, graphs
        self.decoder, self.wants = object() if ours else None, HiddenStateRequest()

    def watch(self, wants: HiddenStateRequest) -> None:
        if wants and self.decoder is None:
            raise UnsupportedModel("its own code runs")
        self.wants = wants

    def shares(self, cache: Any) -> bool:
        return True

    def warm_up_one(self) -> bool:
        self.graphs = max(self.graphs - 1, 0)
        return self.graphs > 0


def rows_of(*counts: int) -> list[Any]:
    targets = [target for target, count in enumerate(counts) for _ in range(count)]
    return [
        SimpleNamespace(row=row, request=SimpleNamespace(target=target))
        for row, target in enumerate(targets)
    ]


def turns(targets: Targets, rows: list[Any], forwards: int) -> list[int]:
    found = []
    for _ in range(forwards):
        taken = targets.turn(reversed(rows))
        (number,) = {row.request.target for row in taken}
        assert taken == [row for row in rows if row.request.target == number], "all of them, by row"
        found.append(number)
    return found


@pytest.mark.parametrize(
    ("counts", "forwards"),
    [((7, 1), (70, 10)), ((1, 7), (10, 70)), ((6, 2), (60, 20)), ((4, 4), (40, 40)),
     ((63, 1), (70, 10))],
)  # fmt: skip
def test_forwards_are_had_as_rows_are_and_by_a_few_rows_at_least_every_eighth(
    counts: tuple[int, int], forwards: tuple[int, int]
) -> None:
    found = Counter(turns(Targets(Target()), rows_of(*counts), 80))
    assert tuple(found[number] for number in range(2)) == forwards


@given(st.lists(st.tuples(*3 * [st.integers(0, 12)]), min_size=1, max_size=20))
def test_whatever_rows_come_and_go_nobody_waits_for_long(rounds: list[tuple[int, ...]]) -> None:
    targets = Targets(Target())
    for counts in rounds:
        there = {number for number, count in enumerate(counts) if count}
        if there:
            assert set(turns(targets, rows_of(*counts), 60)) == there


def test_without_rows_or_with_one_target_all_take_part() -> None:
    targets = Targets(Target())
    assert targets.turn([]) == []
    assert turns(targets, rows_of(3), 2) == [0, 0]


def test_what_was_added_is_made_ready_part_by_part_and_what_is_gone_is_not() -> None:
    targets, first, second = Targets(Target()), Target(3), Target(3)
    targets.add(first)
    targets.warm_up()
    assert first.graphs == 2
    targets.drop(targets.add(second))
    for _ in range(4):
        targets.warm_up()
    assert (first.graphs, second.graphs) == (0, 3)
    assert not targets._cold


def test_who_asks_for_the_newest_while_another_goes_gets_one() -> None:
    class Changing(Targets):
        """The engine's thread comes in at each look."""

        @property
        def _known(self) -> Any:
            return self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]

        @_known.setter
        def _known(self, known: Any) -> None:
            self.looks = [known]

    targets, newer = Changing(Target()), Target()
    targets.looks = [{0: Target(), 1: newer}, {0: Target()}]
    assert targets.newest is newer


def test_a_step_makes_one_part_of_a_joined_target_ready_busy_or_idle(
    make_engine: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, parts = make_engine(), [True, True, False]
    joined = engine.load_target(ModelSource(folder, dtype="float64"))
    monkeypatch.setattr(joined, "warm_up_one", lambda: parts.pop(0))
    number = engine.add_target(joined)
    engine.step()
    assert len(parts) == 2
    (found,) = engine.generate([GenerationRequest("r", (1, 2), 8, target=number)])
    assert found.tokens
    assert parts == []


def test_all_targets_are_watched_and_those_that_come_later() -> None:
    first, second, third = Target(), Target(), Target()
    targets = Targets(first)
    targets.add(second)
    targets.watch(HiddenStateRequest(top=3))
    targets.add(third)
    assert [each.wants for each in (first, second, third)] == [HiddenStateRequest(top=3)] * 3


def test_where_one_cannot_be_watched_none_is() -> None:
    first, second = Target(), Target(ours=False)
    targets = Targets(first)
    targets.add(second)
    with pytest.raises(UnsupportedModel):
        targets.watch(HiddenStateRequest(hidden=True))
    assert first.wants == HiddenStateRequest()
    targets.watch(HiddenStateRequest())
