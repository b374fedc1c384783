"""Tests that answers are complete, without repeated pieces, if replicas die, hang or refuse."""

import asyncio
import time
from contextlib import ExitStack, aclosing
from dataclasses import replace

import pytest
from fake_fleet import ROWS, SILENCE_S, TASK, WHOLE, Calls, Replicas, Scripted, status, text_of
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from support import refused
from tasc_protocol import Output, Request
from tasc_runtime.protocol import Pulse, Refusal
from tasc_serve.http_errors import ApiError
from tasc_serve.routing.failover import Failover, RetryBudget
from tasc_serve.routing.fleet import ReplicaLost, SeenReplica

CALL = Request("call", "prompt", templated=False, timeout_s=20.0)
FULL = Refusal("full", "no place", None, 7.0)
SOONER = Refusal("full", "none", None, 3.0)
INVALID = Refusal("invalid", "adapter is 'new'", "adapter")
NEWER = {"record_version": 2}


async def streamed(failover: Failover) -> list[Output | Refusal]:
    async with aclosing(failover.stream(structs.replace(CALL, stream=True))) as items:
        return [item async for item in items]


def text(items: list[Output | Refusal]) -> str:
    return "".join(item.text for item in items if isinstance(item, Output))


@given(st.integers(0, 9), st.integers(0, 9))
def test_a_stream_has_each_piece_once_wherever_two_replicas_die(first: int, second: int) -> None:
    replicas = Replicas(
        a=Scripted(dies_after=first), b=Scripted(dies_after=second), c=Scripted(outstanding=9)
    )
    calls = Calls(replicas)
    items = calls.run(streamed)
    assert text(items) == text_of(WHOLE)
    assert tuple(i for item in items for i in item.tokens) == WHOLE
    died = sum(not replica.present for replica in replicas.all.values())
    assert calls.counted("tasc_failovers_total", reason="died") == died >= 1
    last = next(r for r in replicas.all.values() if r.present and r.calls)
    assert last.calls[0].record_version in (None, 1)
    assert all(replica.open == 0 for replica in replicas.all.values())


def test_a_fleet_waits_for_its_first_pulse_and_not_for_replicas_that_are_not_there() -> None:
    slow, gone = Replicas(a=Scripted(present=False)), Replicas()

    async def appears(replicas: Replicas) -> tuple[bool, float, float]:
        begun = time.monotonic()
        asyncio.get_running_loop().call_later(1, setattr, slow.all["a"], "present", True)
        await replicas.fleet.settled()
        first = time.monotonic()
        await replicas.fleet.settled()
        return replicas.fleet.status is not None, first - begun, time.monotonic() - first

    known, first, later = Calls(slow).run(lambda _: appears(slow))
    assert known
    assert 1 <= first < 2
    known, first, later = Calls(gone).run(lambda _: appears(gone))
    assert not known
    assert (first > 1, later < 0.1) == (True, True)


def test_the_next_replica_is_told_what_was_said_with_less_time() -> None:
    replicas = Replicas(a=Scripted(dies_after=4), b=Scripted(outstanding=5))
    Calls(replicas).run(streamed)
    (first,), (second,) = replicas.all["a"].calls, replicas.all["b"].calls
    assert (first.committed_ids, second.committed_ids) == ((), WHOLE[:4])
    assert 0 < second.timeout_s < first.timeout_s <= 20
    assert second.record_version == 1


def test_a_silent_replica_is_given_up_and_its_call_cancelled() -> None:
    replicas = Replicas(a=Scripted(hangs_after=3), b=Scripted(outstanding=5))
    calls = Calls(replicas)
    assert text(calls.run(streamed)) == text_of(WHOLE)
    assert calls.counted("tasc_failovers_total", reason="silent") == 1
    assert calls.counted("tasc_failover_seconds_count") == 1
    assert replicas.all["a"].open == 0


@pytest.mark.parametrize("mishap", [{"dies_after": 5}, {"hangs_after": 5}])
def test_a_whole_answer_is_asked_for_again(mishap: dict[str, int]) -> None:
    replicas = Replicas(a=Scripted(**mishap), b=Scripted(outstanding=5))
    answer = Calls(replicas).run(lambda failover: failover.complete(CALL))
    assert isinstance(answer, Output)
    assert answer.result.tokens == WHOLE
    assert replicas.all["b"].calls[0].committed_ids == ()


def test_an_only_replica_that_is_silent_is_waited_for() -> None:
    async def come_back(failover: Failover) -> list[Output | Refusal]:
        asked = asyncio.create_task(streamed(failover))
        while not replicas.all["a"].calls:
            await asyncio.sleep(0.01)
        replicas.all["a"].hung = True
        await asyncio.sleep(1)
        replicas.all["a"].hung = False
        return await asked

    replicas = Replicas(a=Scripted())
    calls = Calls(replicas)
    assert text(calls.run(come_back)) == text_of(WHOLE)
    assert calls.counted("tasc_failovers_total", reason="silent") == 0


@pytest.mark.parametrize(
    ("a", "b", "said", "asked"),
    [
        ({"refuses": FULL}, {"outstanding": 5}, None, [1, 1]),
        ({"refuses": FULL}, {"refuses": SOONER}, replace(SOONER, retry_after_s=1.5), [1, 1]),
        ({"refuses": INVALID}, {"outstanding": 5}, INVALID, [1, 0]),  # of all of this version
        ({"refuses": INVALID}, NEWER | {"outstanding": ROWS}, None, [1, 1]),
        ({"refuses": INVALID}, NEWER | {"refuses": FULL}, FULL, [1, 1]),
        ({"outstanding": 5}, NEWER | {"refuses": FULL}, None, [1, 1]),
        ({"outstanding": 5}, NEWER | {"present": False}, None, [1, 0]),
        ({"outstanding": 5}, NEWER | {"dies_after": 0}, None, [1, 1]),
    ],
)
def test_what_one_cannot_take_another_does_where_its_version_may_decide(a, b, said, asked) -> None:
    replicas = Replicas(a=Scripted(**a), b=Scripted(**b))
    calls = Calls(replicas)
    items = calls.run(streamed)
    assert items == [said] if said else text(items) == text_of(WHOLE)
    assert [len(r.calls) for r in replicas.all.values()] == asked
    died = sum(bool(r.calls) and not r.present for r in replicas.all.values())
    assert calls.counted("tasc_failovers_total", reason="died") == died


def test_an_answer_never_goes_on_by_another_version_of_the_task() -> None:
    replicas = Replicas(a=Scripted(dies_after=4, record_version=2), b=Scripted(outstanding=5))
    *pieces, last = Calls(replicas).run(streamed)
    assert text(pieces) == text_of(WHOLE[:4])
    assert isinstance(last, Refusal)
    assert last.kind == "changed"
    assert not replicas.all["b"].calls


def test_a_new_call_goes_to_the_newest_version_while_that_has_free_rows() -> None:
    replicas = Replicas(
        a=Scripted(refuses=INVALID),
        b=Scripted(record_version=2, outstanding=ROWS - 1),
        c=Scripted(),
    )
    for _ in range(3):
        assert text(Calls(replicas).run(streamed)) == text_of(WHOLE)
    assert [len(r.calls) for r in replicas.all.values()] == [0, 3, 0]


def test_the_first_new_replica_of_a_rolling_update_does_not_get_all_the_load() -> None:
    asked = 4 * ROWS
    replicas = Replicas(new=Scripted(record_version=2), **{name: Scripted() for name in "abc"})
    held: dict[str, int] = {}

    async def many(failover: Failover) -> None:
        while not all(replicas.fleet.pick(replicas.all.keys() - {name}, None) for name in "abc"):
            await asyncio.sleep(0.01)
        with ExitStack() as calls:
            for _ in range(asked):
                chosen, told = replicas.fleet.pick((), None), replicas.fleet.status
                assert chosen
                assert told
                assert told.record_version == chosen.record_version
                calls.enter_context(chosen.call())
                held[chosen.name] = held.get(chosen.name, 0) + 1

    Calls(replicas).run(many)
    assert held == {"new": ROWS, "a": ROWS, "b": ROWS, "c": ROWS}


@pytest.mark.parametrize(("settings", "asks"), [({"max_retries": 1}, 2), ({"budget": 1}, 2)])
def test_losses_are_bounded_and_counted(settings: dict[str, int], asks: int) -> None:
    replicas = Replicas(**{name: Scripted(dies_after=2) for name in "abcd"})
    calls = Calls(replicas, **settings)
    with pytest.raises(ApiError) as gave_up:
        calls.run(streamed)
    assert gave_up.value.status == 503
    assert sum(len(r.calls) for r in replicas.all.values()) == asks
    assert calls.counted("tasc_failovers_refused_total") == 1


def test_with_nobody_there_it_waits_and_then_says_so() -> None:
    with refused(ApiError, TASK):
        Calls(Replicas(a=Scripted(present=False))).run(streamed)


def test_an_heir_that_comes_up_while_it_waits_takes_the_call() -> None:
    async def born(failover: Failover) -> list[Output | Refusal]:
        asked = asyncio.create_task(streamed(failover))
        await asyncio.sleep(0.1)
        replicas.all["b"].present = True
        return await asked

    replicas = Replicas(a=Scripted(dies_after=2), b=Scripted(present=False))
    assert text(Calls(replicas, no_replica_timeout_s=20).run(born)) == text_of(WHOLE)


def test_what_is_no_loss_is_raised() -> None:
    class Broken(Replicas):
        async def complete(self, replica: str, call: Request) -> Output | Refusal:
            raise KeyError("a bug")

    with pytest.raises(KeyError):
        Calls(Broken(a=Scripted())).run(lambda failover: failover.complete(CALL))


def test_calls_go_where_least_is_to_be_done() -> None:
    async def three(failover: Failover) -> None:
        while not all(replicas.fleet.pick({other}, None) for other in "ab"):
            await asyncio.sleep(0.01)
        await asyncio.gather(*(streamed(failover) for _ in range(3)))

    replicas = Replicas(a=Scripted(outstanding=1), b=Scripted(outstanding=0))
    Calls(replicas).run(three)
    assert [len(r.calls) for r in replicas.all.values()] == [1, 2]


def test_who_goes_away_ends_the_call_at_its_replica() -> None:
    async def leave(failover: Failover) -> None:
        async with aclosing(failover.stream(CALL)) as items:
            await anext(items)

    replicas = Replicas(a=Scripted())
    Calls(replicas).run(leave)
    assert replicas.all["a"].calls
    assert replicas.all["a"].open == 0


def test_a_budget_is_earned_by_calls_up_to_its_burst() -> None:
    budget = RetryBudget(share=0.5, size=2)
    assert [budget.spend() for _ in range(3)] == [True, True, False]
    budget.earn()
    assert not budget.spend()
    budget.earn()
    assert budget.spend()
    for _ in range(100):
        budget.earn()
    assert [budget.spend() for _ in range(3)] == [True, True, False]


def test_all_who_wait_for_a_replica_that_dies_go_may_try_another() -> None:
    async def crowd(failover: Failover) -> list[list[Output | Refusal]]:
        hanging = [asyncio.create_task(streamed(failover)) for _ in range(5)]
        while replicas.all["a"].open < 5:
            await asyncio.sleep(0.01)
        dying = replicas.fleet.pick((), None)
        assert dying is not None
        replicas.all["b"].present = True
        for _ in range(2):  # each of the calls may be the one that finds out
            dying.give_up("died")
        return await asyncio.gather(*hanging)

    replicas = Replicas(a=Scripted(hangs_after=3), b=Scripted(present=False))
    calls = Calls(replicas, no_replica_timeout_s=20)
    assert [text(items) for items in calls.run(crowd)] == [text_of(WHOLE)] * 5
    assert calls.counted("tasc_failovers_total", reason="died") == 5


def test_a_replica_that_is_being_stopped_and_hangs_is_given_up_too() -> None:
    async def stopped(failover: Failover) -> list[Output | Refusal]:
        asked = asyncio.create_task(streamed(failover))
        while not replicas.all["a"].hung:
            await asyncio.sleep(0.01)
        replicas.all["a"].stopping = True
        return await asked

    replicas = Replicas(a=Scripted(hangs_after=3), b=Scripted(outstanding=5))
    calls = Calls(replicas)
    assert text(calls.run(stopped)) == text_of(WHOLE)
    assert calls.counted("tasc_failovers_total", reason="silent") == 1


@pytest.mark.parametrize("retry_after_s", [0.5, 7.0])
@pytest.mark.parametrize("pieces", [0, 4])
def test_an_admitted_stream_waits_for_a_place_without_asking_all_the_time(
    retry_after_s: float, pieces: int
) -> None:
    async def full_for_a_while(failover: Failover) -> list[Output | Refusal]:
        asked = asyncio.create_task(streamed(failover))
        while not replicas.all["b"].calls:
            await asyncio.sleep(0.01)
        await asyncio.sleep(5)
        replicas.all["b"].refuses = None
        return await asked

    full = Refusal("full", "no place", None, retry_after_s)
    replicas = Replicas(a=Scripted(dies_after=pieces), b=Scripted(outstanding=5, refuses=full))
    assert text(Calls(replicas).run(full_for_a_while)) == text_of(WHOLE)
    assert len(replicas.all["b"].calls) <= 12


def test_a_pause_lasts_until_the_next_tokens_and_not_until_a_call_is_admitted() -> None:
    async def one_of_two(failover: Failover) -> list[Output | Refusal]:
        call = structs.replace(CALL, stream=True, n=2)
        async with aclosing(failover.stream(call)) as items:
            return [item async for item in items]

    replicas = Replicas(a=Scripted(dies_after=0), b=Scripted(outstanding=5, answers_after_s=2))
    calls = Calls(replicas)
    assert text(calls.run(one_of_two)) == text_of(WHOLE)
    assert calls.counted("tasc_failover_seconds_sum") >= 2


def test_a_replica_that_is_being_stopped_ends_its_long_answers() -> None:
    async def stopped(failover: Failover) -> Output | Refusal:
        asked = asyncio.create_task(failover.complete(CALL))
        while not replicas.all["a"].calls:
            await asyncio.sleep(0.01)
        replicas.all["a"].stopping = True
        return await asked

    replicas = Replicas(a=Scripted(answers_after_s=10 * SILENCE_S), b=Scripted(outstanding=5))
    calls = Calls(replicas)
    answer = calls.run(stopped)
    assert isinstance(answer, Output)
    assert not replicas.all["b"].calls
    assert calls.counted("tasc_failovers_total", reason="silent") == 0


def test_a_loss_that_is_learnt_of_late_gives_up_no_replica_that_has_answered_since() -> None:
    replica = SeenReplica("a")
    late = ReplicaLost("a", "died")
    replica.on_heartbeat(Pulse(status(), 0, 0.0), 5.0)
    replica.give_up(late.reason, late.at)
    assert not replica.gone
    replica.give_up(late.reason, ReplicaLost("a", "died").at)
    assert replica.gone == "died"
