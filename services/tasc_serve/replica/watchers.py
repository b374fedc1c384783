"""Watches the store for a newer record or draft index of a running engine's task, and installs it.

A new version is prepared while steps run, and installed between two of them. A record that needs
another engine is logged; new replicas serve it after the application is deployed again. An
unavailable store, or an index that does not fit, is logged and changes nothing.
"""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial

from tasc_draft import DraftIndex
from tasc_runtime.engine.builder import Drafting, EngineBuilder
from tasc_runtime.engine.step_loop import EngineLoop
from tasc_runtime.engine.versions import MAX_KNOWN, RecordFollower, fixed_changes
from tasc_runtime.sampling_options import guide_of
from tasc_serve.store_calls import RepeatedCall
from tasc_store import Artifact, IndexRefused, TaskRecord, TaskStore

log = logging.getLogger(__name__)

AGAIN_S = 60.0  # seconds until a record that could not be installed is tried again


class TaskWatcher:
    """Installs new indexes and record versions of a task in its ``builder``.

    Later requests use the new version of the record; earlier ones keep theirs. One change at a time
    is prepared and installed, so that no change is prepared for a state that is about to change.

    Args:
        poll_s: Maximum seconds until a new version is detected.
        on_change: Called between two steps when the index or the proposer has changed.
        look: Called on a thread of its own, now and after each period; it may take seconds.
    """

    def __init__(
        self,
        builder: EngineBuilder,
        loop: EngineLoop,
        tasks: TaskStore,
        poll_s: float,
        on_change: Callable[[], None] = lambda: None,
        look: Callable[[], None] = lambda: None,
    ) -> None:
        self._builder, self._loop, self._tasks = builder, loop, tasks
        self._poll_s, self._on_change = poll_s, on_change
        self._name = builder.record.name
        self._index = builder.artifact.version if builder.artifact else None
        self._known = builder.record_version
        self._older = list(range(max(self._known - MAX_KNOWN + 1, 1), self._known))
        self._stopped, self._changing = threading.Event(), threading.Lock()
        self._records = RecordFollower(
            tasks,
            self._name,
            builder.records.newest,
            self._use_record,
            lambda: builder.record_version,
            log.error,
            AGAIN_S,
        )
        polls = {"record": self._poll_record, "index": self._poll_index, "labels": look}
        self._polling = [
            RepeatedCall(f"polling the task's {name}", poll, poll_s) for name, poll in polls.items()
        ]

    def close(self) -> None:
        self._stopped.set()
        for polling in self._polling:
            polling.close(2 * self._poll_s)

    def _poll_index(self) -> None:
        artifact = self._builder.indexes.store.current()
        if artifact is None or artifact.version == self._index:
            return
        try:
            index = self._builder.indexes.fetch(artifact)  # takes minutes if it is large
            with self._changing:
                proposer = self._builder.proposer_for(self._builder.record, index)
                self._between_steps(partial(self._swap, artifact, index, proposer))
        except (IndexRefused, ValueError):  # it can never fit; other errors may be temporary
            log.exception("a new draft index does not fit; the old one stays in use")
        self._index = artifact.version

    def _swap(self, artifact: Artifact, index: DraftIndex, proposer: Drafting | None) -> None:
        self._builder.swap(artifact, index, proposer)
        self._on_change()

    def _poll_record(self) -> None:
        with self._changing:
            while self._older:
                self._remember(self._older[-1])
                self._older.pop()
            self._records.poll()

    def _remember(self, version: int) -> None:
        """Keeps a version, as another replica may have begun an answer with it."""
        builder = self._builder
        try:
            record = self._tasks.get(self._name, version)
        except ValueError:
            log.debug("version %d of task %s is unreadable", version, self._name)
            return
        try:
            if version < builder.record_version:
                builder.records.add(record, version)
            else:  # newer than the version in use, which it replaces
                self._install(record, version)
        except Exception as error:  # for example, the version needs another engine
            log.debug("version %d of task %s is not remembered: %s", version, self._name, error)

    def _use_record(self, record: TaskRecord, version: int) -> None:
        """Installs a version if this engine can use it; remembers versions that polls missed."""
        for between in range(max(self._known + 1, version - MAX_KNOWN + 1), version):
            self._remember(between)
        self._known = version - 1
        now = self._builder.record_version
        if version < now or (version == now and record != self._builder.record):
            log.error(
                "task %s was deleted and created again; deploy the application again to serve it",
                self._name,
            )
        elif changes := fixed_changes(self._builder.record, record):
            log.warning(
                "version %d of task %s changes %s, which needs new replicas; version %d stays in "
                "use here until the application is deployed again (`tasc serve` redeploys "
                "automatically)",
                version,
                self._name,
                ", ".join(changes),
                now,
            )
        elif version > now:
            self._install(record, version)
        self._known = version

    def _install(self, record: TaskRecord, version: int) -> None:
        """Prepares a version on this thread, and waits until it is in use."""
        builder = self._builder
        if changes := fixed_changes(builder.record, record):
            raise ValueError(f"it changes {', '.join(changes)}")
        if guide := guide_of(record):
            builder.engine.guides.of(guide)
        proposer = builder.proposer_for(record, builder.proposer.index)
        self._between_steps(partial(self._take, record, version, proposer))

    def _take(self, record: TaskRecord, version: int, proposer: Drafting | None) -> None:
        self._builder.take(record, version, proposer)
        log.info("task %s is served by version %d of its record", self._name, version)
        if proposer:
            self._on_change()

    def _between_steps(self, action: Callable[[], None]) -> None:
        """Runs an action on the engine's thread, and waits until it is done or `close` is called.

        Raises:
            Exception: Any error of the action.
        """
        done: Future[None] = Future()

        def act() -> None:
            try:
                action()
            except BaseException as error:
                done.set_exception(error)
            else:
                done.set_result(None)

        self._loop.between_steps(act)
        while not self._stopped.is_set():
            if wait([done], self._poll_s).done:
                done.result()
                return
