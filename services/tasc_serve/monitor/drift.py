"""Compares tokens per step of a new draft index with those of the one before, and goes back.

A version is judged once, by as many forwards of rows as it was before; slow changes are for alerts.
It swaps no index: it moves the store's pointer, which every replica follows.
"""

import logging
from collections import deque
from dataclasses import dataclass, field

from tasc_engine import StepRecord
from tasc_serve.metrics.replica_metrics import DriftMetrics
from tasc_serve.settings import RollbackSettings
from tasc_store import Artifact, ArtifactStore, UnknownVersion

log = logging.getLogger(__name__)

_BLOCKS = 20  # that a window is forgotten in


@dataclass
class DriftWindow:
    """Tokens per step over the last so many forwards of rows, or a few more.

    Attributes:
        wanted: Forwards of rows that are enough.
    """

    wanted: int
    _blocks: deque[list[int]] = field(default_factory=deque)
    _tokens: int = 0
    _row_steps: int = 0

    def add(self, tokens: int, row_steps: int) -> None:
        if not self._blocks or self._blocks[-1][1] * _BLOCKS >= self.wanted:
            self._blocks.append([0, 0])
        newest = self._blocks[-1]
        newest[0] += tokens
        newest[1] += row_steps
        self._tokens += tokens
        self._row_steps += row_steps
        while self._row_steps - self._blocks[0][1] >= self.wanted:
            old = self._blocks.popleft()
            self._tokens -= old[0]
            self._row_steps -= old[1]

    @property
    def full(self) -> bool:
        return self._row_steps >= self.wanted

    @property
    def tokens_per_step(self) -> float:
        return self._tokens / self._row_steps if self._row_steps else 0.0


@dataclass(frozen=True)
class _Judged:
    """A version, and what it brought."""

    version: int
    tokens_per_step: float


class DriftGuard:
    """Watches what one replica drafts.

    `observe` and `swapped` are called on the engine's thread, and never wait; `act` on another.
    """

    def __init__(
        self, store: ArtifactStore, settings: RollbackSettings, metrics: DriftMetrics
    ) -> None:
        self._store, self._settings, self._metrics = store, settings, metrics
        self._version: int | None = None
        self._window = DriftWindow(settings.row_steps)
        self._before: _Judged | None = None
        self._fallen: tuple[_Judged, _Judged] | None = None

    def swapped(self, artifact: Artifact | None) -> None:
        """Another index is drafted from, or the same by another target or proposer.

        Args:
            artifact: None: none is, when the replica starts without one.
        """
        self._metrics.expect(artifact.forecast if artifact else None)
        self._metrics.built(artifact.created_at if artifact else None)
        if self._version is not None and self._window.full:
            self._before = _Judged(self._version, self._window.tokens_per_step)
        version = artifact.version if artifact else None
        same, self._version = version == self._version, version
        self._window, self._fallen = DriftWindow(self._settings.row_steps), None
        # What another target or proposer brings is no fault of the index; an older one is in use
        # since somebody went back to it.
        if self._before and (same or (version or 0) <= self._before.version):
            self._before = None

    def observe(self, record: StepRecord) -> None:
        """What a step did."""
        self._window.add(record.emitted_tokens, record.row_steps)
        if self._before is None or self._version is None or not self._window.full:
            return
        before, now = self._before, _Judged(self._version, self._window.tokens_per_step)
        self._before = None
        drop = self._settings.drop
        if drop and now.tokens_per_step < (1 - drop) * before.tokens_per_step:
            self._fallen = (before, now)

    def act(self) -> None:
        """Go back where tokens per step have fallen; of all replicas the first one does it.

        Raises:
            StoreError: Redis fails; it is tried again at the next call.
        """
        if (fallen := self._fallen) is None:
            return
        before, now = fallen
        try:
            done = self._store.roll_back(now.version, before.version)
        except UnknownVersion as error:
            log.warning("index %d drafts worse and stays in use: %s", now.version, error)
            done = False
        if done:
            self._metrics.rolled_back()
            log.warning(
                "index %d was rolled back to %d: tokens per step fell from %.3f to %.3f over %d "
                "forwards of rows; `tasc index use %s %d` brings it back for good",
                now.version, before.version, before.tokens_per_step, now.tokens_per_step,
                self._settings.row_steps, self._store.task, now.version,
            )  # fmt: skip
        if self._fallen is fallen:  # not if another index came meanwhile
            self._fallen = None
