"""Engines in Ray actors: started, kept busy, and replaced when they die.

Nothing here waits for an engine that is not there: rows go to those that are up, and a cluster with
room for few has few. It knows no results: what an engine tells as saved is passed on.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from tasc_engine.errors import UnsupportedModel
from tasc_jobs.batch.answering import Answering
from tasc_jobs.batch.errors import EngineFailed
from tasc_jobs.batch.preview import Preview, measure
from tasc_jobs.batch.window import Saved, Window
from tasc_jobs.batch.work import Row, Strategy
from tasc_jobs.errors import ClusterError, JobError
from tasc_runtime.engine.builder import EngineBuilder, Pinned
from tasc_runtime.engine_settings import EngineSettings
from tasc_runtime.errors import ServiceError
from tasc_store import JobResults, StoreError, connect

_IN_FLIGHT = 2  # calls to an engine: one that it works on and one that waits for it
_HANDFULS = 4  # of b rows, in one call
_MOST_DEATHS = 3  # of each engine, one after another, without a row saved between
_PAUSE_S = 1.0  # before an engine is replaced
_LOOK_S = 5.0  # at the cluster's nodes, while no engine is up
_TASKS = (ServiceError, UnsupportedModel)  # an engine that fails so fails on every machine
_MOST_CALLS = 1 << 20  # waiting in an engine; few rows are given at a time


@dataclass(frozen=True)
class EngineSpec:
    """What an actor builds its engine of."""

    url: str
    task: str
    pinned: Pinned
    settings: EngineSettings
    strategy: Strategy
    job: str
    gpus: float
    store_wait_s: float


class EngineActor:
    """One engine in a process of its own."""

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec

    def load(self) -> None:
        """Build the engine: seconds to minutes."""
        spec, client = self._spec, connect(self._spec.url)
        self._builder = EngineBuilder(
            client, spec.task, spec.settings,
            gpus=spec.gpus, max_waiting=_MOST_CALLS, pinned=spec.pinned,
        )  # fmt: skip
        results = JobResults(client, spec.task, spec.job)
        self._answering = Answering(self._builder, spec.strategy, results, spec.store_wait_s)

    def work(self, rows: Sequence[Row]) -> list[Saved]:
        return self._answering.work(rows)

    def preview(self, rows: Sequence[Row]) -> Preview:
        return measure(self._builder, self._spec.strategy, rows)


@dataclass
class _Engine:
    actor: Any
    calls: list[Any] = field(default_factory=list)
    held: set[int] = field(default_factory=set)
    up: bool = False


class Pool:
    """Up to ``size`` engines.

    Args:
        lost: Told the rows an engine had when it died; which of them are saved it did not say.
    """

    def __init__(
        self, spec: EngineSpec, size: int, cpus: float, lost: Callable[[set[int]], None]
    ) -> None:
        self._spec, self._size, self._lost = spec, size, lost
        self._new = ray.remote(num_cpus=cpus, num_gpus=spec.gpus, max_restarts=0)(EngineActor)
        self._engines: list[_Engine] = []
        self._handful = _HANDFULS * spec.settings.rows
        self._deaths = 0
        self._start_at = 0.0
        self._look_at = time.monotonic() + _LOOK_S

    @property
    def up(self) -> int:
        return sum(engine.up for engine in self._engines)

    @property
    def held(self) -> int:
        return sum(len(engine.held) for engine in self._engines)

    def turn(self, window: Window, wait_s: float) -> bool:
        """Hand out rows, then hear what was saved, waiting at most so long; whether any was, or an
        engine has come up.

        Raises:
            JobError: Engines died again and again.
            EngineFailed: They cannot be built, or died without the store.
            ClusterError: Ray is gone.
        """
        self._require_nodes()
        self._fill()
        for engine in self._engines:
            self._feed(engine, window)
        owners = {call: engine for engine in self._engines for call in engine.calls}
        if not owners:
            time.sleep(wait_s)
            return False
        done, _ = ray.wait(list(owners), num_returns=1, timeout=wait_s)
        done, _ = ray.wait(list(owners), num_returns=len(owners), timeout=0) if done else (done, [])
        heard = [self._hear(owners[call], call, window) for call in done]
        return any(heard)

    def preview(self, rows: Sequence[Row], timeout_s: float) -> Preview:
        """Time a few rows on one engine.

        Raises:
            JobError: It cannot be built, or it takes longer.
        """
        actor: Any = self._new.remote(self._spec)
        self._engines.append(_Engine(actor))
        loading = actor.load.remote()
        try:
            return ray.get([loading, actor.preview.remote(rows)], timeout=timeout_s)[1]
        except ray.exceptions.GetTimeoutError as error:
            raise JobError(f"no engine answered {len(rows)} rows in {timeout_s:g} s") from error
        except RayError as error:
            raise JobError(f"no engine can be built: {_cause(error)}") from error

    def close(self) -> None:
        """End all engines; what they have not saved is lost."""
        for engine in self._engines:
            with suppress(RayError):
                ray.kill(engine.actor)
        self._engines.clear()

    def _require_nodes(self) -> None:
        if self.up or time.monotonic() < self._look_at:
            return
        self._look_at = time.monotonic() + _LOOK_S
        if not any(node["Alive"] for node in ray.nodes()):
            raise ClusterError(
                "Ray has no node left that lives; start Ray anew and run the job again, which goes"
                " on where it was"
            )

    def _fill(self) -> None:
        if time.monotonic() < self._start_at:
            return
        while len(self._engines) < self._size:
            actor: Any = self._new.remote(self._spec)
            self._engines.append(_Engine(actor, [actor.load.remote()]))

    def _feed(self, engine: _Engine, window: Window) -> None:
        most = (_IN_FLIGHT + 1) * self._handful
        while engine.up and len(engine.calls) < _IN_FLIGHT:
            rows = window.take(min(self._handful, most - len(engine.held)))
            if not rows and (engine.calls or not engine.held):
                return
            engine.held.update(row.ordinal for row in rows)
            engine.calls.append(engine.actor.work.remote(rows))

    def _hear(self, engine: _Engine, call: Any, window: Window) -> bool:
        if call not in engine.calls:  # its engine died with another call
            return False
        engine.calls.remove(call)
        try:
            saved = ray.get(call)
        except RayError as error:
            self._bury(engine, error)
            return False
        if saved is None:
            engine.up = True
            return True
        engine.held.difference_update(each.ordinal for each in saved)
        new = window.save(saved)
        self._deaths = 0 if new else self._deaths
        return bool(saved)

    def _bury(self, engine: _Engine, error: RayError) -> None:
        self._engines.remove(engine)
        engine.calls.clear()
        with suppress(RayError):
            ray.kill(engine.actor)
        self._deaths += 1
        if self._deaths >= _MOST_DEATHS * self._size:
            machines = (not engine.up and not _is(error, _TASKS)) or _is(error, StoreError)
            raise (EngineFailed if machines else JobError)(
                f"engines ended {self._deaths} times without a row between: {_cause(error)}; see to"
                " it and run the job again, which goes on where it was"
            ) from error
        self._start_at = time.monotonic() + _PAUSE_S
        self._lost(engine.held)


def _is(error: RayError, kinds: type[Exception] | tuple[type[Exception], ...]) -> bool:
    return isinstance(error, RayTaskError) and isinstance(error.cause, kinds)


def _cause(error: RayError) -> str:
    """What the engine said, without the way it took."""
    if isinstance(error, RayTaskError) and isinstance(error.cause, Exception):
        return f"{type(error.cause).__name__}: {error.cause}"
    return str(error).strip().splitlines()[-1]
