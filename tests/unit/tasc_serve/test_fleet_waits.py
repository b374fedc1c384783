import asyncio

import pytest

from tasc_serve.fleet import ReplicaLost, SeenReplica


@pytest.mark.parametrize("turns", range(5))
def test_who_waits_for_a_lost_replica_ends_once_however_often_it_is_given_up(turns):
    replica = SeenReplica("a")

    async def wait() -> None:
        async with replica.wait():
            await asyncio.sleep(60)

    async def lose_again() -> None:
        replica.give_up("died")
        waiting = asyncio.create_task(wait())
        for _ in range(turns):  # each turn of the loop is another state of the wait
            await asyncio.sleep(0)
        replica.give_up("died")
        with pytest.raises(ReplicaLost):
            await waiting

    asyncio.run(lose_again())
