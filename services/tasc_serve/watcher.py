"""Watches the store for a newer draft index and brings it into a running engine.

A store that is away, or an index that does not fit, leaves the old index in use and is logged.
"""

import logging
import threading
from collections.abc import Callable
from functools import partial

from tasc_draft import DraftIndex, NgramProposer
from tasc_serve.errors import ServeError, StaleProposer
from tasc_serve.loop import EngineLoop
from tasc_serve.worker import Worker
from tasc_store import Artifact

log = logging.getLogger(__name__)


class IndexWatcher:
    """A thread that swaps ``worker`` to each newly announced index.

    Args:
        poll_s: Longest time until a new version is seen when its announcement was lost.
        on_swap: Called with the artifact once the engine drafts from it.
        each_round: Called on the watcher's thread before it looks; goes back to an older index
            where it should. Whatever it raises is logged, and it is called again.
    """

    def __init__(
        self,
        worker: Worker,
        loop: EngineLoop,
        poll_s: float,
        on_swap: Callable[[Artifact], None],
        each_round: Callable[[], None] = lambda: None,
    ) -> None:
        self._worker = worker
        self._loop = loop
        self._poll_s = poll_s
        self._on_swap = on_swap
        self._each_round = each_round
        self._stopped = threading.Event()
        self._failed = self._round_failing = False
        self._seen = worker.artifact.version if worker.artifact else None
        self._thread = threading.Thread(target=self._run, name="index-watcher", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stopped.set()
        self._thread.join(2 * self._poll_s)

    def _run(self) -> None:
        failing = False
        while not self._stopped.is_set():
            self._act()
            try:
                self._look()
                failing = False
            except Exception as error:  # whatever it is, later versions must still be seen
                if not failing:
                    log.warning("no new draft index yet, the old one stays in use: %s", error)
                failing = True
                self._stopped.wait(self._poll_s)

    def _act(self) -> None:
        try:
            self._each_round()
            self._round_failing = False
        except Exception as error:  # whatever it is, later versions must still be seen
            if not self._round_failing:
                log.warning("an index was not rolled back, the new one stays in use: %s", error)
            self._round_failing = True

    def _look(self) -> None:
        if self._failed:
            self._stopped.wait(self._poll_s)
            self._failed = False
        artifact = self._worker.indexes.store.wait(self._seen, self._poll_s)
        if artifact is None:
            return
        try:
            index = self._worker.indexes.fetch(artifact)
            proposer = self._worker.proposer_for(self._worker.record, index)
        except (ServeError, ValueError):
            log.exception("a new draft index does not fit; the old one stays in use")
            self._seen = artifact.version
        else:
            # Not before: what could not be fetched is tried again, what does not fit is not.
            self._seen = artifact.version
            self._loop.between_steps(partial(self._swap, artifact, index, proposer))

    def _swap(self, artifact: Artifact, index: DraftIndex, proposer: NgramProposer | None) -> None:
        try:
            self._worker.swap(artifact, index, proposer)
        except Exception as error:
            self._seen, self._failed = None, True  # it is fetched and tried again
            if isinstance(error, StaleProposer):
                return  # the task's record was faster
            raise
        self._on_swap(artifact)
