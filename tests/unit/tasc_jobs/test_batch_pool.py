"""Whose fault it is that engines end: their machine's, or that of the job they were given."""

import pytest
from ray.exceptions import ActorDiedError, RayError, RayTaskError

from tasc_engine.errors import UnsupportedModel
from tasc_jobs.batch import pool as pools
from tasc_jobs.batch.errors import EngineFailed
from tasc_jobs.batch.pool import EngineSpec, Pool
from tasc_jobs.batch.window import Window
from tasc_jobs.errors import ClusterError, JobError
from tasc_serve.errors import ServeError
from tasc_serve.settings import EngineSettings
from tasc_serve.worker import Pinned
from tasc_store import StoreUnreachable


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Pool:
    monkeypatch.setattr(pools.ray, "kill", lambda actor: None)
    spec = EngineSpec("url", "t", Pinned(1, None), EngineSettings(), None, "job", 0.0, 1.0)
    return Pool(spec, 1, 1.0, lambda rows: None)


def ended(pool: Pool, error: RayError, monkeypatch: pytest.MonkeyPatch, *, up: bool) -> JobError:
    """What comes of engines that end so, one after another."""

    def get(call: object) -> object:
        raise error

    monkeypatch.setattr(pools.ray, "get", get)
    window = Window(iter(()), 0, (), 1)
    for _ in range(20):
        pool._engines.append(engine := pools._Engine(None, ["call"], up=up))
        try:
            pool._hear(engine, "call", window)
        except JobError as found:
            return found
    pytest.fail("engines may end for ever")


def task_error(cause: Exception | None = None) -> RayTaskError:
    return RayTaskError("load", "why", cause or ValueError("no such model"))


@pytest.mark.parametrize(
    ("error", "up", "machines"),
    [
        (ActorDiedError(), False, True),
        (ActorDiedError(), True, False),
        (task_error(), False, True),
        (task_error(), True, False),
        (task_error(ServeError("registered with another tokenizer")), False, False),
        (task_error(UnsupportedModel("int8 with outliers")), False, False),
        (task_error(StoreUnreachable("no Redis answers")), True, True),
    ],
)
def test_an_engine_that_never_comes_up_or_loses_the_store_is_nobodys_fault_but_its_machines(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, error: RayError, up: bool, machines: bool
) -> None:
    found = ended(pool, error, monkeypatch, up=up)
    assert isinstance(found, EngineFailed) == isinstance(found, ClusterError) == machines
    assert "without a row between" in str(found)


def test_a_cluster_without_a_node_is_at_fault(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools.ray, "nodes", lambda: [{"Alive": False}])
    pool._look_at = 0.0
    with pytest.raises(ClusterError, match="no node left"):
        pool._require_nodes()
