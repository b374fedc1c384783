"""Watches the store for a newer record of a running engine's task, and has it answer by that.

A record that needs another engine is logged and waits for a restart; a store that is away changes
nothing.
"""

import logging
import threading

from tasc_engine.errors import GuideError
from tasc_serve.asked import guide_of
from tasc_serve.records import MOST_KNOWN
from tasc_serve.worker import Worker
from tasc_store import StoreError, TaskRecord, TaskStore

log = logging.getLogger(__name__)


class RecordWatcher:
    """A thread that brings new versions of ``worker``'s record into it.

    Requests that are read from then on see the new version; those that were read keep theirs.

    Args:
        poll_s: Longest time until a new version is seen.
    """

    def __init__(self, worker: Worker, tasks: TaskStore, poll_s: float) -> None:
        self._worker, self._tasks, self._poll_s = worker, tasks, poll_s
        self._name = worker.record.name
        self._seen = worker.record_version
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
                self._look()
                failing = False
            except (StoreError, ValueError) as error:  # a record may be unreadable, or gone
                if not failing:
                    log.warning("no new record of the task, it stays as it is: %s", error)
                failing = True
            self._stopped.wait(self._poll_s)

    def _remember(self, version: int) -> None:
        """An answer may have been begun by it, on a replica that is gone or saw it sooner."""
        try:
            record = self._tasks.get(self._name, version)
            if version > self._worker.record_version:  # it is the newest until the next one is
                self._prepare(record)
            self._worker.records.add(record, version)
        except ValueError:  # unreadable, or of another engine: nobody here can end it
            log.debug("version %d of task %s is not remembered", version, self._name)

    def _look(self) -> None:
        version = self._tasks.versions(self._name)[-1]
        if version == self._seen:
            return
        record = self._tasks.get(self._name, version)
        for between in range(max(self._seen + 1, version - MOST_KNOWN + 1), version):
            self._remember(between)
        self._seen = version
        now = self._worker.record_version
        if version < now:
            log.error("task %s was made anew; restart the service to serve it", self._name)
            return
        if differing := self._worker.records.needs_restart(record):
            log.warning(
                "version %d of task %s changes %s; restart the service to use it, version %d stays "
                "in use", version, self._name, ", ".join(differing), now,
            )  # fmt: skip
            return
        try:
            self._prepare(record)
        except GuideError as error:
            log.error(
                "version %d of task %s cannot be used, version %d stays in use: %s",
                version, self._name, now, error,
            )  # fmt: skip
            return
        self._worker.records.add(record, version)
        log.info("task %s is served by version %d of its record", self._name, version)

    def _prepare(self, record: TaskRecord) -> None:
        """Compile its guide, here, where nobody waits. Raises GuideError."""
        if guide := guide_of(record):
            self._worker.engine.guides.of(guide.spec, self._worker.engine.longest)
