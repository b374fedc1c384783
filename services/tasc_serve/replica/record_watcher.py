"""Watches the store for a newer record or draft index of a running engine's task, and installs it.

What a version needs is built beside the steps and installed between two of them. A record that
needs another engine is logged and waits for a restart. A store that is away, or an index that does
not fit, changes nothing and is logged.
"""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from typing import TypeVar

from tasc_draft import DraftIndex, NgramProposer
from tasc_engine import Target
from tasc_engine.errors import GuideError
from tasc_runtime.engine.builder import EngineBuilder
from tasc_runtime.engine.versions import MOST_KNOWN
from tasc_runtime.errors import ServiceError, StaleProposer
from tasc_runtime.sampling_options import guide_of
from tasc_serve.replica.step_loop import EngineLoop
from tasc_store import Artifact, TaskRecord, TaskStore

log = logging.getLogger(__name__)


class IndexWatcher:
    """A thread that swaps ``builder`` to each newly announced index.

    Args:
        poll_s: Longest time until a new version is seen when its announcement was lost.
        on_swap: Called with the artifact once the engine drafts from it.
    """

    def __init__(
        self,
        builder: EngineBuilder,
        loop: EngineLoop,
        poll_s: float,
        on_swap: Callable[[Artifact], None],
    ) -> None:
        self._builder = builder
        self._loop = loop
        self._poll_s = poll_s
        self._on_swap = on_swap
        self._stopped = threading.Event()
        self._failed = False
        self._seen = builder.artifact.version if builder.artifact else None
        self._thread = threading.Thread(target=self._run, name="index-watcher", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stopped.set()
        self._thread.join(2 * self._poll_s)

    def _run(self) -> None:
        failing = False
        while not self._stopped.is_set():
            try:
                self._look()
                failing = False
            except Exception as error:  # whatever it is, later versions must still be seen
                if not failing:
                    log.warning("no new draft index yet, the old one stays in use: %s", error)
                failing = True
                self._stopped.wait(self._poll_s)

    def _look(self) -> None:
        if self._failed:
            self._stopped.wait(self._poll_s)
            self._failed = False
        artifact = self._builder.indexes.store.wait(self._seen, self._poll_s)
        if artifact is None:
            return
        try:
            index = self._builder.indexes.fetch(artifact)
            proposer = self._builder.proposer_for(self._builder.record, index)
        except (ServiceError, ValueError):
            log.exception("a new draft index does not fit; the old one stays in use")
            self._seen = artifact.version
        else:
            # Not before: what could not be fetched is tried again, what does not fit is not.
            self._seen = artifact.version
            self._loop.between_steps(partial(self._swap, artifact, index, proposer))

    def _swap(self, artifact: Artifact, index: DraftIndex, proposer: NgramProposer | None) -> None:
        try:
            self._builder.swap(artifact, index, proposer)
        except Exception as error:
            self._seen, self._failed = None, True  # it is fetched and tried again
            if isinstance(error, StaleProposer):
                return  # the task's record was faster
            raise
        self._on_swap(artifact)


AGAIN_S = 60.0  # until what could not be loaded is tried again, twice that the next time
_MOST_AGAIN_S = 3600.0
_TAKES = 3  # proposers made for one version; index and record both change, but not that often

T = TypeVar("T")


class RecordWatcher:
    """A thread that brings new versions of ``builder``'s record into it.

    Requests that are read from then on see the new version; those that were read keep theirs. Of
    two versions with different adapters the older's are freed once ``keep_s`` are over and nobody
    is answered by them. A third one's are not loaded before; for those the older's are freed
    sooner, as soon as nobody here is answered by them, if the third one's files look right.

    Args:
        poll_s: Longest time until a new version is seen.
        keep_s: Longest time that an answer takes, so that another replica's can be ended here.
        on_change: Called between two steps when other weights answer, or others draft.
    """

    def __init__(
        self,
        builder: EngineBuilder,
        loop: EngineLoop,
        tasks: TaskStore,
        poll_s: float,
        keep_s: float,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._builder, self._loop, self._tasks = builder, loop, tasks
        self._poll_s, self._keep_s, self._on_change = poll_s, keep_s, on_change
        self._name = builder.record.name
        self._seen = builder.record_version
        self._failed, self._again, self._wait_s = 0, 0.0, 0.0
        self._leaving: dict[int, float] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="record-watcher", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stopped.set()
        self._thread.join(2 * self._poll_s)

    def _run(self) -> None:
        failing = False
        older = list(range(max(self._seen - MOST_KNOWN + 1, 1), self._seen))
        while not self._stopped.is_set():
            try:
                while older:
                    self._remember(older[-1])
                    older.pop()
                self._free(time.monotonic())
                self._look()
                failing = False
            except Exception as error:  # a record may be unreadable, or gone
                if not failing:
                    log.warning("no new record of the task, it stays as it is: %s", error)
                failing = True
            self._stopped.wait(self._poll_s)

    def _remember(self, version: int) -> None:
        """An answer may have been begun by it, on a replica that is gone or saw it sooner."""
        builder = self._builder
        try:
            record = self._tasks.get(self._name, version)
        except ValueError:
            log.debug("version %d of task %s is unreadable", version, self._name)
            return
        try:
            if version < builder.record_version:
                builder.records.add(record, version)
            elif builder.records.target_of(record) is not None:  # the newest until the next one is
                self._bring(record, version)
        except Exception as error:  # of another engine, say: nobody here can end it
            log.debug("version %d of task %s is not remembered: %s", version, self._name, error)

    def _look(self) -> None:
        version = self._tasks.versions(self._name)[-1]
        failed = version == self._failed and time.monotonic() < self._again
        if version == self._seen or failed:
            return
        record = self._tasks.get(self._name, version)
        for between in range(max(self._seen + 1, version - MOST_KNOWN + 1), version):
            self._remember(between)
        self._seen = version - 1
        if self._is_served(record, version):
            self._seen = version

    def _is_served(self, record: TaskRecord, version: int) -> bool:
        """Bring a version in; False where that is to be tried again."""
        records, now = self._builder.records, self._builder.record_version
        if version < now:
            log.error("task %s was made anew; restart the service to serve it", self._name)
        elif differing := records.needs_restart(record):
            log.warning(
                "version %d of task %s changes %s; restart the service to use it, version %d stays "
                "in use", version, self._name, ", ".join(differing), now,
            )  # fmt: skip
        else:
            return self._is_brought(record, version)
        return True

    def _is_brought(self, record: TaskRecord, version: int) -> bool:
        now = self._builder.record_version
        try:
            return self._bring(record, version)
        except GuideError as error:
            log.error(
                "version %d of task %s cannot be used, version %d stays in use: %s",
                version, self._name, now, error,
            )  # fmt: skip
            return True
        except Exception as error:  # whatever it is, later versions must still be seen
            if version != self._failed:
                self._failed, self._wait_s = version, AGAIN_S
                log.error(
                    "version %d of task %s cannot be used, version %d stays in use: %s; put it "
                    "right, it is tried again in %.0f s and then ever more rarely, or go back with "
                    "`tasc task use %s %d`",
                    version, self._name, now, error, AGAIN_S, self._name, now,
                )  # fmt: skip
            self._again = time.monotonic() + self._wait_s
            self._wait_s = min(2 * self._wait_s, _MOST_AGAIN_S)
            return False

    def _bring(self, record: TaskRecord, version: int) -> bool:
        """Make what a version needs, where nobody waits, and wait until it is in use.

        What takes a moment comes first: a version that cannot be used loads no model.

        Returns:
            False where another target must leave before.
        """
        builder = self._builder
        loads = builder.records.target_of(record) is None
        if loads and any(self._is_needed(target) for target in self._leaving):
            return False
        if guide := guide_of(record):
            builder.engine.guides.of(guide.spec, builder.engine.longest)
        proposer = builder.proposer_for(record, builder.proposer.index)
        if loads:
            builder.require_adapters(record)
            self._free()
            if self._leaving:
                return False
        self._put_in(record, version, builder.target_for(record), proposer)
        return True

    def _put_in(
        self,
        record: TaskRecord,
        version: int,
        target: Target | None,
        proposer: NgramProposer | None,
    ) -> None:
        takes = 1
        while True:
            try:
                self._between_steps(partial(self._take, record, version, target, proposer))
                return
            except StaleProposer:
                if (takes := takes + 1) > _TAKES:
                    raise
            proposer = self._builder.proposer_for(record, self._builder.proposer.index)

    def _take(
        self,
        record: TaskRecord,
        version: int,
        target: Target | None,
        proposer: NgramProposer | None,
    ) -> None:
        builder = self._builder
        before = builder.proposer, builder.target_number
        builder.take(record, version, target, proposer)
        if before[1] != builder.target_number:
            self._leaving[before[1]] = time.monotonic() + self._keep_s
            self._leaving.pop(builder.target_number, None)
        log.info("task %s is served by version %d of its record", self._name, version)
        if before != (builder.proposer, builder.target_number):
            self._on_change()

    def _is_needed(self, target: int) -> bool:
        """Whether somebody is answered by a target; True while the engine cannot be asked."""
        return self._between_steps(partial(self._builder.engine.answers_by, target)) is not False

    def _free(self, now: float = float("inf")) -> None:
        """Let targets go that have been kept long enough; unset: all that nobody here needs."""
        for target in [target for target, at in self._leaving.items() if at <= now]:
            if now < float("inf") or not self._is_needed(target):
                self._between_steps(partial(self._let_go, target))

    def _let_go(self, target: int) -> None:
        if self._builder.let_go(target):
            del self._leaving[target]
            log.info("task %s: the adapters of before are freed", self._name)

    def _between_steps(self, action: Callable[[], T]) -> T | None:
        """Have the engine's thread do something, and wait until it has.

        Returns:
            What it returns; None where the watcher is closed meanwhile.

        Raises:
            Exception: What it raises.
        """
        done: Future[T] = Future()

        def act() -> None:
            try:
                done.set_result(action())
            except BaseException as error:
                done.set_exception(error)

        self._loop.between_steps(act)
        while not self._stopped.is_set():
            if wait([done], self._poll_s).done:
                return done.result()
        return None
