"""Tests that answers are complete, without repeated pieces, if replicas die, hang or refuse."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, aclosing
from dataclasses import replace

import pytest
from fake_fleet import ROWS, SILENCE_S, TASK, WHOLE, Calls, Replicas, Scripted, status, text_of
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from support import refused
from tasc_protocol import Output, Request
from tasc_runtime.protocol import Refusal, ReplicaState
from tasc_serve.http_errors import ApiError
from tasc_serve.routing.failover import Failover, RetryBudget
from tasc_serve.routing.fleet import ReplicaLost, SeenReplica

CALL = Request("call", "prompt", templated=False, timeout_s=20.0)
FULL = Refusal("full", "no place", None, 7.0)
SOONER = Refusal("full", "none", None, 3.0)
INVALID = Refusal("invalid", "adapter is 'new'", "adapter")
NEWER = {"record_version": 2}
Asked = Callable[[Failover], Awaitable[list[Output | Refusal]]]


async def streamed(failover: Failover) -> list[Output | Refusal]:
    async with aclosing(failover.stream(structs.replace(CALL, stream=True))) as items:
        return [item async for item in items]


def streamed_while(until: Callable[[], object], then: Callable[[], object]) -> Asked:
    """Streams an answer; calls ``then`` as soon as ``until`` holds."""

    async def ask(failover: Failover) -> list[Output | Refusal]:
        asked = asyncio.create_task(streamed(failover))
        while not until():
            await asyncio.sleep(0.01)
        then()
        return await asked

    return ask


def text(items: list[Output | Refusal]) -> str:
    return "".join(item.text for item in items if isinstance(item, Output))


@given(st.integers(0, 9), st.integers(0, 9))
def test_stream_has_each_piece_once_wherever_two_replicas_die(first: int, second: int) -> None:
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


def test_fleet_waits_for_its_first_heartbeat_only_once() -> None:
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


def test_next_replica_gets_the_committed_tokens_and_the_remaining_time() -> None:
    replicas = Replicas(a=Scripted(dies_after=4), b=Scripted(outstanding=5))
    Calls(replicas).run(streamed)
    (first,), (second,) = replicas.all["a"].calls, replicas.all["b"].calls
    assert (first.committed_ids, second.committed_ids) == ((), WHOLE[:4])
    assert 0 < second.timeout_s < first.timeout_s <= 20
    assert second.record_version == 1


def test_call_to_a_silent_replica_is_cancelled_and_moves_to_another() -> None:
    replicas = Replicas(a=Scripted(hangs_after=3), b=Scripted(outstanding=5))
    calls = Calls(replicas)
    assert text(calls.run(streamed)) == text_of(WHOLE)
    assert calls.counted("tasc_failovers_total", reason="silent") == 1
    assert calls.counted("tasc_failover_seconds_count") == 1
    assert replicas.all["a"].open == 0


@pytest.mark.parametrize("mishap", [{"dies_after": 5}, {"hangs_after": 5}])
def test_unstreamed_answer_is_requested_again(mishap: dict[str, int]) -> None:
    replicas = Replicas(a=Scripted(**mishap), b=Scripted(outstanding=5))
    answer = Calls(replicas).run(lambda failover: failover.complete(CALL))
    assert isinstance(answer, Output)
    assert answer.result.tokens == WHOLE
    assert replicas.all["b"].calls[0].committed_ids == ()


def test_call_waits_for_a_silent_replica_if_there_is_no_other() -> None:
    def hang() -> None:
        one.hung = True
        asyncio.get_running_loop().call_later(1, setattr, one, "hung", False)

    one = Scripted()
    calls = Calls(Replicas(a=one))
    assert text(calls.run(streamed_while(lambda: one.calls, hang))) == text_of(WHOLE)
    assert calls.counted("tasc_failovers_total", reason="silent") == 0


@pytest.mark.parametrize(
    ("a", "b", "refusal", "asked"),
    [
        ({"refuses": FULL}, {"outstanding": 5}, None, [1, 1]),
        ({"refuses": FULL}, {"refuses": SOONER}, replace(SOONER, retry_after_s=1.5), [1, 1]),
        ({"refuses": INVALID}, {"outstanding": 5}, INVALID, [1, 0]),  # for all of its version
        ({"refuses": INVALID}, NEWER | {"outstanding": ROWS}, None, [1, 1]),
        ({"refuses": INVALID}, NEWER | {"refuses": FULL}, FULL, [1, 1]),
        ({"outstanding": 5}, NEWER | {"refuses": FULL}, None, [1, 1]),
        ({"outstanding": 5}, NEWER | {"present": False}, None, [1, 0]),
        ({"outstanding": 5}, NEWER | {"dies_after": 0}, None, [1, 1]),
    ],
)
def test_refused_call_is_retried_on_a_replica_with_a_possibly_different_version(
    a, b, refusal, asked
):
    replicas = Replicas(a=Scripted(**a), b=Scripted(**b))
    calls = Calls(replicas)
    items = calls.run(streamed)
    assert items == [refusal] if refusal else text(items) == text_of(WHOLE)
    assert [len(r.calls) for r in replicas.all.values()] == asked
    died = sum(bool(r.calls) and not r.present for r in replicas.all.values())
    assert calls.counted("tasc_failovers_total", reason="died") == died


def test_answer_is_never_continued_by_another_version_of_the_task() -> None:
    replicas = Replicas(a=Scripted(dies_after=4, record_version=2), b=Scripted(outstanding=5))
    *pieces, last = Calls(replicas).run(streamed)
    assert text(pieces) == text_of(WHOLE[:4])
    assert isinstance(last, Refusal)
    assert last.kind == "changed"
    assert not replicas.all["b"].calls


def test_new_call_goes_to_the_newest_version_with_free_rows() -> None:
    replicas = Replicas(
        a=Scripted(refuses=INVALID),
        b=Scripted(record_version=2, outstanding=ROWS - 1),
        c=Scripted(),
    )
    for _ in range(3):
        assert text(Calls(replicas).run(streamed)) == text_of(WHOLE)
    assert [len(r.calls) for r in replicas.all.values()] == [0, 3, 0]


def test_first_new_replica_of_a_rolling_update_gets_only_its_share() -> None:
    asked = 4 * ROWS
    replicas = Replicas(new=Scripted(record_version=2), **{name: Scripted() for name in "abc"})
    held: dict[str, int] = {}

    async def many(failover: Failover) -> None:
        while not all(replicas.fleet.pick(replicas.all.keys() - {name}, None) for name in "abc"):
            await asyncio.sleep(0.01)
        with ExitStack() as calls:
            for _ in range(asked):
                chosen, served = replicas.fleet.pick((), None), replicas.fleet.status
                assert chosen
                assert served
                assert served.record_version == chosen.record_version
                calls.enter_context(chosen.call())
                held[chosen.name] = held.get(chosen.name, 0) + 1

    Calls(replicas).run(many)
    assert held == {"new": ROWS, "a": ROWS, "b": ROWS, "c": ROWS}


@pytest.mark.parametrize(("settings", "asks"), [({"max_retries": 1}, 2), ({"budget": 1}, 2)])
def test_retries_are_bounded_and_counted(settings: dict[str, int], asks: int) -> None:
    replicas = Replicas(**{name: Scripted(dies_after=2) for name in "abcd"})
    calls = Calls(replicas, **settings)
    with pytest.raises(ApiError) as gave_up:
        calls.run(streamed)
    assert gave_up.value.status == 503
    assert sum(len(r.calls) for r in replicas.all.values()) == asks
    assert calls.counted("tasc_failovers_refused_total") == 1


def test_call_without_any_replica_times_out_with_the_tasks_name() -> None:
    with refused(ApiError, TASK):
        Calls(Replicas(a=Scripted(present=False))).run(streamed)


def test_replica_that_starts_during_the_wait_takes_the_call() -> None:
    old, new = Scripted(dies_after=2), Scripted(present=False)
    starts = streamed_while(lambda: not old.present, lambda: setattr(new, "present", True))
    calls = Calls(Replicas(a=old, b=new), no_replica_timeout_s=20)
    assert text(calls.run(starts)) == text_of(WHOLE)


def test_error_other_than_a_lost_replica_is_raised() -> None:
    class Broken(Replicas):
        async def complete(self, replica: str, call: Request) -> Output | Refusal:
            raise KeyError("a bug")

    with pytest.raises(KeyError):
        Calls(Broken(a=Scripted())).run(lambda failover: failover.complete(CALL))


def test_calls_go_to_the_least_loaded_replica() -> None:
    async def three(failover: Failover) -> None:
        while not all(replicas.fleet.pick({other}, None) for other in "ab"):
            await asyncio.sleep(0.01)
        await asyncio.gather(*(streamed(failover) for _ in range(3)))

    replicas = Replicas(a=Scripted(outstanding=1), b=Scripted(outstanding=0))
    Calls(replicas).run(three)
    assert [len(r.calls) for r in replicas.all.values()] == [1, 2]


def test_closed_stream_cancels_its_call_to_the_replica() -> None:
    async def leave(failover: Failover) -> None:
        async with aclosing(failover.stream(CALL)) as items:
            await anext(items)

    replicas = Replicas(a=Scripted())
    Calls(replicas).run(leave)
    assert replicas.all["a"].calls
    assert replicas.all["a"].open == 0


def test_retry_budget_is_earned_by_calls_up_to_its_burst() -> None:
    budget = RetryBudget(share=0.5, size=2)
    assert [budget.spend() for _ in range(3)] == [True, True, False]
    budget.earn()
    assert not budget.spend()
    budget.earn()
    assert budget.spend()
    for _ in range(100):
        budget.earn()
    assert [budget.spend() for _ in range(3)] == [True, True, False]


def test_all_calls_to_a_dying_replica_move_to_another_replica() -> None:
    async def many(failover: Failover) -> list[list[Output | Refusal]]:
        hanging = [asyncio.create_task(streamed(failover)) for _ in range(5)]
        while replicas.all["a"].open < 5:
            await asyncio.sleep(0.01)
        dying = replicas.fleet.pick((), None)
        assert dying is not None
        replicas.all["b"].present = True
        for _ in range(2):  # two calls may report the same loss
            dying.give_up("died")
        return await asyncio.gather(*hanging)

    replicas = Replicas(a=Scripted(hangs_after=3), b=Scripted(present=False))
    calls = Calls(replicas, no_replica_timeout_s=20)
    assert [text(items) for items in calls.run(many)] == [text_of(WHOLE)] * 5
    assert calls.counted("tasc_failovers_total", reason="died") == 5


def test_call_to_a_hanging_stopping_replica_moves_to_another() -> None:
    one = Scripted(hangs_after=3)
    calls = Calls(Replicas(a=one, b=Scripted(outstanding=5)))
    stops = streamed_while(lambda: one.hung, lambda: setattr(one, "stopping", True))
    assert text(calls.run(stops)) == text_of(WHOLE)
    assert calls.counted("tasc_failovers_total", reason="silent") == 1


@pytest.mark.parametrize("retry_after_s", [0.5, 7.0])
@pytest.mark.parametrize("pieces", [0, 4])
def test_admitted_stream_waits_for_a_free_replica_without_busy_retries(retry_after_s, pieces):
    def end_in_5_s() -> None:
        asyncio.get_running_loop().call_later(5, setattr, other, "refuses", None)

    full = Refusal("full", "no place", None, retry_after_s)
    other = Scripted(outstanding=5, refuses=full)
    calls = Calls(Replicas(a=Scripted(dies_after=pieces), b=other))
    assert text(calls.run(streamed_while(lambda: other.calls, end_in_5_s))) == text_of(WHOLE)
    assert len(other.calls) <= 12


def test_failover_time_is_measured_until_the_next_tokens_not_until_admission() -> None:
    async def one_of_two(failover: Failover) -> list[Output | Refusal]:
        call = structs.replace(CALL, stream=True, n=2)
        async with aclosing(failover.stream(call)) as items:
            return [item async for item in items]

    replicas = Replicas(a=Scripted(dies_after=0), b=Scripted(outstanding=5, answers_after_s=2))
    calls = Calls(replicas)
    assert text(calls.run(one_of_two)) == text_of(WHOLE)
    assert calls.counted("tasc_failover_seconds_sum") >= 2


def test_stopping_replica_finishes_its_long_answers() -> None:
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


def test_late_loss_report_does_not_remove_a_replica_that_answered_since() -> None:
    replica = SeenReplica("a")
    late = ReplicaLost("a", "died")
    replica.on_heartbeat(ReplicaState(status(), 0, 0.0), 5.0)
    replica.give_up(late.reason, late.at)
    assert not replica.gone
    replica.give_up(late.reason, ReplicaLost("a", "died").at)
    assert replica.gone == "died"
